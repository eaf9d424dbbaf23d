"""The CPU executor and the device executor as threads (paper section 4.2, figure 6).

Who runs here
    The CPU executor's thread calls ``prepare`` (and ``announce``) for each scheduling output; the
    device executor's thread calls ``receive``, ``forward`` and ``send`` for each prepared input.
    The caller's thread submits, drains and closes. With ``device_thread=False`` there is no
    second thread: the caller runs the device executor itself with :meth:`StageExecutor.run_device`
    (for a device that wants the process's main thread).
Guarantees
    Iterations are prepared, and run, in the order in which they were submitted. ``forward`` of an
    iteration reads inputs that nobody writes (:mod:`sipipe.worker.machine`). An exception in
    either thread ends both: ``on_error`` is called once with the exception itself, and every
    later call of the caller raises it. After ``close`` both threads have ended.
Relies on
    The callables spending their time outside the GIL where it matters (Numba ``nogil``, torch,
    blocking system calls).
Rejected
    One thread that alternates (the bubble the paper removes); a process for the CPU executor (its
    arrays would have to be shared memory on CUDA's terms, for a preparation of 0.1 ms).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, Self

from sipipe.errors import StallError
from sipipe.worker.communicator import Communicator, Prepared, StageStoppedError, Statistics
from sipipe.worker.machine import Role


class StageCalls(Protocol):
    """What the executors call. Every method gets the caller's number of the iteration first."""

    def prepare(self, iteration: int, slot: int, version: int, output: Any) -> Any:
        """CPU executor: write the inputs of ``output`` into ``version``; returns the model input."""

    def announce(self, iteration: int, inputs: Any) -> None:
        """CPU executor: the inputs are known; post the receive of the hidden states."""

    def receive(self, iteration: int, inputs: Any) -> Any:
        """Device executor: the hidden states of the previous stage, or None on the first."""

    def forward(self, iteration: int, inputs: Any, received: Any) -> Any:
        """Device executor: run the model. Must return when the inputs have been read."""

    def send(self, iteration: int, inputs: Any, result: Any) -> None:
        """Device executor: hand the result to the next stage, or to the samplers."""


class StageExecutor:
    """Both executors of one worker.

    Args:
        calls: what they do.
        versions: input versions, 2 in the paper; 1 prepares and runs in turn.
        depth: most iterations in the worker at once (the microbatches in flight).
        on_error: called once, in the failing thread, with the iteration and the exception.
        interrupt: called by ``close`` and after an error, to end a ``receive`` or ``send`` that
            waits for another process.
        stall_timeout: seconds that ``submit``, ``drain`` and ``close`` may wait.
        device_thread: False to run the device executor with :meth:`run_device`.
        name: of the threads.
    """

    def __init__(
        self,
        calls: StageCalls,
        *,
        versions: int = 2,
        depth: int = 8,
        on_error: Callable[[int, BaseException], None] | None = None,
        interrupt: Callable[[], None] | None = None,
        stall_timeout: float = 300.0,
        device_thread: bool = True,
        name: str = "SiPipe",
    ) -> None:
        self._calls = calls
        self._versions = versions
        self._communicator = Communicator(
            versions=versions, depth=depth, stall_timeout=stall_timeout
        )
        self._on_error = on_error
        self._interrupt = interrupt
        self._stall_timeout = stall_timeout
        self._threads = [
            threading.Thread(target=self._run, args=(self._prepare_all,), name=f"{name}-cpu")
        ]
        if device_thread:
            self._threads.append(
                threading.Thread(target=self._run, args=(self._run_all,), name=f"{name}-device")
            )
        for thread in self._threads:
            thread.daemon = True  # a thread inside a hung call must not keep the process
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- the caller ---------------------------------------------------------------------------

    def submit(self, iteration: int, slot: int, output: Any) -> None:
        """Hand in a scheduling output. Returns at once unless ``depth`` iterations are under way.

        Raises:
            StallError: no room within the stall time-out.
            StageStoppedError: after ``close``.
            Exception: the one that ended an executor, itself.
        """
        self._communicator.submit(iteration, slot, output)

    def drain(self, timeout: float | None = None) -> None:
        """Return when all submitted iterations are done. Raises like :meth:`submit`."""
        self._communicator.drain(timeout)

    def run_device(self) -> None:
        """Be the device executor until ``close`` or an error, which is raised."""
        try:
            self._run_all()
        except StageStoppedError:
            return

    def statistics(self) -> Statistics:
        """Counts of iterations so far."""
        return self._communicator.statistics()

    def doing(self) -> str:
        """What both executors do now, for a stall report."""
        return self._communicator.doing()

    def close(self) -> None:
        """End both executors, at any point. Iterations that are not done are dropped.

        Raises:
            StallError: a call did not come back within the stall time-out.
        """
        self._communicator.stop()
        if self._interrupt is not None:
            self._interrupt()
        for thread in self._threads:
            if thread is threading.current_thread():
                continue
            thread.join(self._stall_timeout)
            if thread.is_alive():
                raise StallError(
                    f"thread {thread.name} did not end within {self._stall_timeout:g} s: "
                    + self.doing()
                )

    # ---- the threads --------------------------------------------------------------------------

    def _run(self, loop: Callable[[], None]) -> None:
        # Told by _failing where it happened; otherwise the end of the other thread's error.
        with suppress(BaseException):
            loop()

    def _prepare_all(self) -> None:
        communicator, calls = self._communicator, self._calls
        while True:
            communicator.set_doing(Role.CPU, "waits for a scheduling output")
            scheduled, number = communicator.take_output()
            label = scheduled.label
            with self._failing(label):
                communicator.set_doing(Role.CPU, f"prepares iteration {label}")
                inputs = calls.prepare(
                    label, scheduled.slot, number % self._versions, scheduled.output
                )
                calls.announce(label, inputs)
                communicator.prepared(Prepared(label, number, inputs))

    def _run_all(self) -> None:
        communicator, calls = self._communicator, self._calls
        while True:
            communicator.set_doing(Role.DEVICE, "waits for a model input")
            item = communicator.take_input()
            label, inputs = item.label, item.inputs
            with self._failing(label):
                communicator.set_doing(Role.DEVICE, f"waits for hidden states of iteration {label}")
                received = calls.receive(label, inputs)
                communicator.set_doing(Role.DEVICE, f"runs iteration {label}")
                result = calls.forward(label, inputs, received)
                communicator.set_doing(Role.DEVICE, f"hands over iteration {label}")
                calls.send(label, inputs, result)
                communicator.finished()

    @contextmanager
    def _failing(self, iteration: int) -> Iterator[None]:
        """An exception of ours ends both executors and is reported; one of the other's only ends."""
        try:
            yield
        except StageStoppedError:
            raise
        except BaseException as error:
            if self._communicator.fail(error):
                if self._on_error is not None:
                    self._on_error(iteration, error)
                if self._interrupt is not None:
                    self._interrupt()
            raise
