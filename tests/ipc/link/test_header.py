"""Headers, and a conversation that breaks off."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
import torch

from sipipe.ipc.errors import PeerDiedError
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.messages.link import LinkEndpoint

ENDPOINT = LinkEndpoint(kind="shm", buffer_tokens=8, name="stage0-1.r0", stall_timeout=5.0)


def test_memory_that_does_not_come():
    """HELLO, SCHEMA, the memory and DATA, as a sender sends them, without their descriptors."""
    (ours, theirs), (here, there) = (
        socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)
    )
    with (
        ours,
        here,
        closing(open_sender(ENDPOINT, theirs)) as sender,
        closing(open_receiver(ENDPOINT, there)) as receiver,
    ):
        sender.send(0, 2, {"h": torch.ones(2, 3)})
        for _ in range(4):
            here.send(ours.recv(1 << 16))
        with pytest.raises(PeerDiedError, match=r"stage0-1\.r0"):
            receiver.take(0, 2)
