"""One suite for every transport: what a link promises, whatever carries it."""

from __future__ import annotations

import queue
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from benchmarks import ablation
from tests.ipc.link.conftest import BETWEEN_HOSTS, BOUND, SENDING, WIDTH, hidden

from sipipe.errors import StallError
from sipipe.ipc.errors import LinkClosedError, TransferMismatchError
from sipipe.ipc.link import sender as sender_module
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.schema import TensorSchema
from sipipe.ipc.link.sender import Sender


def assert_equal(got: dict, sent: dict) -> None:
    assert list(got) == list(sent)
    for key, tensor in sent.items():
        assert got[key].dtype == tensor.dtype
        assert got[key].shape == tensor.shape
        assert torch.equal(got[key], tensor), key


def exchange(link: tuple[Sender, Receiver], iteration: int, num_tokens: int, sent: dict) -> None:
    sender, receiver = link
    sender.send(iteration, num_tokens, sent)
    assert_equal(receiver.take(iteration, num_tokens, BOUND), sent)
    receiver.release(iteration)


def test_tensors_that_are_not_contiguous(link):
    wide = torch.randn(6, 2 * WIDTH)
    exchange(link, 0, 6, {"a": wide[:, ::2], "b": wide.T[:WIDTH].T})


@pytest.fixture
def announced(endpoint, monkeypatch) -> list[TensorSchema]:
    """The schemas that the sender describes to the receiver, in order."""
    schemas: list[TensorSchema] = []
    announce = SENDING[endpoint.kind].announce

    def count(transport, schema) -> None:
        schemas.append(schema)
        announce(transport, schema)

    monkeypatch.setattr(SENDING[endpoint.kind], "announce", count)
    return schemas


@pytest.fixture
def without_posting(monkeypatch):
    """The ablation's links, for a test."""
    monkeypatch.setattr(Sender, "send", Sender.send)
    monkeypatch.setattr(Receiver, "take", Receiver.take)
    monkeypatch.setattr(ablation, "AWAY", set())
    assert ablation.WithoutPosting.__name__ == "WithoutPosting"


@pytest.mark.parametrize("endpoint", ["shm", "zeromq"], indirect=True)
@pytest.mark.usefixtures("without_posting")
def test_without_posting_each_describes_itself(sender, receiver, announced):
    """The tensors are the receiver's own, and come after a description of them every time."""
    kept = []
    for iteration, num_tokens in enumerate([5, 5, 64, 100, 1]):
        sent = hidden(num_tokens, iteration)
        sender.send(iteration, num_tokens, sent)
        sender.flush(0.0)  # it has left
        taken = receiver.take(iteration, num_tokens, BOUND)
        receiver.release(iteration)
        assert_equal(taken, sent)
        kept.append((taken, sent))
    for taken, sent in kept:
        assert_equal(taken, sent)  # nobody has written them again
    assert len(announced) == 5


def test_more_schemas_than_are_remembered(link, announced, endpoint, monkeypatch):
    """Forgotten ones are announced again; memory of them is bounded, the sender's and the receiver's."""
    iterations = iter(range(1000))

    def exchange_key(number: int) -> None:
        iteration = next(iterations)
        exchange(link, iteration, 2, {f"key{number}": torch.full((2, 3), iteration)})

    for number in [*range(32), *range(32)]:
        exchange_key(number)
    assert len(announced) == 32, "32 are remembered"
    for number in [*range(33), *range(33)]:
        exchange_key(number)
    assert len(announced) == 32 + 1 + 33, "the oldest is forgotten for each one more"
    for number in range(33, 33 + 64):
        exchange_key(number)
    monkeypatch.setattr(SENDING[endpoint.kind], "announce", lambda transport, schema: None)
    with pytest.raises(TransferMismatchError, match="was never announced"):
        exchange_key(32)  # the receiver remembers 64


def test_a_schema_that_is_announced_again_becomes_the_newest(link):
    """For the receiver as for the sender, which has forgotten it after 32 others."""
    for iteration, key in enumerate([*range(64), 0, 64, 0]):
        exchange(link, iteration, 2, {f"key{key}": torch.full((2, 3), iteration)})


