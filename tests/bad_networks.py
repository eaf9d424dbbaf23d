"""Bad networks between two hosts (:mod:`tests.hosts`): slow, with losses, or one that holds everything."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.hosts import Host

SLOW = ("tbf", "rate", "2mbit", "burst", "8kbit", "latency", "300ms")
"""A queue of the kernel's traffic control."""
LOST = 0.1
"""Part of the packets that is lost, in each direction."""
# Classic BPF: load a random word; below the bound return -1 (it matches), otherwise 0.
LOSES = f"4,32 0 0 4294963256,53 1 0 {round(LOST * 2**32)},6 0 0 4294967295,6 0 0 0"
"""A packet filter that matches :data:`LOST` of all packets. Rejected: netem, which many kernels lack."""


@contextmanager
def slow_network(hosts: Sequence[Host]) -> Iterator[None]:
    """2 Mbit/s in packets of 576 bytes."""
    with _queues(hosts, SLOW):
        for host in hosts:
            host.run("ip", "link", "set", "wire", "mtu", "576")
        try:
            yield
        finally:
            for host in hosts:
                host.run("ip", "link", "set", "wire", "mtu", "1500")


@contextmanager
def lossy_network(hosts: Sequence[Host]) -> Iterator[None]:
    """Every tenth packet, at random, goes into a queue that drops it."""
    with _queues(hosts, ("handle", "1:", "htb", "default", "1")):
        for host in hosts:
            for class_id in ("1:1", "1:2"):
                rate = ("htb", "rate", "10gbit", "quantum", "60000")
                host.run("tc", "class", "add", "dev", "wire", "parent", "1:",
                         "classid", class_id, *rate)  # fmt: skip
            host.run("tc", "qdisc", "add", "dev", "wire", "parent", "1:2", "blackhole")
            host.run("tc", "filter", "add", "dev", "wire", "parent", "1:",
                     "bpf", "bytecode", LOSES, "flowid", "1:2")  # fmt: skip
        yield


@contextmanager
def _queues(hosts: Sequence[Host], queue: tuple[str, ...]) -> Iterator[None]:
    """What each host sends goes through ``queue`` meanwhile."""
    for host in hosts:
        host.run("tc", "qdisc", "add", "dev", "wire", "root", *queue)
    try:
        yield
    finally:
        for host in hosts:
            host.run("tc", "qdisc", "del", "dev", "wire", "root")


@contextmanager
def held_network(hosts: Sequence[Host], seconds: float) -> Iterator[None]:
    """All packets are dropped, in both directions, for so many seconds; then the body runs.

    At the highest priority: on a busy machine what is to last 2 s would last for 4, after which the
    network counts as lost.
    """
    begin, end = (
        "; ".join(f"nsenter -t {host.pid} -n {command}" for host in hosts)
        for command in ("tc qdisc add dev wire root blackhole", "tc qdisc del dev wire root")
    )
    script = f"{begin}; sleep {seconds}; {end}"
    subprocess.run(["nice", "-n", "-20", "sh", "-ec", script], check=True)
    yield
