"""Two hosts (network namespaces) of one server, and what their network and processes may do.

A slow network in small packets, a cable that is out for a moment, strangers who hold connections to
every port, and a host that is stopped for a moment change no token. A worker of the other host that
is killed ends both by name, and started again they find each other. It needs root.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil
from tests.faults.served import Row, scratch_directory

HOLDS = r"""
import socket, sys, time
connections = []
for port in map(int, sys.argv[2:]):
    for piece in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 40, bytes(8)):
        for address in (sys.argv[1], "127.0.0.1"):
            connection = socket.socket()
            connection.settimeout(0.5)
            try:
                connection.connect((address, port))
                connection.send(piece)
            except OSError:
                continue
            connections.append(connection)
print(len(connections), flush=True)
time.sleep(1000)
"""
"""Run on a host: connections to ports, held until it is killed; says how many."""
SLOW = ("tbf", "rate", "2mbit", "burst", "8kbit", "latency", "300ms")
"""A queue of the kernel's traffic control."""


@contextmanager
def slow_network(cluster: Any, _rng: Random) -> Iterator[None]:
    """2 Mbit/s in packets of 576 bytes."""
    for host in cluster.hosts:
        host.run("ip", "link", "set", "wire", "mtu", "576")
        host.run("tc", "qdisc", "add", "dev", "wire", "root", *SLOW)
    try:
        yield
    finally:
        for host in cluster.hosts:
            host.run("tc", "qdisc", "del", "dev", "wire", "root")
            host.run("ip", "link", "set", "wire", "mtu", "1500")


@contextmanager
def cable_out(cluster: Any, rng: Random) -> Iterator[None]:
    """For less than what a lost host takes to be noticed (4 s), amid the requests."""

    def out(seconds: float) -> None:
        cluster.hosts[0].cable("down")
        time.sleep(seconds)
        cluster.hosts[0].cable("up")

    with _soon(rng, out, 0.2 + 1.8 * rng.random()):
        yield


@contextmanager
def stopped(cluster: Any, rng: Random) -> Iterator[None]:
    """All processes of the other host, for up to 3 s, amid the requests."""

    def stop(seconds: float) -> None:
        processes = cluster.hosts[1].processes()
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        for process in processes:
            process.send_signal(signal.SIGCONT)

    with _soon(rng, stop, 0.5 + 2.5 * rng.random()):
        yield


@contextmanager
def _soon(rng: Random, fault: Callable[[float], None], seconds: float) -> Iterator[None]:
    """Call ``fault(seconds)`` on a thread within a second, while the body runs."""
    timer = threading.Timer(rng.random(), fault, (seconds,))
    timer.start()
    try:
        yield
    finally:
        timer.join()  # wait: 4 s; the fault's end


@contextmanager
def strangers_stay(cluster: Any, _rng: Random) -> Iterator[None]:
    """Connections of strangers to every port that the servers of both hosts listen on, but HTTP's."""
    strangers = []
    for host in cluster.hosts:
        strangers.append(host.python(HOLDS, host.address, *map(str, _ports(host))))
        assert int(strangers[-1].stdout.readline()), "no stranger got a connection"
    try:
        yield
    finally:
        for stranger in strangers:
            for process in psutil.Process(stranger.pid).children():
                process.kill()  # in the host's own namespace, below nsenter
            stranger.communicate()


def _ports(host: Any) -> list[int]:
    """Ports that somebody listens on at a host, without HTTP's."""
    lines = Path(f"/proc/{host.pid}/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    listening = {
        int(local.rpartition(":")[2], 16) for _, local, _, state, *_ in fields if state == "0A"
    }
    return sorted(listening - {8000})


KINDS: dict[str, tuple[Callable[..., Any] | None, int]] = {
    "the network between two hosts is slow, in small packets": (slow_network, 2),
    "the cable between two hosts is out for up to 2 s": (cable_out, 6),
    "strangers hold connections to all ports of two hosts": (strangers_stay, 2),
    "a host of two is stopped for up to 3 s": (stopped, 6),
    "a worker of a host of two is killed, both are started again": (None, 2),
}


def run(only: str, seed: int, scale: float, each: Any = lambda *_: None) -> list[dict[str, Any]]:
    """A row of the table for each kind whose name matches ``only``."""
    names = [name for name in KINDS if re.search(only, name)]
    if not names:
        return []
    from tests.engine.engines import greedy, model, prompts, tokens
    from tests.engine.setup.test_host_agreement import Served
    from tests.hosts import Cluster

    count = 8
    # Some seconds of requests: a fault begins within one.
    params = greedy(count, shortest=100, longest=300)
    asked = [{"prompts": prompts(count, longest=40, seed=seed), "params": params}]
    rows = []
    cluster = Cluster()
    try:
        with scratch_directory() as scratch:
            path = model(scratch)

            def start() -> Any:
                served = Served(cluster, path, scratch, "-pp", "2")
                served.wait_served()
                return served

            served = start()
            expected = tokens(served.run(asked)[0])
            for name in names:
                fault, times = KINDS[name]
                row = Row(name)
                rng = Random(f"{seed} {name}")
                for _ in range(max(1, round(times * scale))):
                    if fault is None:
                        _kill_and_start(row, served)
                        served = start()
                        if tokens(served.run(asked)[0]) != expected:
                            row.add("wrong", "after both were started again")
                        continue
                    try:
                        with fault(cluster, rng):
                            right = tokens(served.run(asked)[0]) == expected
                        right = right and tokens(served.run(asked)[0]) == expected
                        row.add("recovered" if right else "wrong", "other tokens")
                    except AssertionError:
                        row.add("unclear", served.log(0)[-1500:] + served.log(1)[-1500:])
                        served.close()
                        served = start()
                rows.append(row.finished())
                each(name, rows[-1]["injected"], rows[-1]["why"])
            served.close()
    finally:
        cluster.close()
    return rows


def _kill_and_start(row: Row, served: Any) -> None:
    served.process(1, "Worker_PP").kill()
    began = time.monotonic()
    try:
        served.ended(seconds=30)
    except AssertionError as error:
        row.add("leaked", str(error)[:800])
        served.close()
        return
    last = served.log(0).rstrip().splitlines()[-1]
    if re.search(r"stage1|stage 1|host 1", last):
        row.add("error", seconds=time.monotonic() - began)
    else:
        row.add("unclear", f"the last line: {last}")
