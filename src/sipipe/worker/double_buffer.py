"""Token-safe execution: one set of input buffers is written while another is read (section 4.2).

Two threads share a worker's sets of input buffers, two of them in the paper. The *preparing
thread* writes inputs of iteration i to set ``i mod sets``; the *device thread* runs them in order.

Who runs here
    The preparing thread calls :meth:`DoubleBuffer.prepare` for each scheduling output, and
    :meth:`DoubleBuffer.call` for what is not an iteration. The device thread is inside
    :meth:`DoubleBuffer.run`; only it uses the device. Any thread: ``run_between``, ``close``,
    ``fail``, ``doing``.
Guarantees
    Iterations run in the order in which they were prepared. A set is not written while it is being
    read or holds inputs that were not read yet (:class:`Turns`). A call runs when every iteration
    before it has finished, and nothing beside it. An errand (:meth:`DoubleBuffer.run_between`) runs
    before any iteration that the device thread has not begun. An exception in either thread ends
    both, and is what every later call of either raises; that of a call is the caller's.
Relies on
    The stage's steps spending their time outside the GIL where it matters (Numba ``nogil``, torch
    operators, blocking system calls). They run outside the lock.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sipipe.errors import SiPipeError, StallError

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from sipipe.messages.header import Header
    from sipipe.worker.inputs.model_input import ModelInput


class Work(enum.IntEnum):
    """Kinds of work of the device thread, the first of which goes first."""

    ERRAND = 0
    """Something beside iterations, such as drafts."""
    CALL = 1
    """A control call."""
    ITERATION = 2


class StageStoppedError(SiPipeError):
    """The worker's threads have been told to end."""


@dataclass(slots=True)
class Turns:
    """Which thread may go on: counts of iterations, and nothing else.

    Invariant: ``finished <= taken <= prepared <= finished + sets``, ``taken <= finished + 1``.

    The paper's indicators are CI = ``prepared - 1`` and GI = ``taken - 1``. There, preparing may
    start when CI = GI; here when a set is free, which also covers one set (prepare and run in turn),
    and lets the next inputs be prepared while the device has nothing to run.
    """

    sets: int
    prepared: int = 0
    taken: int = 0
    finished: int = 0
    writing: bool = False

    @property
    def may_write(self) -> bool:
        """True if the set of iteration ``prepared`` holds nothing that is or will be read."""
        return not self.writing and self.prepared - self.finished < self.sets

    @property
    def may_read(self) -> bool:
        """True if iteration ``taken`` is prepared and the device is free."""
        return self.finished == self.taken < self.prepared

    def start_write(self) -> int:
        """Begin to prepare the next iteration; returns its buffer set."""
        assert self.may_write, self
        self.writing = True
        return self.prepared % self.sets

    def end_write(self) -> None:
        """The next iteration is prepared: the paper's CI grows by 1."""
        assert self.writing, self
        self.writing = False
        self.prepared += 1

    def start_read(self) -> None:
        """The device takes the next iteration: the paper's GI grows by 1."""
        assert self.may_read, self
        self.taken += 1

    def end_read(self) -> None:
        """The device has finished an iteration: its set may be written again."""
        assert self.taken == self.finished + 1, self
        self.finished += 1


class Stage(Protocol):
    """The steps of an iteration, each of which one of the two threads runs."""

    def prepare(self, header: Header, buffer_set: int, output: SchedulerOutput) -> ModelInput:
        """The preparing thread's part of an iteration: into a set that nothing reads."""

    def run(self, inputs: ModelInput) -> None:
        """The device thread's part of it."""


