"""How long a packet is waited for, and a neighbour that does not come."""

import select
import socket
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from tests.ipc.link.conftest import HERE, free_port

from sipipe.errors import StallError
from sipipe.ipc.errors import PeerDiedError
from sipipe.ipc.link import packets, zeromq
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.messages.link import LinkEndpoint


def sockets():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.fixture
def pair():
    ours, theirs = sockets()
    connection = packets.PacketConnection(ours, "the peer")
    with closing(theirs), closing(connection):
        yield connection, theirs, ours


def test_time_in_which_this_process_was_stopped_counts_as_one_slice(monkeypatch):
    """The kernel ends a sleep that has been stopped beyond its end, before the peer has run."""
    ours, theirs = sockets()
    slept = []

    def poll(milliseconds):
        slept.append(milliseconds)
        if len(slept) == 3:
            theirs.send(b"late")
        return []

    kernel = SimpleNamespace(poll=poll, register=lambda *_: None)
    monkeypatch.setattr(packets.select, "poll", lambda: kernel)
    with theirs, closing(packets.PacketConnection(ours, "the peer")) as connection:
        monkeypatch.undo()
        assert connection.receive(bytearray(8), 12.0) == 4
    assert slept == [5000, 5000, 2000]


@pytest.mark.parametrize("timeout", [0.0, 0.05])
def test_nothing_and_the_end(pair, timeout):
    connection, theirs, ours = pair
    assert connection.receive(bytearray(8), timeout) is None
    theirs.close()
    assert select.select([ours], [], [], 1)[0]
    with pytest.raises(PeerDiedError):
        connection.receive(bytearray(8), timeout)


def test_memory_that_does_not_come():
    """HELLO, SCHEMA, the memory and DATA, as a sender sends them, without their descriptors."""
    link = LinkEndpoint(kind="shm", buffer_tokens=8, name="stage0-1.r0", stall_timeout=5.0)
    (ours, theirs), (here, there) = sockets(), sockets()
    with (
        ours,
        here,
        closing(open_sender(link, theirs)) as sender,
        closing(open_receiver(link, there)) as receiver,
    ):
        sender.send(0, 2, {"h": torch.ones(2, 3)})
        for _ in range(4):
            here.send(ours.recv(1 << 16))
        with pytest.raises(PeerDiedError, match=r"stage0-1\.r0"):
            receiver.take(0, 2)


def test_a_stage_that_cannot_be_reached_is_named_at_the_start(monkeypatch):
    """And not by the first request, after the stall timeout."""
    monkeypatch.setenv("SIPIPE_SECRET", "a secret of the tests")
    monkeypatch.setattr(zeromq, "MEET_SECONDS", 0.3)
    port = free_port(HERE)
    link = LinkEndpoint(kind="zeromq", buffer_tokens=4, name="a", address=HERE, port=port)
    with pytest.raises(StallError, match=rf"next stage was not reached at {HERE}:{port} within 0"):
        open_sender(link, None, lambda _: None)


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [
        ("cpu", "shm", "shm"),
        ("cuda", "shm", "shm (untested between GPUs)"),
        ("cuda", "cuda_ipc", "cuda_ipc (untested between GPUs)"),
    ],
)
def test_a_link_in_a_start_up_line(device, kind, text):
    link = LinkEndpoint(kind=kind, buffer_tokens=1, device=device, name="a")
    assert link.describe() == f"link a ({kind})"
    assert link.transport == text
