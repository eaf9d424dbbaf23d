"""Headers, and a conversation that breaks off."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.errors import PeerDiedError
from sipipe.ipc.link.header import HEADER_BYTES, Header, Kind, pack, unpack
from sipipe.messages.link import LinkEndpoint

ENDPOINT = LinkEndpoint(kind="shm", buffer_tokens=8, name="stage0-1.r0", stall_timeout=5.0)
WORD = st.integers(0, 2**64 - 1)
HEADERS = st.builds(Header, st.sampled_from([*Kind]), WORD, WORD, st.integers(0, 2**32 - 1), WORD)


@given(HEADERS, st.binary(max_size=100))
def test_round_trip(header, body):
    packet = pack(header, body)
    assert len(packet) == HEADER_BYTES + len(body)
    assert unpack(memoryview(packet)) == header


@pytest.fixture(scope="module")
def packets() -> Iterator[list[tuple[bytes, list[int]]]]:
    """HELLO, SCHEMA, the memory and DATA, as a sender sends them, with their descriptors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, closing(open_sender(ENDPOINT, theirs)) as sender:
        sender.send(0, 2, {"h": torch.ones(2, 3)})
        sender.wait_sent(60)
        packets = [socket.recv_fds(ours, 1 << 16, 1)[:2] for _ in range(4)]
    yield packets
    for _, descriptors in packets:
        for descriptor in descriptors:
            os.close(descriptor)


def test_memory_that_does_not_come(packets):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, closing(open_receiver(ENDPOINT, theirs)) as receiver:
        for packet, _ in packets:
            ours.send(packet)
        with pytest.raises(PeerDiedError, match=r"stage0-1\.r0"):
            receiver.take(0, 2)
