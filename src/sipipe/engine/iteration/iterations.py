"""One record for each scheduling output, from the scheduler until its result has been taken in.

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
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from sipipe.engine.iteration.logits_room import LogitsRoom
from sipipe.engine.iteration.work import Work
from sipipe.engine.scheduling.times import Load
from sipipe.messages.replies import IterationReport, KVReport
from sipipe.messages.step import Grammar, Sampled


@dataclass(slots=True, eq=False)
class Iteration:
    """What is known of one iteration."""

    output: SchedulerOutput
    slot: int | None = None
    """The microbatch that it is a turn of; the scheduler's, or number mod m."""
    turn: int = 0
    """Which turn of all slots it is, empty ones counted; 0 of a scheduler that is not ours."""
    load: Load = field(default_factory=Load)
    """What is in it, if the scheduler is ours."""
    scheduled: tuple[int, int] | None = None
    """When its scheduling began and ended, in monotonic nanoseconds, if the scheduler is ours."""
    number: int = -1
    """Counted from 0 as iterations are published; -1 before."""
    planned: bool = False
    """Workers have it, but for its tokens."""
    work: Work = field(default_factory=Work)
    logits_row: int = -1
    """Where its rows of BIC-L begin; -1: it has none."""
    began: float = 0.0
    """When it was numbered, in seconds of ``now``; the stall bound counts from here."""
    published: int = 0
    """When it was on BIC-I, in monotonic nanoseconds; the wait for its tokens begins then."""
    asked: bool = False
    """Whether EngineCore has asked for its tokens, and brought ..."""
    bitmask: GrammarOutput | None = None
    """... what structured output allows."""
    grammar: Grammar | None = None
    tokens: Sequence[Sampled] | None = None
    """What samplers drew, of all of them; None while it is out."""
    report: IterationReport | None = None
    """What the last stage says; None while that is out."""
    movers: int = 0
    """Workers that say what their KV connectors have done; 0 without a connector."""
    moved: dict[int, KVConnectorOutput | None] = field(default_factory=dict)
    """That, by rank."""
    complete: bool = False
    """All is in."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that fail with this iteration, and why."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """What samplers propose to come behind its tokens."""
    future: Future[ModelRunnerOutput] = field(default_factory=Future)
    may_be_long: ClassVar[bool] = False
    """The stall bound holds, whatever the workers say."""

    def __str__(self) -> str:
        return f"iteration {self.number} waits for {self.late}"

    @property
    def rows(self) -> int:
        """Of logits, at most: one for each request, and one for each draft."""
        drafts = self.output.scheduled_spec_decode_tokens.values()
        return len(self.output.num_scheduled_tokens) + sum(map(len, drafts))

    @property
    def late(self) -> str:
        """What the iteration waits for; empty when it is complete."""
        missing, work = [], self.work
        told = work.prompt_logprobs or work.on_device or not work.samplers
        if self.report is None and told and work.request_ids:
            missing.append("the last stage")
        if len(self.moved) < self.movers:
            missing.append("the KV connectors of all workers")
        if self.tokens is None and work.samplers:
            missing.append("samplers " + ", ".join(map(str, work.samplers)))
        return " and ".join(missing)


class Iterations:
    """The iterations of one engine, shared by its scheduler and its executor. ``slots``:
    microbatches in flight, m. ``rows``: of BIC-L. ``now``: the clock of the stall bound.
    ``movers``: workers with a KV connector."""

    def __init__(
        self, slots: int, rows: int, now: Callable[[], float] = time.monotonic, movers: int = 0
    ) -> None:
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
        self._next = self._turn = 0
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        """How many are in flight: begun, and not left."""
        return len(self._in_flight)

    def drafts(self) -> int:
        """Rows of drafts that are in flight, or wait."""
        with self._lock:
            out = [*self._in_flight.values(), *self._waiting]
        return sum(one.rows - len(one.output.num_scheduled_tokens) for one in out)

    def scheduled(
        self, output: SchedulerOutput, slot: int | None, turn: int, began: int, ended: int
    ) -> Iteration:
        """The scheduler made ``output``: its record."""
        iteration = Iteration(output, slot, turn, scheduled=(began, ended))
        with self._lock:
            self._scheduled[id(output)] = iteration
        return iteration

    def enter(self, output: SchedulerOutput) -> Iteration:
        """EngineCore wants ``output`` run: the last of those that wait."""
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(f"SiPipe's executor has failed: {self._failure}")
            # Without tokens it has no record, and no turn but that of the one before.
            iteration = self._scheduled.get(id(output)) or Iteration(output, turn=self._turn)
            self._turn = iteration.turn
            self._waiting.append(iteration)
        return iteration

    def begin(
        self, follow: Callable[[int, SchedulerOutput], Work], short: bool = False
    ) -> Iteration | None:
        """Number the first of those that wait, if its time has come: the turn of its slot before it
        has left, and there is room for its logits, which is so but where requests were aborted in
        flight and others took their places. ``follow`` says what it asks of samplers. None: not yet;
        with ``short`` also where new requests bring prompts and images."""
        with self._lock:
            if not self._waiting or not self._may_begin():
                return None
            if short and self._waiting[0].output.scheduled_new_reqs:
                return None
            iteration = self._waiting.popleft()
            iteration.number, self._next = self._next, self._next + 1
            if iteration.slot is None:
                iteration.slot = iteration.number % self._slots
            iteration.began, iteration.movers = self._now(), self._movers
            iteration.work = follow(iteration.number, iteration.output)
            iteration.logits_row = self._room.take(iteration.number, len(iteration.work.sampled))
            self._in_flight[iteration.number] = iteration
        return iteration

    def plan(self) -> tuple[int, Iteration] | None:
        """The first of those that wait, and its number to be: from now on it is planned."""
        with self._lock:
            if not self._waiting or (first := self._waiting[0]).planned:
                return None
            if first.slot is None or not only_decodes(first.output):
                return None
            first.planned = True
            return self._next, first

    def wait_for_first(self) -> bool:
        """Wait until the first of those that wait may begin; False: none waits."""
        with self._lock:
            # wait: `stall_timeout`, of those in flight; the tokens of one, what fails the engine
            self._left.wait_for(lambda: not self._waiting or self._may_begin())
            return bool(self._waiting)

    def _may_begin(self) -> bool:
        first, oldest = self._waiting[0], next(iter(self._in_flight.values()), None)
        if oldest is not None and first.turn - oldest.turn >= self._slots:
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
            if (iteration := self._in_flight.get(number)) is None:
                return None  # failed meanwhile
            iteration.tokens = tokens if tokens is not None else iteration.tokens
            iteration.report = report if report is not None else iteration.report
            if moved is not None:
                iteration.moved[moved.rank] = moved.output
            if iteration.late or iteration.complete:
                return None
            iteration.complete = True
            return iteration

    def leave(self, iteration: Iteration) -> None:
        """The tokens of a complete iteration are known to who follows requests: those that need them,
        or its rows of logits, may begin."""
        with self._lock:
            self._room.give_back(iteration.number)
            self._in_flight.pop(iteration.number, None)
            self._left.notify_all()

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
                if sampler in iteration.work.samplers and iteration.tokens is None
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
    """Whether it has one token of each request, all of them in others before, in their order."""
    known = output.scheduled_cached_reqs.req_ids
    return (
        not output.scheduled_new_reqs
        and 0 < output.total_num_scheduled_tokens == len(known)
        and list(output.num_scheduled_tokens) == known
    )
