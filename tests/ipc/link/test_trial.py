"""The trial of a link: a good one passes, and one that refuses, corrupts or hangs does not."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from contextlib import closing

import pytest
import torch
from tests.ipc.link.conftest import BOUND, KINDS, endpoint_of, hidden

from sipipe.errors import ResourceError
from sipipe.ipc.link import trial
from sipipe.ipc.link.endpoint import open_receiver
from sipipe.ipc.link.schema import TOKENS, TensorSchema, TensorSpec
from sipipe.ipc.link.trial import Pattern, TriedReceiver, TriedSender
from sipipe.messages.link import LinkTrial

SCHEMA = TensorSchema(
    (
        TensorSpec("hidden_states", "bfloat16", (TOKENS, 24)),
        TensorSpec("mask", "bool", (TOKENS, 1)),
        TensorSpec("scale", "float32", (3,)),
    )
)


class Ends:
    """Both ends of a link, which is being tried."""

    def __init__(self, endpoint, seconds=BOUND):
        self.lost = []
        ends = [None, None]
        if not endpoint.port:
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = LinkTrial(pair=(0, 1), endpoint=endpoint, tensors=SCHEMA.encode(), seconds=seconds)
        self.receiver = TriedReceiver(order, SCHEMA, ends[1], self.lost.append)
        self.sender = TriedSender(order, SCHEMA, ends[0], self.lost.append)

    def reports(self):
        return self.sender.report(), self.receiver.report()

    def close(self):
        self.sender.close()
        self.receiver.close()


@pytest.fixture(params=[kind for kind in KINDS if kind != "cuda_ipc"])
def on_host(request, monkeypatch):
    """A link of a CPU's stages; those of GPUs are tried in worker/test_link_trials.py."""
    return endpoint_of(request.param, monkeypatch)


def test_a_link_that_works_passes_and_then_carries_iterations(on_host):
    with closing(Ends(on_host)) as ends:
        sent, came = ends.reports()
        assert not sent.failure
        assert not came.failure
        assert sent.seconds > 0
        with closing(ends.receiver.take()) as receiver, closing(ends.sender.take()) as sender:
            for iteration in range(2 * on_host.depth):
                tensors = hidden(3, iteration)
                sender.send(iteration, 3, tensors)
                taken = receiver.take(iteration, 3, BOUND)
                assert all(torch.equal(taken[key], tensor) for key, tensor in tensors.items())
                receiver.release(iteration)
            assert not ends.lost


def test_no_two_frames_and_no_two_words_of_a_pattern_are_the_same():
    schema = TensorSchema((TensorSpec("x", "float32", (TOKENS, 64)),) * 2)
    pattern = Pattern(schema, 16)
    words = [
        word
        for frame in range(6)
        for _, flat in pattern.of(frame)
        for word in flat.view("uint32").tolist()
    ]
    first = words[: 16 * 64]
    assert len(set(first)) == len(first)
    frames = [words[at : at + len(first)] for at in range(0, len(words), len(first))]
    for place in zip(*frames, strict=True):
        assert len(set(place)) == len(place)


@pytest.mark.parametrize("buffer", [0, 2])
@pytest.mark.parametrize("tokens", [64, 1], ids=["full", "used again"])
def test_a_byte_that_comes_otherwise_is_found_in_every_buffer(on_host, monkeypatch, buffer, tokens):
    take = trial.Receiver.take

    def corrupt(self, iteration, num_tokens, *bound):
        tensors = take(self, iteration, num_tokens, *bound)
        if iteration % on_host.depth == buffer and num_tokens == tokens:
            tensors["scale"].view(torch.uint8)[5] += 1
        return tensors

    monkeypatch.setattr(trial.Receiver, "take", corrupt)
    with closing(Ends(on_host)) as ends:
        sent, came = ends.reports()
    what = f"1 of 12 bytes in buffer {buffer} were not those that were sent"
    assert came.failure == what
    assert (came.echoes, came.hangs) == (False, False)
    assert sent.echoes  # it has been told to leave, and did not wait for its bound
    assert not ends.lost, "another transport may do"


def test_a_refusal_is_the_report_of_who_was_refused(on_host, monkeypatch):
    def refuse(*_):
        raise ResourceError("no memory for it")

    monkeypatch.setattr(trial.Sender, "wait_released", refuse)
    with closing(Ends(on_host)) as ends:
        sent, came = ends.reports()
    assert (sent.failure, sent.echoes, sent.hangs) == ("no memory for it", False, False)
    assert came.echoes
    assert not ends.lost


def test_an_end_that_hangs_is_left_as_it_is(on_host, monkeypatch):
    """By whom it waits for nobody hears: its thread is in something that does not come back."""
    released = threading.Event()
    monkeypatch.setattr(trial, "compare", lambda *_: released.wait(BOUND))
    closed = []
    monkeypatch.setattr(trial.Receiver, "close", lambda _: closed.append("receiver"))
    ends = Ends(on_host, seconds=2)
    sent, came = ends.reports()
    assert came.failure == "it had not finished after 2 s"
    assert came.hangs
    assert sent.hangs or sent.failure
    ends.sender.leave()
    ends.receiver.close()
    assert not closed
    monkeypatch.undo()
    released.set()
    for thread in threading.enumerate():
        if thread.name == f"sipipe-trial-{on_host.name}":
            thread.join(BOUND)
    assert not ends.lost
    hung = weakref.ref(ends.receiver.take())
    ends.close()
    del ends
    gc.collect()
    assert hung() is not None, "its memory would be freed, under copies that hang"
    hung().close()


def test_a_link_that_is_lost_between_trial_and_use_is_told_when_it_is_used(on_host, monkeypatch):
    losses = []

    def open_and_listen(endpoint, sock, lost):
        losses.append(lost)
        return open_receiver(endpoint, sock, lost)

    monkeypatch.setattr(trial, "open_receiver", open_and_listen)
    with closing(Ends(on_host)) as ends:
        assert not any(report.failure for report in ends.reports())
        [lose] = losses
        error = ResourceError("gone")
        lose(error)
        assert not ends.lost
        with closing(ends.receiver.take()), closing(ends.sender.take()):
            assert ends.lost == [error]
            lose(error)
            assert ends.lost == [error, error]
