"""Table of the iterations of an engine, from the scheduler until their results have been taken in.

Who runs here
    The engine thread schedules, enters and finishes iterations; the gather thread and the events
    thread deliver what samplers and the last stage say of them. Each of them begins those that wait,
    the engine thread always, the others where that takes no time. All under one lock.
Guarantees
    Iterations begin in the order in which they entered, each when the one of its slot's last turn,
    and all before that, have left: the tokens that it needs are known then. The first of those that
    wait is planned, if it only decodes: workers have it already, but for its tokens. The logits of
    those in flight have rows of BIC-L of their own (:mod:`.logits_room`). A future is resolved once:
    with the output when all is in, or with what stopped the engine. After ``fail`` none begins.
Relies on
    EngineCore hands one ``SchedulerOutput`` object to ``execute_model`` and ``update_from_output``;
    that object is how scheduler and executor name the same iteration.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress

from vllm.v1.core.sched.output import SchedulerOutput

from sipipe.engine.iteration.iteration import Begun, Iteration, Scheduled
from sipipe.engine.iteration.logits_room import LogitsRoom
from sipipe.engine.iteration.work import Work
from sipipe.messages.replies import IterationReport, KVReport
from sipipe.messages.step import Sampled


class Iterations:
    """The iterations of one engine, shared by its scheduler and its executor."""

    def __init__(
        self, slots: int, rows: int, now: Callable[[], float] = time.monotonic, movers: int = 0
    ) -> None:
        """Make an empty table.

        Args:
            slots: microbatches in flight, m.
            rows: rows of BIC-L.
            now: clock of the stall bound, in seconds.
            movers: workers with a KV connector.
        """
        self._movers = movers
        self._slots = slots
        self._now = now
        self._room = LogitsRoom(rows)
        # wait: held for moments; nobody waits under it but on its condition, which lets it go
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        """Notified when an iteration has left, or the engine has failed."""
        # By identity of the scheduling output, which the record keeps alive: from schedule() to
        # update_from_output(). Empty where the scheduler is not ours.
        self._scheduled: dict[int, Iteration] = {}
        self._waiting: deque[Iteration] = deque()
        """Entered, and not begun."""
        self._in_flight: dict[int, Iteration] = {}
        self._next = 0
        """Number of the iteration that begins next."""
        self._turn = 0
        """Turn of the iteration that entered last."""
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        """Number of iterations in flight: begun, and not left."""
        return len(self._in_flight)

    def drafts(self) -> int:
        """Rows of drafts that are in flight, or wait."""
        with self._lock:
            out = [*self._in_flight.values(), *self._waiting]
        return sum(iteration.scheduled.drafts for iteration in out)

    def record(self, scheduled: Scheduled) -> Iteration:
        """Make the record of an output that the scheduler has made; the engine thread."""
        iteration = Iteration(scheduled)
        with self._lock:
            self._scheduled[id(scheduled.output)] = iteration
        return iteration

    def enter(self, output: SchedulerOutput) -> Iteration:
        """EngineCore wants ``output`` run: the last of those that wait."""
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(f"SiPipe's executor has failed: {self._failure}")
            # Without tokens it has no record, and no turn but that of the one before.
            iteration = self._scheduled.get(id(output))
            if iteration is None:
                iteration = Iteration(Scheduled(output=output, turn=self._turn))
            self._turn = iteration.scheduled.turn
            self._waiting.append(iteration)
        return iteration

    def begin(
        self, follow: Callable[[int, SchedulerOutput], Work], short: bool = False
    ) -> Iteration | None:
        """Begin the first of those that wait, if its time has come.

        Its time has come when the turn of its slot before it has left, and there is room for its
        logits; that is so but where requests were aborted in flight and others took their places.

        Args:
            follow: makes the work of samplers and workers from number and scheduling output.
            short: leave out those whose new requests bring prompts and images, which take time.

        Returns the iteration, or None: none waits, or it is not yet time.
        """
        with self._lock:
            if not self._waiting or not self._may_begin():
                return None
            if short and self._waiting[0].output.scheduled_new_reqs:
                return None
            # It waits until it is in flight: what `follow` raises fails the engine, and `fail` has to
            # find it.
            iteration = self._waiting[0]
            number = self._next
            slot = iteration.scheduled.slot
            began = self._now()
            work = follow(number, iteration.output)
            iteration.begun = Begun(
                number=number,
                slot=number % self._slots if slot is None else slot,
                work=work,
                logits_row=self._room.take(number, len(work.sampled)),
                movers=self._movers,
                began=began,
            )
            self._in_flight[number] = iteration
            self._waiting.popleft()
            self._next += 1
        return iteration

    def plan(self) -> tuple[int, Iteration] | None:
        """Plan the first of those that wait; returns its number to be and the iteration, or None:
        none waits, it is planned already, or it does more than decode.

        Nor is it planned while a head may be asked for drafts behind tokens of those in flight: what it
        ends is not followed before it begins, and such a request could write to blocks that it has given
        to others.
        """
        with self._lock:
            if not self._waiting or any(one.scheduled.asks for one in self._in_flight.values()):
                return None
            first = self._waiting[0]
            if first.on_bus.planned or first.scheduled.slot is None:
                return None
            if not only_decodes(first.output):
                return None
            first.on_bus.planned = True
            return self._next, first

    def wait_for_first(self) -> bool:
        """Wait until the first of those that wait may begin; False: none waits."""
        with self._lock:
            # wait: `stall_timeout`, of those in flight; the tokens of one, what fails the engine
            self._left.wait_for(lambda: not self._waiting or self._may_begin())
            return bool(self._waiting)

    def _may_begin(self) -> bool:
        first = self._waiting[0].scheduled
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is not None and first.turn - oldest.scheduled.turn >= self._slots:
            return False
        return self._room.find(first.rows) is not None

    def deliver(
        self,
        number: int,
        *,
        tokens: Sequence[Sampled] | None = None,
        report: IterationReport | None = None,
        moved: KVReport | None = None,
    ) -> Iteration | None:
        """Take in what came; returns the iteration if it is complete with that."""
        with self._lock:
            iteration = self._in_flight.get(number)
            if iteration is None:
                return None  # failed meanwhile
            answers = iteration.answers
            if tokens is not None:
                answers.tokens = tokens
            if report is not None:
                answers.report = report
            if moved is not None:
                answers.moved[moved.rank] = moved.output
            if iteration.late or answers.complete:
                return None
            answers.complete = True
            return iteration

    def leave(self, iteration: Iteration) -> None:
        """The tokens of a complete iteration are known to who follows requests: those that need them,
        or its rows of logits, may begin."""
        with self._lock:
            self._room.give_back(iteration.number)
            self._in_flight.pop(iteration.number, None)
            self._left.notify_all()

    def outputs_with(self, request_id: str) -> list[SchedulerOutput]:
        """Scheduling outputs that a request is in and whose results have not been taken in."""
        with self._lock:
            return [
                iteration.output
                for iteration in self._scheduled.values()
                if request_id in iteration.output.num_scheduled_tokens
            ]

    def requests(self) -> set[str]:
        """Requests in scheduling outputs whose results have not been taken in."""
        with self._lock:
            return {
                request_id
                for iteration in self._scheduled.values()
                for request_id in iteration.output.num_scheduled_tokens
            }

    def finish(self, output: SchedulerOutput) -> Iteration | None:
        """The scheduler takes the result of ``output`` in: the record goes."""
        with self._lock:
            return self._scheduled.pop(id(output), None)

    def undrawn(self, sampler: int) -> list[Iteration]:
        """Those in flight that ``sampler`` has rows in and that are not drawn, in order."""
        with self._lock:
            return [
                iteration
                for iteration in self._in_flight.values()
                if sampler in iteration.work.samplers and iteration.answers.tokens is None
            ]

    def oldest(self) -> Iteration | None:
        """The first of those in flight."""
        with self._lock:
            return next(iter(self._in_flight.values()), None)

    def fail(self, error: BaseException) -> None:
        """Resolve every iteration that waits or is in flight with ``error``."""
        with self._lock:
            self._failure = error
            failed = [*self._in_flight.values(), *self._waiting]
            self._in_flight = {}
            self._waiting.clear()
            self._left.notify_all()
        for iteration in failed:
            number = iteration.number if iteration.number >= 0 else "that waits"
            why = RuntimeError(f"iteration {number} failed: {error}")
            with suppress(InvalidStateError):
                iteration.future.set_exception(why)


def only_decodes(output: SchedulerOutput) -> bool:
    """Say if ``output`` has one token of each request, all known before, in their order."""
    known = output.scheduled_cached_reqs.req_ids
    return (
        not output.scheduled_new_reqs
        and 0 < output.total_num_scheduled_tokens == len(known)
        and list(output.num_scheduled_tokens) == known
    )
