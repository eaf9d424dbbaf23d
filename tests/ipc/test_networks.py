"""Connections between two hosts (namespaces) whose network is slow, loses packets, or holds them all."""

from __future__ import annotations

import socket
import struct
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("zmq", reason="comes with vLLM")
from tests.bad_networks import cable_out, held_network, lossy_network, slow_network

from sipipe.ipc import tcp

BOUND = 120.0
"""Seconds within which an end has ended, on a busy machine."""
END = r"""
import sys, threading, time
from sipipe.ipc.connection import Connection
from sipipe.ipc.errors import PeerDiedError

CONNECTIONS, MESSAGES = 4, int(sys.argv[3])
said = [""] * CONNECTIONS
ends = [
    Connection(sys.argv[1], 29800 + number, listens=sys.argv[2] == "listens", who="the other end")
    for number in range(CONNECTIONS)
]
assert all(end.wait_for_peer(60) for end in ends)
print("met", flush=True)

def send(end):
    try:
        for number in range(MESSAGES):
            end.send(number.to_bytes(4, "little") * 100)
            time.sleep(0.01)  # so that some are sent while the fault lasts
    except PeerDiedError:
        pass  # the other thread says so

def receive(number):
    try:
        for expected in range(MESSAGES):
            (message,) = ends[number].receive(100)
            assert message == expected.to_bytes(4, "little") * 100, "another message"
        said[number] = "all came"
    except PeerDiedError as error:
        said[number] = str(error)

threads = [threading.Thread(target=send, args=(end,)) for end in ends]
threads += [threading.Thread(target=receive, args=(number,)) for number in range(CONNECTIONS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(set(said), flush=True)
sys.stdin.read()  # the other end may still want acknowledgements
"""
"""Sends and receives on several connections at once, and says what came of each."""


def struck_ends(cluster, monkeypatch, fault, messages=200) -> list[str]:
    """What the ends on two hosts say that exchange ``messages``, one in 10 ms each way, while ``fault``
    strikes their network."""
    monkeypatch.setenv("SIPIPE_SECRET", "a secret of the tests")
    roles = ("listens", "connects")
    ends = [
        host.python(END, cluster.hosts[0].address, role, str(messages), stdin=-1)
        for host, role in zip(cluster.hosts, roles, strict=True)
    ]
    try:
        for end in ends:
            assert end.stdout.readline() == "met\n"
        with fault(cluster.hosts):
            said = [end.stdout.readline() for end in ends]
        for end in ends:
            end.communicate("", timeout=BOUND)
        return said
    finally:
        for host in cluster.hosts:
            host.end_all()


@pytest.mark.ci
@pytest.mark.parametrize("fault", [slow_network, lossy_network, partial(held_network, seconds=1)],
                         ids=["slow, in small packets", "a tenth is lost", "held for 1 s"])  # fmt: skip
def test_a_bad_network_loses_no_message(cluster, monkeypatch, fault):
    assert struck_ends(cluster, monkeypatch, fault) == ["{'all came'}\n"] * 2


@pytest.mark.ci
def test_a_cable_may_be_out_again_and_again(cluster, monkeypatch):
    """A connection that has had no route once does not end the next time."""
    fault = partial(cable_out, seconds=1, times=2)
    said = struck_ends(cluster, monkeypatch, fault, messages=900)
    assert said == ["{'all came'}\n"] * 2


@pytest.mark.ci
def test_a_network_that_holds_everything_is_noticed_by_both_ends(cluster, monkeypatch):
    for said in struck_ends(cluster, monkeypatch, partial(held_network, seconds=10)):
        assert "died or cannot be reached (it was silent for" in said
        assert "all came" not in said


def test_what_is_unacknowledged_counts_from_the_first_look_that_finds_it(monkeypatch):
    """A look that comes late finds what the kernel had acknowledged meanwhile."""
    now = 100.0
    sent = unsent = 0
    acknowledged_at = 90.0

    def getsockopt(*_):
        acknowledged_ms = int((now - acknowledged_at) * 1e3)
        return struct.pack("=24xI28xI84xI", sent, acknowledged_ms, unsent)

    monkeypatch.setattr(tcp.time, "monotonic", lambda: now)
    ends = SimpleNamespace(getsockopt=getsockopt, setsockopt=lambda *_: None)
    connection = tcp.Unacknowledged(ends)
    assert connection.seconds() == 0  # idle, and the last acknowledgement is old
    sent = 1
    assert connection.seconds() == 0
    now = 109.0  # nobody looked for a while; the kernel did its part
    acknowledged_at = 108.0
    assert connection.seconds() == 0
    now = 112.0
    assert connection.seconds() == 3
    sent, unsent = 0, 36  # it cannot even leave
    now = 113.0
    assert connection.seconds() == 4
    unsent = 0
    assert connection.seconds() == 0
    unsent = 1
    now = 120.0
    assert connection.seconds() == 0


def test_what_is_unacknowledged_is_sent_again_every_second():
    """Also where the network was away for long, where Linux would wait for longer and longer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        option = tcp._TCP_RTO_MAX_MS  # noqa: SLF001, the kernel's number
        try:
            connection.getsockopt(socket.IPPROTO_TCP, option)
        except OSError:
            pytest.skip("this kernel is older than Linux 6.15")
        watched = tcp.Unacknowledged(connection)
        assert watched.seconds() == 0
        assert connection.getsockopt(socket.IPPROTO_TCP, option) == 1000
