"""A stage whose device is a script: each step stops until the test lets it go on, or runs freely.

The fake that ships with the double buffer's tests. Its buffers are real: ``prepare`` writes the
iteration's number into every element of its set, step by step, and ``forward`` reads them back, so
that an overlap shows in the values as well as in the stamps. :class:`TwoThreads` drives it as a
worker's process does.
"""

import queue
import threading
from concurrent.futures import Future

import numpy as np
from tests.worker.token_safety import TokenSafety

from sipipe.worker.double_buffer import DoubleBuffer

HAND_OVER = 60  # seconds; a bug in the test itself, not a bound that a test relies on


class Inputs:
    def __init__(self, iteration, buffer_set):
        self.iteration = iteration
        self.buffer_set = buffer_set


class FakeStage:
    """``gates``: names of steps that wait for :meth:`let`, once per iteration."""

    def __init__(self, *, sets=2, gates=(), fail=None):
        self.buffers = [np.zeros(64, np.int64) for _ in range(sets)]
        self.safety = TokenSafety(sets)
        self.gates = {name: threading.Semaphore(0) for name in gates}
        self.reached = {name: threading.Semaphore(0) for name in gates}
        self.open = False
        self.fail = fail or {}
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

    def prepare(self, iteration, slot, buffer_set, output, samples):
        self.safety.begin_write(buffer_set, iteration)
        self.buffers[buffer_set][:32] = iteration
        self._step("prepare", iteration)
        self.buffers[buffer_set][32:] = iteration
        self.safety.end_write(buffer_set, iteration)
        self.log.append(("prepared", iteration))
        return Inputs(iteration, buffer_set)

    def run(self, inputs):
        self.send(inputs, self.forward(inputs, self.receive(inputs)))

    def receive(self, inputs):
        self._step("receive", inputs.iteration)
        return f"hidden {inputs.iteration}"

    def forward(self, inputs, received):
        iteration = inputs.iteration
        assert received == f"hidden {iteration}"
        self.safety.begin_read(inputs.buffer_set, iteration)
        first = self.buffers[inputs.buffer_set][:32].copy()
        self._step("forward", iteration)
        second = self.buffers[inputs.buffer_set][32:].copy()
        self.safety.end_read(inputs.buffer_set, iteration)
        self.results.append((first, second))
        return iteration

    def send(self, inputs, result):
        self._step("send", inputs.iteration)
        self.sent.append(result)

    def intact(self):
        """Whether every forward pass read its own iteration, whole."""
        return all(
            (first == i).all() and (second == i).all()
            for i, (first, second) in enumerate(self.results)
        )


class TwoThreads:
    """A double buffer with a preparing thread that is fed from a queue, and a device thread."""

    def __init__(self, stage, *, sets=2, stall_timeout=HAND_OVER):
        interrupt = getattr(stage, "release_all", lambda: None)
        self.buffer = DoubleBuffer(
            stage, sets=sets, stall_timeout=stall_timeout, interrupt=interrupt
        )
        self.raised = {}
        """What ended each thread, as it came out of it."""
        self._calls = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._until_end, args=(name, call), name=f"test-{name}")
            for name, call in (("preparing", self._prepare), ("device", self.buffer.run))
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def _until_end(self, name, call):
        try:
            call()
        except BaseException as error:
            self.raised[name] = error

    def _prepare(self):
        while (call := self._calls.get()) is not None:
            future, function, args = call
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

    def call(self, function, *args):
        """``function`` in the preparing thread, behind what was submitted before; a future."""
        future = Future()
        self._calls.put((future, function, args))
        return future

    def submit(self, iteration, slot=0, output=None):
        return self.call(self.buffer.prepare, iteration, slot, output)

    def run_alone(self, function):
        """``function`` as a control call, in the device thread; a future."""
        return self.call(self.buffer.call, function)

    def drain(self):
        """Return when all that was submitted is finished; raises what ended the threads."""
        self.call(self.buffer.drain).result(HAND_OVER)

    def close(self):
        self.buffer.close()
        self._calls.put(None)
        for thread in self._threads:
            thread.join(HAND_OVER)
            assert not thread.is_alive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
