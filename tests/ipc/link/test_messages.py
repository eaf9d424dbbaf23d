"""What travels, counted: one packet a microbatch and rank, and nothing else after the first."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from tests.asleep import restless
from tests.ipc.link.conftest import BETWEEN_HOSTS, BOUND, SENDING, hidden

from sipipe.ipc.link.packets import HEADER_BYTES, PacketConnection
from sipipe.ipc.link.zeromq import Packets


def test_no_metadata_after_the_first_iteration(sender, receiver, endpoint, monkeypatch):
    """Counted where packets arrive: a header a microbatch, another schema only when it is new."""
    if endpoint.kind == "nixl":
        pytest.skip("its ends read in threads of their own: test_nixl.py counts what is sent")
    sizes: list[int] = []
    connections = Packets if endpoint.kind in BETWEEN_HOSTS else PacketConnection
    receive = connections.receive

    def count(self, packet, timeout):
        size = receive(self, packet, timeout)
        sizes.append(size)
        return size

    monkeypatch.setattr(connections, "receive", count)
    for iteration in range(200):
        num_tokens = 1 + iteration * 7 % 64
        width = 24 if iteration < 100 else 6000  # copied by the caller, then by the thread
        sent = hidden(num_tokens, iteration, width)
        sizes.clear()
        sender.send(iteration, num_tokens, sent)
        taken = sizes.copy()
        receiver.take(iteration, num_tokens, BOUND)
        receiver.release(iteration)
        arrived = sizes[len(taken) :]
        if iteration in (0, 100):  # described once
            assert len(arrived) > 1
            assert max(arrived) > HEADER_BYTES
        else:
            assert arrived == [HEADER_BYTES]
        assert all(size == HEADER_BYTES for size in taken)  # releases, one a frame
        assert len(taken) <= 2


def test_a_slow_next_stage_blocks_only_at_the_bound_and_then_in_the_kernel(
    link, endpoint, monkeypatch
):
    sender, receiver = link
    waits: list[float] = []
    transport = SENDING[endpoint.kind]
    next_release = transport.next_release

    def count(self, timeout):
        waits.append(timeout)
        return next_release(self, timeout)

    monkeypatch.setattr(transport, "next_release", count)
    sender.send(0, 4, hidden(4))
    receiver.take(0, 4, BOUND)
    for iteration in range(1, endpoint.depth):
        sender.send(iteration, 4, hidden(4))
    assert not waits
    sends = threading.Thread(target=sender.send, args=(endpoint.depth, 4, hidden(4)))
    sends.start()
    while sends.is_alive() and not waits:
        threading.Event().wait(0.001)
    assert not restless(os.getpid(), {sends.native_id})
    receiver.release(0)
    sends.join(BOUND)
    assert not sends.is_alive()
    assert len(waits) == 1, "a loop that asks again and again"


def test_tensors_are_let_go_when_they_are_sent(sender, receiver):
    freed = threading.Event()
    large = torch.zeros(64, 1 << 13).clone()

    class Owner:
        def __del__(self):
            freed.set()

    large.owner = Owner()  # type: ignore[attr-defined]
    sender.send(0, 64, {"h": large})
    receiver.take(0, 64, BOUND)
    sender.flush(BOUND)
    del large
    assert freed.wait(BOUND)