class DoubleBuffer:
    """Runs the steps of ``stage`` in two threads.

    Args:
        stage: the steps.
        sets: sets of input buffers. With 1 the two threads run in turn.
        stall_timeout: seconds that :meth:`drain` waits; :meth:`prepare` waits twice as long.
        interrupt: ends a ``run`` that waits for another process. It is called once.
        may_run: says whether a prepared iteration may run now, or an errand has to be run before.
        agree: called in the device thread with the work that it would do; returns what it does, which
            is that of the stage's first rank, so that all ranks do the same in the same order.

    Rejected: one thread that alternates (the bubble that the paper removes); a process that prepares
    (its arrays would have to be shared memory, for 0.1 ms of work); ``queue.Queue``, since the queue
    and the counts must change together.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        sets: int,
        stall_timeout: float,
        interrupt: Callable[[], None],
        may_run: Callable[[ModelInput], bool] = lambda _: True,
        agree: Callable[[Work], Work] = lambda work: work,
    ) -> None:
        self._stage = stage
        self._stall_timeout = stall_timeout
        self._interrupt = interrupt
        self._may_run = may_run
        self._agree = agree
        # One lock for all that follows; a wake-up costs a few tens of microseconds.
        # wait: held for moments; nobody waits under it but on its conditions, which let it go
        self._lock = threading.Lock()
        self._finished = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._turns = Turns(sets)
        self._inputs: deque[ModelInput] = deque()
        """Invariant: ``len(_inputs) == _turns.prepared - _turns.taken``."""
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        """Invariant: at most one, and no iteration is prepared and not finished while there is."""
        self._errands: deque[Callable[[], None]] = deque()
        """Work between iterations, first in, first out."""
        self._end: BaseException | None = None
        """Error that ended the threads first."""
        # What each thread does now. Only that thread writes it, and any may read it without the lock,
        # because a str is replaced at once.
        self._preparing = "waits for a scheduling output"
        self.running = "has not started"
        """Predicate on the device thread, which the stage makes more exact while it runs an iteration."""

    def prepare(self, header: Header, output: SchedulerOutput) -> None:
        """Prepare the iteration of a message of BIC-I; waits until a set is free. Raises
        StageStoppedError: after ``close``. StallError: no set was free in time. BaseException: the
        one that ended either thread, itself."""
        self._preparing = f"waits for free input buffers for iteration {header.number}"
        try:
            with self._lock:
                # The engine's bound comes first, and says more.
                self._wait(lambda: self._turns.may_write, 2 * self._stall_timeout)
                buffer_set = self._turns.start_write()
            self._preparing = f"prepares iteration {header.number}"
            inputs = self._stage.prepare(header, buffer_set, output)
            with self._lock:
                self._check()
                self._turns.end_write()
                self._inputs.append(inputs)
                self._work.notify()
        except BaseException as error:
            self.fail(error)
        self._check()
        self._preparing = "waits for a scheduling output"

    def call(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` in the device thread when no iteration is in the worker, and return its
        result; from the preparing thread. Raises what ``function`` raises, and as :meth:`drain`."""
        self._preparing = "waits for the end of a call"
        try:
            self.drain()
            future: Future[Any] = Future()
            with self._lock:
                self._calls.append((function, future))
                self._work.notify()
                # wait: none here, the engine's for the call; the device thread, `close`, `fail`
                self._finished.wait_for(lambda: self._end or future.done())
                if not future.done():
                    self._check()
            return future.result(0)  # wait: none: it is done; nobody
        finally:
            self._preparing = "waits for a scheduling output"

    def run_between(self, errand: Callable[[], None]) -> None:
        """Have the device thread run ``errand`` before its next iteration; from any thread. What it
        raises ends both threads."""
        with self._lock:
            self._errands.append(errand)
            self._work.notify()

    def run(self) -> None:
        """Be the device thread until ``close`` or an error, which is raised."""
        try:
            while True:
                self._run_one()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):  # a signal: the process ends
                raise
        if not isinstance(self._end, StageStoppedError):
            self._check()

    def _run_one(self) -> None:
        self.running = "waits for inputs"
        with self._lock:
            # wait: none, as an idle engine has nothing to run; `prepare`, `call`, `run_between`,
            # `close`, `fail`
            self._work.wait_for(lambda: self._end or any(map(self._is_there, Work)))
            self._check()
            first = next(filter(self._is_there, Work))
        work = self._agree(first)
        with self._lock:
            # wait: none here, the engine's for an iteration or a call; this rank's own copy of the
            # message that the first rank has got, `close`, `fail`
            self._work.wait_for(lambda: self._end or self._is_there(work))
            self._check()
            if work is Work.ERRAND:
                errand = self._errands.popleft()
            elif work is Work.ITERATION:
                self._turns.start_read()
                inputs = self._inputs.popleft()
        if work is Work.ERRAND:
            self.running = "runs an errand"
            errand()
            return
        if work is Work.CALL:
            self._run_call()
            return
        self.running = f"runs iteration {inputs.iteration}"
        self._stage.run(inputs)
        with self._lock:
            self._check()
            self._turns.end_read()
            self._finished.notify()

    def _is_there(self, work: Work) -> bool:
        """Say if there is such work; the lock is held."""
        if work is Work.ERRAND:
            return bool(self._errands)
        if work is Work.CALL:
            return bool(self._calls)
        return self._turns.may_read and self._may_run(self._inputs[0])

    def _run_call(self) -> None:
        self.running = "runs a call"
        function, future = self._calls[0]
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        with self._lock:
            self._calls.popleft()
            self._finished.notify()

    def drain(self) -> None:
        """Return when every prepared iteration is finished; from the preparing thread. Raises
        StallError: not within the stall time-out. BaseException: as :meth:`prepare`."""
        turns = self._turns
        with self._lock:
            self._wait(lambda: turns.finished == turns.prepared, self._stall_timeout)

    def _wait(self, until: Callable[[], bool], seconds: float) -> None:
        """Sleep until the device thread has made it so; the lock is held."""
        # wait: `stall_timeout` for an idle worker, twice that for free buffers; the device thread,
        # `close`, `fail`
        done = self._finished.wait_for(lambda: self._end or until(), seconds)
        self._check()
        if not done:
            raise StallError(
                f"waited {seconds:g} s for the device thread: {self.doing()} "
                f"({self._turns.prepared - self._turns.finished} iterations prepared and not "
                "finished)"
            )

    def fail(self, error: BaseException) -> None:
        """End both threads with ``error``, unless something has ended them already."""
        with self._lock:
            if self._end is not None:
                return
            self._end = error
            self._finished.notify()
            self._work.notify()
        self._interrupt()

    def close(self) -> None:
        """End both threads, waiting ones now, others after their step; does not wait for them, and
        drops iterations that are not finished."""
        self.fail(StageStoppedError("the worker's threads have been told to end"))

    def doing(self) -> str:
        """Predicates on both threads, for the report of a stall."""
        return f"(preparing thread) {self._preparing}, (device thread) {self.running}"

    def _check(self) -> None:
        if self._end is not None:
            raise self._end