def test_a_buffer_keeps_its_addresses(sender, receiver, endpoint):
    """Whatever the number of tokens, so that a graph captured for a buffer stays valid."""
    seen: dict[int, set[tuple[int, ...]]] = {}
    for iteration, num_tokens in enumerate([64, 1, 7, 0, 33, 64, 2, 5, 9, 64, 1, 1]):
        sender.send(iteration, num_tokens, hidden(num_tokens))
        taken = receiver.take(iteration, num_tokens, BOUND)
        if num_tokens:  # an empty tensor has no address
            addresses = tuple(tensor.data_ptr() for tensor in taken.values())
            seen.setdefault(iteration % endpoint.depth, set()).add(addresses)
        receiver.release(iteration)
    assert all(len(addresses) == 1 for addresses in seen.values())
    assert len(set.union(*seen.values())) == endpoint.depth


def test_the_sender_waits_when_depth_iterations_are_not_released(sender, receiver):
    for i in range(3):
        sender.send(i, 2, hidden(2, i))
    receiver.take(0, 2, BOUND)
    with pytest.raises(StallError, match=r"stage0-1\.r0.*iteration 3.*3 iterations behind"):
        sender.send(3, 2, hidden(2, 3), timeout=0.05)
    unblocked = threading.Thread(target=lambda: sender.send(3, 2, hidden(2, 3)))
    unblocked.start()
    receiver.release(0)
    unblocked.join(BOUND)
    assert not unblocked.is_alive()
    for i in (1, 2, 3):
        assert_equal(receiver.take(i, 2, BOUND), hidden(2, i))
        receiver.release(i)


def test_a_large_frame_is_sent_by_a_thread_and_may_be_waited_for(sender, receiver):
    """16 MiB. What is sent behind it while it is copied stays behind it."""
    for iteration, num_tokens in enumerate([64, 40, 64]):
        large = {"h": torch.randn(num_tokens, 1 << 16), "r": torch.randn(num_tokens, 77)}
        small = {key: tensor[:1].clone() for key, tensor in large.items()}
        expected = {key: tensor.clone() for key, tensor in large.items()}
        sender.send(2 * iteration, num_tokens, large)
        sender.send(2 * iteration + 1, 1, small)
        got = receiver.take(2 * iteration, num_tokens, BOUND)
        sender.wait_sent(BOUND)
        for tensor in large.values():
            tensor.zero_()
        assert_equal(got, expected)
        assert_equal(receiver.take(2 * iteration + 1, 1, BOUND), small)
        receiver.release(2 * iteration)
        receiver.release(2 * iteration + 1)


@pytest.mark.parametrize(
    ("sent", "expected", "words"),
    [
        ((0, 6), (0, 5), r"stage0-1\.r0.*expected iteration 0 with 5 tokens, iteration 0 with 6"),
        ((5, 5), (4, 5), "iteration 5"),
    ],
)
def test_another_frame_than_expected_breaks_the_link(sender, receiver, sent, expected, words):
    sender.send(*sent, hidden(sent[1]))
    with pytest.raises(TransferMismatchError, match=words):
        receiver.take(*expected, BOUND)
    with pytest.raises(TransferMismatchError):
        receiver.take(1, 6, BOUND)


def test_nothing_comes(sender, receiver):
    with pytest.raises(StallError, match=r"stage0-1\.r0.*iteration 0.*previous stage"):
        receiver.take(0, 1, 0.02)
    sender.send(0, 1, hidden(1))
    assert_equal(receiver.take(0, 1, BOUND), hidden(1))


def test_misuse_names_what_is_wrong(link):
    sender, receiver = link
    with pytest.raises(KeyError):
        receiver.release(0)
    with pytest.raises(TypeError, match="'x' is a int"):
        sender.send(0, 1, {"x": 1})
    exchange(link, 3, 1, hidden(1))
    with pytest.raises(AssertionError, match="3, 3"):
        sender.send(3, 1, hidden(1))


LONG = 64 * 9 + 5  # tokens: ten pieces, three times as many as there are buffers


