"""The communicator: two bounded queues and the state of both executors, under one lock.

Who runs here: the worker's own loop (``submit``, ``drain``, ``stop``), the CPU executor's thread
(``take_output``, ``prepared``) and the device executor's (``take_input``, ``finished``).

Guarantees
    Iterations leave both queues in the order in which they were submitted. Every start and finish
    passes through :func:`sipipe.worker.machine.fire`, which refuses what is not token safe. After
    the first error every waiting or later call raises that error itself; after ``stop`` every
    call raises :class:`StageStoppedError`.
Relies on
    One lock with three conditions. A wake-up costs a few tens of microseconds, against
    milliseconds of an iteration; the work itself is done outside the lock.
Bounds
    At most ``depth`` iterations between ``submit`` and the device's finish; ``submit`` waits for
    room, for at most ``stall_timeout`` seconds.
Rejected
    ``queue.Queue``, since a queue's state and the indicators must change together; and waking
    with time-outs to look around, which wakes an idle engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from sipipe.errors import SiPipeError, StallError
from sipipe.worker.machine import Event, Role, State, Status, fire, may


class StageStoppedError(SiPipeError):
    """The executors have been shut down."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One scheduling output on its way to the CPU executor."""

    label: int
    """The caller's number of the iteration, for messages and for callables."""
    slot: int
    output: Any


@dataclass(frozen=True, slots=True)
class Prepared:
    """One model input on its way to the device executor."""

    label: int
    number: int
    """Position in this worker's sequence of iterations, from 0; decides the version."""
    inputs: Any


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of what has passed through."""

    submitted: int
    prepared: int
    taken: int
    finished: int
    most_waiting: int
    """Most iterations that were ever between submit and finish."""


class Communicator:
    """Queues and indicators of one worker.

    Args:
        versions: input versions.
        depth: most iterations in the worker at once, 1 or more.
        stall_timeout: seconds that ``submit`` and ``drain`` may wait.
    """

    def __init__(self, *, versions: int, depth: int, stall_timeout: float) -> None:
        if versions < 1 or depth < 1:
            raise ValueError("versions and depth must be 1 or more")
        self._lock = threading.Lock()
        self._cpu = threading.Condition(self._lock)
        self._device = threading.Condition(self._lock)
        self._caller = threading.Condition(self._lock)
        self._status = Status(versions)
        self._outputs: deque[Scheduled] = deque()
        self._inputs: deque[Prepared] = deque()
        self._depth = depth
        self._stall_timeout = stall_timeout
        self._submitted = 0
        self._finished = 0
        self._most = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._doing: dict[Role, str] = {}

    # ---- the worker's loop --------------------------------------------------------------------

    def submit(self, label: int, slot: int, output: Any) -> None:
        """Queue a scheduling output; waits while ``depth`` iterations are in the worker.

        Raises:
            StallError: no room within the time-out; names what the executors wait for.
            Exception: whatever stopped an executor.
        """
        with self._lock:
            self._wait(
                self._caller,
                lambda: self._submitted - self._finished < self._depth,
                f"room for iteration {label}",
            )
            self._outputs.append(Scheduled(label, slot, output))
            self._submitted += 1
            self._most = max(self._most, self._submitted - self._finished)
            self._cpu.notify()

    def drain(self, timeout: float | None = None) -> None:
        """Return when every submitted iteration is finished.

        Raises:
            StallError: not within ``timeout`` seconds (default: the stall time-out).
            Exception: whatever stopped an executor.
        """
        with self._lock:
            self._wait(
                self._caller,
                lambda: self._submitted == self._finished,
                "the worker to run empty",
                timeout,
            )

    def stop(self) -> None:
        """End both executors: waiting ones now, running ones after their iteration."""
        with self._lock:
            self._stopped = True
            self._halt()

    def fail(self, error: BaseException) -> bool:
        """Stop with ``error``; returns whether it is the first."""
        with self._lock:
            first = self._error is None
            if first:
                self._error = error
            self._halt()
            return first

    # ---- the CPU executor ---------------------------------------------------------------------

    def take_output(self) -> tuple[Scheduled, int]:
        """Wait for a scheduling output and a free version; returns it and its number.

        Raises:
            StageStoppedError or the error that stopped the other executor.
        """
        with self._lock:
            self._wait_to_start(self._cpu, Role.CPU, self._outputs)
            scheduled = self._outputs.popleft()
            number = self._status.ci + 1
            self._status = fire(self._status, Role.CPU, Event.START)
            return scheduled, number

    def prepared(self, item: Prepared) -> None:
        """The inputs of ``item`` are written: CI + 1, and wake the device."""
        with self._lock:
            self._check()
            self._status = fire(self._status, Role.CPU, Event.FINISH)
            assert item.number == self._status.ci
            self._inputs.append(item)
            self._device.notify()

    # ---- the device executor ------------------------------------------------------------------

    def take_input(self) -> Prepared:
        """Wait for a prepared input and take it: GI + 1.

        Raises:
            StageStoppedError or the error that stopped the other executor.
        """
        with self._lock:
            self._wait_to_start(self._device, Role.DEVICE, self._inputs)
            self._status = fire(self._status, Role.DEVICE, Event.START)
            item = self._inputs.popleft()
            assert item.number == self._status.gi
            self._cpu.notify()
            return item

    def finished(self) -> None:
        """The device is done with the version it read."""
        with self._lock:
            self._check()
            self._status = fire(self._status, Role.DEVICE, Event.FINISH)
            self._finished += 1
            self._cpu.notify()
            self._caller.notify_all()

    # ---- looking in ---------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Counts so far."""
        with self._lock:
            return Statistics(
                submitted=self._submitted,
                prepared=self._status.ci + 1,
                taken=self._status.gi + 1,
                finished=self._finished,
                most_waiting=self._most,
            )

    def set_doing(self, role: Role, text: str) -> None:
        """What an executor does now, for the report of a stall."""
        self._doing[role] = text

    def doing(self) -> str:
        """What both executors do now, in one line."""
        return "; ".join(
            f"{role.value} {self._doing.get(role, 'has not started')}" for role in Role
        )

    # ---- under the lock -----------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise StageStoppedError("the stage's executors have been shut down")

    def _wait_to_start(self, condition: threading.Condition, role: Role, queue: deque[Any]) -> None:
        # No bound: an idle engine waits here for its next request. A stall is found by whoever
        # waits for an iteration, in `submit`, `drain` or the engine.
        while True:
            self._check()
            if queue and may(self._status, role, Event.START):
                return
            condition.wait()

    def _wait(
        self,
        condition: threading.Condition,
        holds: Any,
        what: str,
        timeout: float | None = None,
    ) -> None:
        seconds = self._stall_timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        while True:
            self._check()
            if holds():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise StallError(
                    f"waited {seconds:g} s for {what}: {self.doing()} "
                    f"(CI {self._status.ci}, GI {self._status.gi}; "
                    f"{self._submitted - self._finished} iterations in the worker)"
                )
            condition.wait(left)

    def _halt(self) -> None:
        for role in Role:
            if self._status.state(role) is not State.STOPPED:
                self._status = fire(self._status, role, Event.STOP)
        self._outputs.clear()
        self._inputs.clear()
        for condition in (self._cpu, self._device, self._caller):
            condition.notify_all()
