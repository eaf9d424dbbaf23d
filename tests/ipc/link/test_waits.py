"""How long a packet is waited for."""

import contextlib
import select
import socket
from types import SimpleNamespace

import pytest

from sipipe.ipc.errors import PeerDiedError
from sipipe.ipc.link import packets


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = packets.PacketConnection(ours, "the peer")
    with contextlib.closing(theirs), contextlib.closing(connection):
        yield connection, theirs


def test_time_in_which_this_process_was_stopped_counts_as_one_slice(pair):
    """The kernel ends a sleep that has been stopped beyond its end, before the peer has run."""
    connection, theirs = pair
    slept = []

    def poll(milliseconds):
        slept.append(milliseconds)
        if len(slept) == 3:
            theirs.send(b"late")
        return []

    connection._poll = SimpleNamespace(poll=poll)
    packet = bytearray(8)
    assert connection.receive(packet, 12.0) == 4
    assert slept == [5000, 5000, 2000]


@pytest.mark.parametrize("timeout", [0.0, 0.05])
def test_nothing_and_the_end(pair, timeout):
    connection, theirs = pair
    assert connection.receive(bytearray(8), timeout) is None
    theirs.close()
    assert select.select([connection._sock], [], [], 1)[0]
    with pytest.raises(PeerDiedError):
        connection.receive(bytearray(8), timeout)
