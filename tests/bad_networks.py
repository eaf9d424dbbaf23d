"""Bad networks between two hosts (:mod:`tests.hosts`): slow, with losses, held, or gone for a while."""

from __future__ import annotations

import subprocess
import time
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
    """All packets are dropped, in both directions, for so many seconds; then the body runs."""
    begin = "tc qdisc add dev wire root blackhole"
    with for_seconds(hosts, seconds, begin, "tc qdisc del dev wire root"):
        yield


@contextmanager
def cable_out(hosts: Sequence[Host], seconds: float, times: int = 1) -> Iterator[None]:
    """The network devices of all hosts are down for so many seconds, and no host has a route to another;
    some times, with 5 s between them. Then the body runs."""
    for number in range(times):
        if number:
            time.sleep(5)
        with for_seconds(hosts, seconds, "ip link set wire down", "ip link set wire up"):
            pass
    yield


@contextmanager
def for_seconds(hosts: Sequence[Host], seconds: float, begin: str, end: str) -> Iterator[None]:
    """Run the command ``begin`` on all hosts, and ``end`` so many seconds later; then the body runs.

    At the highest priority: on a busy machine what is to last 2 s would last for 4, after which the
    network counts as lost.
    """
    all_begin, all_end = (
        "; ".join(f"nsenter -t {host.pid} -n {command}" for host in hosts)
        for command in (begin, end)
    )
    script = f"{all_begin}; sleep {seconds}; {all_end}"
    subprocess.run(["nice", "-n", "-20", "sh", "-ec", script], check=True)
    yield