def test_a_long_prompt_crosses_in_pieces_through_the_same_buffers(
    sender, receiver, endpoint, monkeypatch
):
    """Posted at once, and taken whole; decodes before and behind it are as ever."""
    frames: list[tuple[int, int]] = []
    transmit = SENDING[endpoint.kind].transmit

    def count(transport, header, *rest) -> None:
        frames.append((header.iteration, header.num_tokens))
        transmit(transport, header, *rest)

    monkeypatch.setattr(SENDING[endpoint.kind], "transmit", count)
    assert endpoint.depth < LONG // endpoint.buffer_tokens
    for start in range(0, 9, 3):
        sizes = [3, LONG, 64] if start else [LONG, 65, 1]
        sent = [hidden(size, start + i) for i, size in enumerate(sizes)]
        for i, size in enumerate(sizes):
            sender.send(start + i, size, sent[i])
        for i, size in enumerate(sizes):
            assert_equal(receiver.take(start + i, size, BOUND), sent[i])
            receiver.release(start + i)
    sender.flush(BOUND)
    pieces = {3: [3], 64: [64], 1: [1], 65: [64, 1], LONG: [64] * 9 + [5]}
    sizes = [LONG, 65, 1, 3, LONG, 64, 3, LONG, 64]
    assert frames == [(i, piece) for i, size in enumerate(sizes) for piece in pieces[size]]


def test_pieces_of_tensors_that_are_not_rows_of_tokens(link):
    sender, receiver = link
    sent = {
        "rows": torch.randn(LONG, 3),
        "deepstack": torch.randn(2, LONG, 5),
        "fixed": torch.randn(4, 4),
        "strided": torch.randn(3, LONG).T,
    }
    exchange(link, 0, LONG, sent)
    sender.send(1, LONG, sent)
    kept = {"rows": torch.zeros(LONG + 7, 3)}
    taken = receiver.take(1, LONG, BOUND, into=kept)
    assert_equal(taken, sent)
    assert torch.equal(kept["rows"][:LONG], sent["rows"])
    assert taken["rows"].data_ptr() == kept["rows"].data_ptr()
    receiver.release(1)


def test_a_sender_runs_no_further_ahead_with_long_prompts(sender, receiver):
    for i in range(3):
        sender.send(i, LONG, hidden(LONG, i))
    with pytest.raises(StallError, match=r"iteration 3.*3 iterations behind"):
        sender.send(3, 1, hidden(1), timeout=0.05)
    assert_equal(receiver.take(0, LONG, BOUND), hidden(LONG))
    with pytest.raises(StallError, match=r"iteration 3.*3 iterations behind"):
        sender.send(3, 1, hidden(1), timeout=0.05)
    sends = threading.Thread(target=lambda: sender.send(3, 1, hidden(1)))
    sends.start()  # it and the thread of the pieces wait for releases at once
    receiver.release(0)
    for i, size in ((1, LONG), (2, LONG), (3, 1)):
        assert_equal(receiver.take(i, size, BOUND), hidden(size, i % 3))
        receiver.release(i)
    sends.join(BOUND)
    assert not sends.is_alive()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_closing_amid_pieces(link, who):
    sender, receiver = link
    exchange(link, 0, 1, hidden(1))
    sender.send(1, LONG, hidden(LONG))
    with pytest.raises(StallError):
        sender.flush(0.05)
    if who == "sender":
        sender.close(0.01)
        with pytest.raises(LinkClosedError, match="previous stage"):
            receiver.take(1, LONG, BOUND)
        with pytest.raises(LinkClosedError, match="previous stage"):
            receiver.take(2, 1, BOUND)
    else:
        receiver.close()
        with pytest.raises(LinkClosedError, match="next stage"):
            sender.flush(BOUND)


def test_what_comes_in_pieces_is_taken_with_nothing_held(sender, receiver):
    for i, size in enumerate((1, LONG)):
        sender.send(i, size, hidden(size))
    receiver.take(0, 1, BOUND)
    with pytest.raises(AssertionError, match="held"):
        receiver.take(1, LONG, BOUND)


def test_a_sender_that_closes_ends_the_link_after_its_last_frame(link):
    sender, receiver = link
    exchange(link, 0, 3, hidden(3))
    sender.send(1, 3, hidden(3, 1))
    sender.close()
    assert_equal(receiver.take(1, 3, BOUND), hidden(3, 1))
    with pytest.raises(LinkClosedError, match="previous stage"):
        receiver.take(2, 3, BOUND)
    with pytest.raises(LinkClosedError):
        sender.send(2, 3, hidden(3))


def blocked(link: tuple[Sender, Receiver]) -> None:
    """From here on the next send waits."""
    sender, receiver = link
    for i in range(3):
        sender.send(i, 1, hidden(1))
    receiver.take(0, 1, BOUND)


