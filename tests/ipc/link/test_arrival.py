"""Shared memory: a record comes before the last of its data, so the receiver waits for the seal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from sipipe.errors import StallError
from sipipe.ipc.link.endpoint import create_link, open_receiver, open_sender
from sipipe.ipc.link.errors import LinkClosedError, TransferMismatchError
from sipipe.ipc.link.frames import Row
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.records import Kind, Record
from sipipe.ipc.link.sender import Sender

BOUND = 60.0


@pytest.fixture
def link() -> Iterator[tuple[Sender, Receiver]]:
    endpoint = create_link("shm", max_tokens=1024, name="stage0-1.r0", stall_timeout=BOUND)
    with open_sender(endpoint) as sender, open_receiver(endpoint) as receiver:
        receiver.post(0, 4)
        sender.send(0, 4, hidden(0))
        receiver.take(0, BOUND)
        receiver.release(0)
        yield sender, receiver


def hidden(value: int) -> dict[str, torch.Tensor]:
    return {"h": torch.full((4, 16), float(value))}


def send_the_record_alone(sender: Sender, iteration: int) -> None:
    """All that a receiver sees of a frame whose copy does not end."""
    value = sender._structures.structure.fingerprint
    record = Record(Kind.DATA, iteration, 1, iteration, iteration, 4, value)
    sender._transport._send(sender._codec.pack(record))  # type: ignore[attr-defined]


@pytest.mark.parametrize("seconds", [0.0002, 0.03])
def test_the_rest_comes_later(link, monkeypatch, seconds):
    """While the receiver still looks for it, and when it sleeps."""
    sender, receiver = link

    def late(_: Row) -> int:
        send_the_record_alone(sender, 1)
        time.sleep(seconds)
        structure, arena = sender._structures.structure, sender._transport._arena
        arena.fill(structure, 1, 4, [hidden(1)["h"]])
        arena.write_check(1, 1 ^ structure.fingerprint)
        return 0

    monkeypatch.setattr(Row, "run", late)
    receiver.post(1, 4)
    sending = threading.Thread(target=sender.send, args=(1, 4, hidden(1)))
    sending.start()
    assert torch.equal(receiver.take(1, BOUND)["h"], hidden(1)["h"])
    sending.join(BOUND)


def test_the_rest_does_not_come(link):
    sender, receiver = link
    send_the_record_alone(sender, 1)
    receiver.post(1, 4)
    with pytest.raises(StallError, match=r"iteration 1 began to arrive.*previous stage's log"):
        receiver.take(1, 0.05)
    receiver.post(2, 4)
    with pytest.raises(StallError):  # the link stays broken
        receiver.take(2, BOUND)
    assert receiver.statistics().held == 0


def test_the_next_frame_comes_and_the_rest_of_this_one_did_not(link):
    sender, receiver = link
    send_the_record_alone(sender, 1)
    send_the_record_alone(sender, 2)
    receiver.post(1, 4)
    with pytest.raises(TransferMismatchError, match="slot 1 was overwritten while frame 1"):
        receiver.take(1, BOUND)


def test_closing_ends_the_wait(link):
    sender, receiver = link
    send_the_record_alone(sender, 1)
    receiver.post(1, 4)
    closing = threading.Timer(0.05, receiver.close)
    closing.start()
    with pytest.raises(LinkClosedError, match="this receiver"):
        receiver.take(1, BOUND)
    closing.join()


@pytest.mark.parametrize("num_tokens", [600, 1024, 700])
def test_frames_larger_than_what_is_left_when_the_record_leaves(link, num_tokens):
    """Up to 16 MiB: some megabytes are copied behind the record, the largest past the caches."""
    sender, receiver = link
    sent = {
        key: torch.randint(-128, 127, (num_tokens, width), dtype=torch.int8)
        for key, width in (("h", 9000), ("odd", 77), ("r", 7000))
    }
    for iteration in range(1, 8):
        receiver.post(iteration, num_tokens)
        sender.send(iteration, num_tokens, sent)
        taken = receiver.take(iteration, BOUND)
        assert all(torch.equal(taken[key], sent[key]) for key in sent)
        for tensor in taken.values():
            tensor.zero_()
        receiver.release(iteration)
