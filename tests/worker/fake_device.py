"""A stage whose device is a script: each call stops until the test lets it go on, or runs freely.

The fake that ships with the executors' tests. Its buffers are real: ``prepare`` writes the
iteration's number into every element of its version, step by step, and ``forward`` reads them
back, so that an overlap shows in the values as well as in the stamps.
"""

import threading

import numpy as np

from sipipe.worker.inputs.safety import TokenSafety

HAND_OVER = 60  # seconds; a bug in the test itself, not a bound that a test relies on


class Inputs:
    def __init__(self, iteration, version, num_tokens):
        self.iteration = iteration
        self.version = version
        self.num_tokens = num_tokens


class FakeStage:
    """``gates``: names of calls that wait for :meth:`let`, once per iteration."""

    def __init__(self, *, versions=2, gates=(), fail=None, planted=None, check=True):
        self.buffers = [np.zeros(64, np.int64) for _ in range(versions)]
        self.safety = TokenSafety(versions) if check else None
        self.gates = {name: threading.Semaphore(0) for name in gates}
        self.reached = {name: threading.Semaphore(0) for name in gates}
        self.open = False
        self.fail = fail or {}
        self.planted = planted  # replaces the version, as a bug would
        self.log = []
        self.results = []
        self.sent = []
        self.threads = {}

    def let(self, name, times=1):
        """Let ``times`` calls of ``name`` go on."""
        for _ in range(times):
            self.gates[name].release()

    def wait_for(self, name):
        """Return when a call of ``name`` has been entered."""
        assert self.reached[name].acquire(timeout=HAND_OVER)

    def release_all(self):
        self.open = True
        for gate in self.gates.values():
            for _ in range(1000):
                gate.release()

    def _step(self, name, iteration):
        self.log.append((name, iteration))
        self.threads.setdefault(name, threading.current_thread().name)
        if name in self.gates and not self.open:
            self.reached[name].release()
            assert self.gates[name].acquire(timeout=HAND_OVER)
        error = self.fail.get((name, iteration))
        if error is not None:
            raise error

    def prepare(self, iteration, slot, version, output):
        if self.planted is not None:
            version = self.planted
        if self.safety is not None:
            self.safety.begin_write(version, iteration)
        self.buffers[version][:32] = iteration
        self._step("prepare", iteration)
        self.buffers[version][32:] = iteration
        if self.safety is not None:
            self.safety.end_write(version, iteration)
        return Inputs(iteration, version, output)

    def announce(self, iteration, inputs):
        self.log.append(("announce", iteration))

    def receive(self, iteration, inputs):
        self._step("receive", iteration)
        return f"hidden {iteration}"

    def forward(self, iteration, inputs, received):
        assert received == f"hidden {iteration}"
        if self.safety is not None:
            self.safety.begin_read(inputs.version, iteration)
        first = self.buffers[inputs.version][:32].copy()
        self._step("forward", iteration)
        second = self.buffers[inputs.version][32:].copy()
        if self.safety is not None:
            self.safety.end_read(inputs.version, iteration)
        self.results.append((first, second))
        return iteration

    def send(self, iteration, inputs, result):
        self._step("send", iteration)
        self.sent.append(result)

    def intact(self):
        """Whether every forward pass read its own iteration, whole."""
        return all(
            (first == i).all() and (second == i).all()
            for i, (first, second) in enumerate(self.results)
        )