@pytest.mark.parametrize(
    ("closes", "waits", "words"),
    [("receiver", "send", "next stage"), ("receiver", "take", "this receiver"),
     ("sender", "send", "this sender")],
)  # fmt: skip
def test_closing_an_end_ends_a_wait(link, closes, waits, words):
    """At either end."""
    sender, receiver = link
    if waits == "send":
        blocked(link)
    closing = threading.Timer(0.05, (sender if closes == "sender" else receiver).close)
    closing.start()
    with pytest.raises(LinkClosedError, match=words):
        sender.send(3, 1, hidden(1)) if waits == "send" else receiver.take(0, 1, BOUND)
    closing.join()


def test_closing_wakes_a_waiting_flush(endpoint, pair, monkeypatch):
    waits, go_on = threading.Event(), threading.Event()
    notified: list[bool] = []
    announce = SENDING[endpoint.kind].announce

    def late(transport, schema) -> None:
        go_on.wait(2 * BOUND)  # its end would wake the flush as well
        announce(transport, schema)

    class Condition(threading.Condition):
        def wait(self, timeout=None):
            waits.set()  # whoever notifies needs the lock, which goes with the sleep
            notified.append(super().wait(timeout))
            return notified[-1]

    def close_amid_flush() -> None:
        waits.wait(BOUND)
        sender.close(0.01)

    names = vars(threading) | {"Condition": Condition}
    monkeypatch.setattr(sender_module, "threading", SimpleNamespace(**names))
    monkeypatch.setattr(SENDING[endpoint.kind], "announce", late)
    with (
        closing(open_receiver(endpoint, pair[1])),
        closing(open_sender(endpoint, pair[0])) as sender,
    ):
        sender.send(0, 1, hidden(1))
        closes = threading.Thread(target=close_amid_flush)
        closes.start()
        with pytest.raises(LinkClosedError, match="this sender"):
            sender.flush(BOUND)
        assert notified == [True], "it slept until its bound"
        go_on.set()
        closes.join(BOUND)
        assert not closes.is_alive()


def test_an_error_of_the_thread_is_raised_by_the_next_call(endpoint, pair, monkeypatch):
    """And told to the worker, which may make no call for long."""

    def fails(transport, schema) -> None:
        raise MemoryError("none left")

    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    monkeypatch.setattr(SENDING[endpoint.kind], "announce", fails)
    with (
        closing(open_receiver(endpoint, pair[1])),
        closing(open_sender(endpoint, pair[0], errors.put)) as sender,
    ):
        sender.send(0, 1, hidden(1))
        with pytest.raises(MemoryError, match="none left"):
            sender.flush(BOUND)
        assert str(errors.get(timeout=BOUND)) == "none left"
        with pytest.raises(MemoryError, match="none left"):
            sender.send(1, 1, hidden(1))
    assert errors.empty()


def test_an_error_of_the_thread_ends_a_waiting_send(sender, endpoint, monkeypatch):
    waits = threading.Event()
    transport = SENDING[endpoint.kind]
    next_release = transport.next_release

    def fails(self, schema) -> None:
        waits.wait(BOUND)
        raise MemoryError("none left")

    def wait(self, timeout: float):
        waits.set()
        return next_release(self, timeout)

    monkeypatch.setattr(transport, "announce", fails)
    monkeypatch.setattr(transport, "next_release", wait)
    for iteration in range(3):
        sender.send(iteration, 1, hidden(1))
    with pytest.raises(MemoryError, match="none left"):
        sender.send(3, 1, hidden(1))


def test_closing_before_the_other_side_is_open(endpoint, pair):
    if endpoint.kind in BETWEEN_HOSTS:
        pytest.skip("opening it waits for the other side")
    sender = open_sender(endpoint, pair[0])
    sender.send(0, 1, hidden(1))
    sender.close(timeout=0.05)
    open_receiver(endpoint, pair[1]).close()


def test_a_schema_that_was_never_announced_is_an_error(link, endpoint, monkeypatch):
    sender, receiver = link
    exchange(link, 0, 3, hidden(3))
    monkeypatch.setattr(SENDING[endpoint.kind], "announce", lambda transport, schema: None)
    sender.send(1, 3, {f"another {key}": tensor for key, tensor in hidden(3).items()})
    message = r"stage0-1\.r0.*iteration 1 has a tensor schema that was never announced"
    with pytest.raises(TransferMismatchError, match=message):
        receiver.take(1, 3, BOUND)
