"""Every order in which a preparation and a forward pass can begin and end, with real threads.

Each call of ``prepare`` and ``forward`` stops in its middle, with half of its buffer written or
read. The test decides which one goes on, and walks through every such decision for a few
iterations. Where the threads stand after a step is known from the state machine alone: the test
waits for exactly that, so no step depends on time.

The same walk with the CPU executor's guard taken out of the table shows what the guard is for:
some orders then corrupt what a forward pass reads, and the debug check raises in exactly these.
"""

import dataclasses
import time
from contextlib import suppress

import pytest

from sipipe.errors import StallError
from sipipe.worker import machine
from sipipe.worker.executor import StageExecutor
from sipipe.worker.inputs.safety import TokenSafetyError
from sipipe.worker.machine import Event, Role, State, Status, fire, may

from .fake_device import HAND_OVER, FakeStage

GATES = {Role.CPU: "prepare", Role.DEVICE: "forward"}


class Walk:
    """One run of ``iterations``, all submitted at once, along ``choices``.

    A choice is the role whose call goes on, at a point where both are inside one. ``taken`` are
    the choices that were made, given ones first, then always the CPU executor's.
    """

    def __init__(self, iterations, versions, choices, **options):
        self.stage = FakeStage(versions=versions, gates=GATES.values(), **options)
        self.taken = []
        self.error = None
        status, left = Status(versions), iterations
        with StageExecutor(
            self.stage,
            versions=versions,
            depth=iterations,
            stall_timeout=HAND_OVER,
            interrupt=self.stage.release_all,
        ) as running:
            for iteration in range(iterations):
                running.submit(iteration, 0, 1)
            try:
                while True:
                    for role in Role:
                        if may(status, role, Event.START) and (role is Role.DEVICE or left):
                            left -= role is Role.CPU
                            status = fire(status, role, Event.START)
                            self.reach(running, role)
                    inside = [role for role in Role if status.state(role) is State.RUNNING]
                    if not inside:
                        break
                    if len(inside) > 1:
                        place = len(self.taken)
                        self.taken.append(choices[place] if place < len(choices) else Role.CPU)
                        inside = self.taken[-1:]
                    self.stage.let(GATES[inside[0]])
                    status = fire(status, inside[0], Event.FINISH)
                running.drain()
            except TokenSafetyError as error:
                self.error = error

    def reach(self, running, role):
        """Wait until the call is in its middle; raises what has ended the executors instead."""
        deadline = time.monotonic() + HAND_OVER
        while not self.stage.reached[GATES[role]].acquire(timeout=0.01):
            assert time.monotonic() < deadline, f"{GATES[role]} was not reached"
            with suppress(StallError):
                running.drain(0)

    @property
    def path(self):
        """The order in which the calls went on."""
        return tuple(self.taken)


def every_walk(iterations, versions, **options):
    """All walks: the last choice that can be changed is changed, until none is left."""
    choices = []
    while True:
        walk = Walk(iterations, versions, choices, **options)
        yield walk
        choices = list(walk.path)
        while choices and choices[-1] is Role.DEVICE:
            choices.pop()
        if not choices:
            return
        choices[-1] = Role.DEVICE


@pytest.mark.parametrize(("versions", "iterations"), [(1, 4), (2, 5), (3, 5)])
def test_every_order_of_calls_leaves_every_read_whole(versions, iterations):
    walks = list(every_walk(iterations, versions))
    assert len({walk.path for walk in walks}) == len(walks)
    assert (len(walks) > 1) == (versions > 1), "with one version nothing is ever beside a forward"
    for walk in walks:
        assert walk.error is None
        assert walk.stage.intact()
        assert walk.stage.sent == list(range(iterations))


def without_the_guard(monkeypatch):
    """A table in which the CPU executor may start although no version is free."""
    key = (Role.CPU, State.WAIT, Event.START)
    broken = {**machine.TABLE, key: dataclasses.replace(machine.TABLE[key], guard=None)}
    monkeypatch.setattr(machine, "TABLE", broken)


def test_without_the_guard_the_check_refuses_exactly_the_orders_that_corrupt(monkeypatch):
    without_the_guard(monkeypatch)
    walks = list(every_walk(3, 1, check=False))
    assert not any(walk.error for walk in walks)
    corrupted = {walk.path for walk in walks if not walk.stage.intact()}
    refused = {walk.path for walk in walks if Walk(3, 1, walk.path).error is not None}
    assert corrupted, "taking the guard away was meant to break something"
    assert refused == corrupted


def test_a_version_that_is_always_zero_is_refused_in_every_order():
    """The planted bug: the state machines count two versions, the buffers are one."""
    assert any(not walk.stage.intact() for walk in every_walk(3, 2, planted=0, check=False))
    for walk in every_walk(3, 2, planted=0):
        assert isinstance(walk.error, TokenSafetyError), walk.path
