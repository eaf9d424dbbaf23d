"""Headers: damaged bytes are never taken for one, and raise our own error alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from sipipe.errors import SiPipeError
from sipipe.ipc.link.endpoint import create_link, open_receiver, open_sender
from sipipe.ipc.link.errors import PeerDiedError, TransferMismatchError
from sipipe.ipc.link.header import HEADER_BYTES, Header, HeaderCodec, Kind

ENDPOINT = create_link(max_tokens=8, name="stage0-1.r0", stall_timeout=5.0)
CODEC = HeaderCodec(ENDPOINT)
WORD = st.integers(0, 2**64 - 1)
HEADERS = st.builds(Header, st.sampled_from([*Kind]), WORD, WORD, st.integers(0, 2**32 - 1), WORD)


@given(HEADERS, st.binary(max_size=100))
def test_round_trip(header, body):
    packet = CODEC.pack(header, body)
    assert len(packet) == HEADER_BYTES + len(body)
    assert CODEC.unpack(memoryview(packet)) == header


@given(HEADERS, st.binary(max_size=40), st.data())
def test_one_wrong_bit_is_noticed(header, body, data):
    packet = bytearray(CODEC.pack(header, body))
    bit = data.draw(st.integers(0, len(packet) * 8 - 1))
    packet[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransferMismatchError, match=r"stage0-1\.r0.*damaged"):
        CODEC.unpack(memoryview(packet))


@given(HEADERS, st.binary(max_size=40), st.integers(0, 100))
def test_a_packet_that_is_cut_short_is_noticed(header, body, kept):
    packet = CODEC.pack(header, body)
    kept %= len(packet)
    with pytest.raises(TransferMismatchError):
        CODEC.unpack(memoryview(packet)[:kept])


def test_a_packet_of_another_link_is_refused():
    other = HeaderCodec(create_link(max_tokens=8, name="stage1-2.r0"))
    with pytest.raises(TransferMismatchError, match="of another link"):
        other.unpack(memoryview(CODEC.pack(Header(Kind.BYE))))


@pytest.fixture(scope="module")
def packets() -> Iterator[list[tuple[bytes, list[int]]]]:
    """HELLO, SCHEMA, the memory and DATA, as a sender sends them, with their descriptors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, open_sender(ENDPOINT, theirs) as sender:
        sender.send(0, 2, {"h": torch.ones(2, 3)})
        sender.wait_sent(60)
        packets = [socket.recv_fds(ours, 1 << 16, 1)[:2] for _ in range(4)]
    yield packets
    for _, descriptors in packets:
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.fixture
def receive(packets):
    """Take from a receiver that gets ``packets``, with number ``which`` as ``damaged``."""

    def run(which: int = -1, damaged: bytes = b"") -> torch.Tensor:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, open_receiver(ENDPOINT, theirs) as receiver:
            for index, (packet, descriptors) in enumerate(packets):
                socket.send_fds(ours, [damaged if index == which else packet], descriptors)
            ours.shutdown(socket.SHUT_WR)
            return receiver.take(0, 2)["h"].clone()

    return run


def test_the_conversation_as_it_was(receive):
    assert torch.equal(receive(), torch.ones(2, 3))


@pytest.mark.parametrize("which", [0, 1, 3])
def test_every_byte_of_a_conversation_may_be_damaged(packets, receive, which):
    for byte in range(len(packets[which][0])):
        damaged = bytearray(packets[which][0])
        damaged[byte] ^= 0xFF
        with pytest.raises(SiPipeError, match=r"stage0-1\.r0"):
            receive(which, damaged)


def test_memory_that_does_not_come(packets):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, open_receiver(ENDPOINT, theirs) as receiver:
        for packet, _ in packets:
            ours.send(packet)
        with pytest.raises(PeerDiedError, match=r"stage0-1\.r0"):
            receiver.take(0, 2)


def test_a_damaged_release_is_noticed_by_the_sender():
    for byte in range(HEADER_BYTES):
        release = bytearray(CODEC.pack(Header(Kind.RELEASE, 0)))
        release[byte] ^= 0xFF
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, open_sender(ENDPOINT, theirs) as sender:
            for iteration in range(ENDPOINT.depth):
                sender.send(iteration, 1, {"h": torch.zeros(1, 3)})
            ours.send(release)
            with pytest.raises(TransferMismatchError, match="damaged"):
                sender.send(ENDPOINT.depth, 1, {"h": torch.zeros(1, 3)})
