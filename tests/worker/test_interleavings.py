"""Every order in which a preparation and a forward pass can begin and end, with real threads.

Each call of ``prepare`` and ``forward`` stops in its middle, with half of its buffer written or
read. The test decides which one goes on, and walks through every such decision for a few
iterations. Where the threads stand after a step is known from the counts alone
(:class:`Turns`): the test waits for exactly that, so no step depends on time. Where a preparation
and a forward pass may both begin, the preparation does: the pass is held in ``receive`` until it
has written its half.

The same walk without the guard of the preparing thread shows what the guard is for: some orders
then corrupt what a forward pass reads, and the check raises in exactly these.
"""

import time

import pytest
from tests.worker.token_safety import TokenSafetyError

from sipipe.worker.double_buffer import Turns

from .fake_device import HAND_OVER, FakeStage, TwoThreads

PREPARE, RECEIVE, FORWARD = "prepare", "receive", "forward"


class Walk:
    """One run of ``iterations``, all submitted at once, along ``choices``.

    A choice is the call that goes on, at a point where both threads are inside one. ``path`` are
    the choices that were made, given ones first, then always the preparing thread's.
    """

    def __init__(self, iterations, sets, choices, **options):
        self.stage = FakeStage(sets=sets, gates=(PREPARE, RECEIVE, FORWARD), **options)
        self.path = ()
        self.error = None
        turns, left, reading = Turns(sets), iterations, False
        with TwoThreads(self.stage, sets=sets) as running:
            for iteration in range(iterations):
                running.submit(iteration)
            try:
                while True:
                    if left and turns.may_write:
                        left -= 1
                        turns.start_write()
                        self.reach(running, PREPARE)
                    if turns.may_read:
                        turns.start_read()
                        reading = True
                        self.reach(running, RECEIVE)
                        self.stage.let(RECEIVE)
                        self.reach(running, FORWARD)
                    inside = [PREPARE] * turns.writing + [FORWARD] * reading
                    if not inside:
                        break
                    if len(inside) > 1:
                        place = len(self.path)
                        inside = [choices[place] if place < len(choices) else PREPARE]
                        self.path += tuple(inside)
                    self.stage.let(inside[0])
                    if inside[0] == PREPARE:
                        turns.end_write()
                    else:
                        turns.end_read()
                        reading = False
                running.drain()
            except TokenSafetyError as error:
                self.error = error

    def reach(self, running, name):
        """Wait until the call is in its middle; raises what has ended the threads instead."""
        deadline = time.monotonic() + HAND_OVER
        while not self.stage.reached[name].acquire(timeout=0.01):
            assert time.monotonic() < deadline, f"{name} was not reached"
            if "device" in running.raised:
                raise running.raised["device"]


def every_walk(iterations, sets, **options):
    """All walks: the last choice that can be changed is changed, until none is left."""
    choices = []
    while True:
        walk = Walk(iterations, sets, choices, **options)
        yield walk
        choices = list(walk.path)
        while choices and choices[-1] == FORWARD:
            choices.pop()
        if not choices:
            return
        choices[-1] = FORWARD


@pytest.mark.parametrize(("sets", "iterations"), [(1, 4), (2, 5), (3, 5)])
def test_every_order_of_calls_leaves_every_read_whole(sets, iterations):
    walks = list(every_walk(iterations, sets))
    assert len({walk.path for walk in walks}) == len(walks)
    assert (len(walks) > 1) == (sets > 1), "with one set nothing is ever beside a forward"
    for walk in walks:
        assert walk.error is None
        assert walk.stage.intact()
        assert walk.stage.sent == list(range(iterations))


def test_without_the_guard_the_check_refuses_exactly_the_orders_that_corrupt(monkeypatch):
    monkeypatch.setattr(Turns, "may_write", property(lambda turns: not turns.writing))
    walks = list(every_walk(3, 1, check=False))
    assert not any(walk.error for walk in walks)
    corrupted = {walk.path for walk in walks if not walk.stage.intact()}
    refused = {walk.path for walk in walks if Walk(3, 1, walk.path).error is not None}
    assert corrupted, "taking the guard away was meant to break something"
    assert refused == corrupted


def test_a_set_that_is_always_zero_is_refused_in_every_order():
    """The planted bug: the double buffer counts two sets, the buffers are one."""
    assert any(not walk.stage.intact() for walk in every_walk(3, 2, planted=0, check=False))
    for walk in every_walk(3, 2, planted=0):
        assert isinstance(walk.error, TokenSafetyError), walk.path
