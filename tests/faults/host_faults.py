"""What a network and a machine may do to two hosts that serve a model together.

A fault is a context: what it does lasts as long as the context, or is over when that begins.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
from tests import bad_networks

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
LISTENS = "0A"
"""A socket that listens, in /proc/net/tcp."""
OPEN = ("01", LISTENS)
"""States of sockets that a process has: established, or listening."""
HTTP = 8000
"""Port of the server, which strangers may come to."""


@dataclasses.dataclass(frozen=True)
class Struck:
    """What a fault strikes: servers of two hosts."""

    served: Any
    processes: tuple[list[psutil.Process], ...]
    """Processes of each host, without clients."""

    @property
    def hosts(self) -> list[Any]:
        return self.served.cluster.hosts

    def named(self, node: int, title: str) -> psutil.Process:
        """A process of a host, by a part of its command line."""
        from tests.engine.engines import named

        return named(self.processes[node], title)[0]


Fault = Callable[[Struck, Random, int], AbstractContextManager[None]]
"""Takes what is struck, a random generator, and how many faults of its kind were before."""


@contextmanager
def slow(struck: Struck, _rng: Random, _number: int) -> Iterator[None]:
    """2 Mbit/s in packets of 576 bytes."""
    with bad_networks.slow_network(struck.hosts):
        yield


@contextmanager
def lossy(struck: Struck, _rng: Random, _number: int) -> Iterator[None]:
    """Every tenth packet is lost, at random."""
    with bad_networks.lossy_network(struck.hosts):
        yield


def held(shortest: float, longest: float) -> Fault:
    """All packets are dropped, in both directions, for so many seconds; nobody hears of it."""

    @contextmanager
    def fault(struck: Struck, rng: Random, _number: int) -> Iterator[None]:
        with bad_networks.held_network(struck.hosts, rng.uniform(shortest, longest)):
            yield

    return fault


@contextmanager
def cable_out(struck: Struck, rng: Random, _number: int) -> Iterator[None]:
    """The network devices of both hosts are down for up to 2 s."""
    with bad_networks.cable_out(struck.hosts, rng.uniform(0.2, 2.0)):
        yield


@contextmanager
def strangers_stay(struck: Struck, _rng: Random, _number: int) -> Iterator[None]:
    """Connections of strangers to every port that the servers of both hosts listen on, but HTTP's."""
    strangers = []
    try:
        for host in struck.hosts:
            ports = sorted({port for state, port in sockets(host) if state == LISTENS} - {HTTP})
            strangers.append(host.python(HOLDS, host.address, *map(str, ports)))
            assert int(strangers[-1].stdout.readline()), "no stranger got a connection"
        yield
    finally:
        for stranger in strangers:
            for process in psutil.Process(stranger.pid).children():
                process.kill()  # in the host's own namespace, below nsenter
            stranger.communicate()


def stopped_host(shortest: float, longest: float) -> Fault:
    """All processes of a host are stopped for so many seconds, as those of a virtual machine that is
    moved: the other host first, then the main host."""

    @contextmanager
    def fault(struck: Struck, rng: Random, number: int) -> Iterator[None]:
        node = (number + 1) % 2
        try:
            for process in struck.processes[node]:
                process.send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(shortest, longest))
        finally:
            for process in struck.processes[node]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
            # nsenter, outside, stops itself where its child is stopped.
            struck.served.hosts[node].send_signal(signal.SIGCONT)
        yield

    return fault


def killed(*titles: tuple[int, str]) -> Fault:
    """A process is killed: one of ``titles``, its host and a part of its command line, after the other."""

    @contextmanager
    def fault(struck: Struck, _rng: Random, number: int) -> Iterator[None]:
        struck.named(*titles[number % len(titles)]).kill()
        yield

    return fault


def sockets(host: Any) -> Iterator[tuple[str, int]]:
    """State and own port of each TCP socket of a host."""
    for line in Path(f"/proc/{host.pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        yield state, int(local.rpartition(":")[2], 16)
