"""The concurrency controller: how many microbatches to form, by measured stage times.

n sequences in k microbatches of b = n / k get a token each in one pipeline period,

    R(k) = max(sum of s_i(b) + h(b), k * max of s_i(b))

where s_i(b) is the time of stage i for b sequences and h(b) what is needed between the last stage
and the first (sampling, scheduling, messages): k times what :mod:`sipipe.messages.period` has. The
first term is one microbatch's way through the pipeline, the second the slowest stage's work on all k. With equal stages k = p or p + 1 is best
however thin the microbatches are; where one stage is much longer than the others (a large
vocabulary behind few layers, say) or h is small, a second thin microbatch only pays that stage's
fixed cost again. What no phase has (wake-ups, messages, the way between hosts) is part of h: it is
what a period takes longer than its phases, where the first term is the longer one.

Each s_i is a straight line, fixed + per sequence, fitted to what the stages took lately. Batches of
one size say nothing of its slope. The slope seen last, when sizes differed, is kept then; before
there was any, all is taken as fixed cost, and the smaller k that follows brings the batches of
another size that tell the two apart.

Prompts are another matter: what a microbatch with them takes is predicted by
:mod:`sipipe.engine.scheduling.times`, which is fed here too. Its line of decodes is not used for k: on
CPUs few rows and many differ by more than a line has, and k came out worse (docs/log.md).

Runs on the engine's thread alone, and is not safe for more. It relies on being asked once a visit;
:class:`MeasuredTimes` costs a few microseconds of it.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sipipe.engine.iterations import Iteration
from sipipe.engine.scheduling.times import (
    COLD,
    ENOUGH,
    MEMORY,
    OUTLIER,
    BatchTimes,
    Load,
    Prices,
    usual,
)
from sipipe.messages.period import passing, period
from sipipe.observe.live import Key, LivePage, Word
from sipipe.observe.phases import COUNTED_PHASES, MAIN_PHASE, Phase

SPREAD = 0.15
"""Standard deviation of batch sizes, as a share of their mean, below which they give no slope."""
GAIN = 0.05
"""Share of a pipeline period that a change of k must promise."""
HOLD = 24
"""Visits between two changes for about as many sequences."""
FULL = 0.7
"""Part of a pipeline period that the slowest stage's work takes from which on that stage may be all
that the period waits for: what no phase has can be anything then."""
FORGET = 0.8
"""What is then believed to be left of what it was, as far as one microbatch says anything."""
ALIKE = 1.5
"""Ratio of two numbers of sequences up to which they are about as many."""
MOST_COMING = 1024
"""Iterations that a stage may be behind with its figures; the oldest of more is forgotten."""
_CHUNK = 1024.0
"""Tokens of a prompt's chunk by which the slowest stage is found."""
_PROJECTION = (Phase.LOGITS, Phase.HANDOVER)


@dataclasses.dataclass(slots=True)
class RunningRegression:
    """Seconds of a batch by its sequences: weighted least squares with forgetting."""

    weight: float = 0.0
    _b: float = 0.0
    _bb: float = 0.0
    _t: float = 0.0
    _bt: float = 0.0
    _slope: float = 0.0
    sloped: bool = False
    """Whether batches have differed in size enough to tell a sequence's part of the time."""
    _seen: int = 0

    def add(self, batch: float, seconds: float, count: int = 1) -> None:
        """``count`` batches of ``batch`` sequences took ``seconds`` each."""
        self._seen += count
        if self._seen <= COLD:
            return
        if self.weight >= ENOUGH:
            seconds = min(seconds, OUTLIER * self(batch))
        kept = MEMORY**count
        self.weight = self.weight * kept + count
        self._b = self._b * kept + count * batch
        self._bb = self._bb * kept + count * batch * batch
        self._t = self._t * kept + count * seconds
        self._bt = self._bt * kept + count * batch * seconds
        mean = self._b / self.weight
        spread = self._bb / self.weight - mean * mean
        if spread > (SPREAD * mean) ** 2:
            self._slope = (self._bt / self.weight - mean * self._t / self.weight) / spread
            self.sloped = True

    def __call__(self, batch: float) -> float:
        """Expected seconds of a batch of ``batch`` sequences."""
        mean, time = self._b / self.weight, self._t / self.weight
        slope = min(max(self._slope, 0.0), time / mean if mean else 0.0)
        return time + slope * (batch - mean)


class ConcurrencyController:
    """Stage times seen so far, and the number of microbatches that they recommend.

    Args:
        stages: Pipeline stages, p.
        slots: Microbatches in flight at most, m.
        first: what a load takes before it has been measured.
    """

    def __init__(self, *, stages: int, slots: int, first: Prices | None = None) -> None:
        self.first = first or usual()
        self.times = BatchTimes([self.first] * stages)
        """Of each stage, prompts too."""
        self._prices, self._priced = self.first, 0.0
        self.stages = [RunningRegression() for _ in range(stages)]
        self.projections = [RunningRegression() for _ in range(stages)]
        """Of these times, what the output projection and the logits' hand-over take."""
        self.between = RunningRegression()
        """What sampling and scheduling take between the last stage and the first."""
        self.unseen = 0.0
        """Seconds of a pipeline period that no phase has: wake-ups, messages, the way between hosts."""
        self.formed = slots
        """What :meth:`microbatches` said last."""
        self.slots = slots
        self.chosen = slots
        self._held = 0
        self._held_for = 0

    def prices(self) -> Prices:
        """On the stage that takes longest, in seconds; in tokens until that is known.

        The stage that is slowest for a decoding batch and for a prompt's chunk may differ: that of
        a chunk counts.
        """
        weight = self.times.weight[0]
        if weight != self._priced:
            self._priced = weight
            found = [self.times.prices(i) for i in range(len(self.stages))]
            sure = all(self.times.sure(i) for i in range(len(self.stages)))
            chunk = Load(1.0, 0.0, _CHUNK, 0.0, _CHUNK * _CHUNK / 2)
            slowest = max(found, key=lambda each: each.of(chunk))
            slowest = slowest._replace(
                token=max(slowest.token, 1e-9)
            )  # what is pending has a price
            self._prices = slowest if sure else self.first
        return self._prices

    @property
    def measured(self) -> bool:
        """Whether :meth:`prices` are seconds."""
        return self._prices is not self.first

    def period(self, sequences: int, microbatches: int) -> float:
        """R(k): seconds in which each of ``sequences`` gets a token."""
        batch = -(-sequences // microbatches)
        round_trip = self._phases(batch) + self.unseen
        return microbatches * period([self._slowest(batch)], round_trip, microbatches)

    def _phases(self, batch: float) -> float:
        """Seconds of one microbatch's way through the pipeline that are some phase's."""
        between = self.between(batch) if self.between.weight >= ENOUGH else 0.0
        shared = [one(batch) for one in self.projections if one.weight >= ENOUGH]
        return passing([stage(batch) for stage in self.stages], shared) + between

    def _slowest(self, batch: float) -> float:
        return max(stage(batch) for stage in self.stages)

    def _ready(self) -> bool:
        return all(stage.weight >= ENOUGH for stage in self.stages)

    def price(self, batch: float) -> float | None:
        """What of a pass of ``batch`` rows one of them costs, 0 to 1; None while it is not known."""
        if not all(stage.weight >= ENOUGH and stage.sloped for stage in self.stages):
            return None
        passes = sum(stage(batch) for stage in self.stages)
        return max(0.0, sum(stage(batch + 1) for stage in self.stages) - passes) / passes

    def took(self, seconds: float, batch: float, microbatches: int) -> None:
        """A pipeline period of so many microbatches of ``batch`` sequences took ``seconds``.

        Where the slowest stage fills it, what no phase has is at most what is left, and is forgotten
        little by little: too much of it speaks for many microbatches, with which nothing would ever
        correct it; too little brings fewer, with which it is seen.
        """
        if not self._ready():
            return
        unseen = min(seconds - self._phases(batch), OUTLIER * max(self.unseen, 0.0) + 1e-3)
        full = microbatches > 1 and microbatches * self._slowest(batch) > FULL * seconds
        if full:
            unseen = min(unseen, FORGET * self.unseen)
        self.unseen += 0.1 * (unseen - self.unseen)

    def microbatches(self, sequences: int) -> int:
        """How many microbatches ``sequences`` decoding sequences should form; one call a visit."""
        most = max(1, min(self.slots, sequences))
        self._held += 1
        # What was chosen for the last few of a burst says nothing for the next burst.
        few, many = sorted((sequences, self._held_for))
        held = self._held < HOLD and many <= ALIKE * few
        if not held and self._ready():
            best = min(range(1, most + 1), key=lambda k: (self.period(sequences, k), -k))
            now = self.period(sequences, min(self.chosen, most))
            if self.period(sequences, best) < (1 - GAIN) * now:
                self.chosen, self._held, self._held_for = best, 0, sequences
        self.formed = min(self.chosen, most)
        return self.formed


class MeasuredTimes:
    """Feeds a controller what the processes have taken since the last poll.

    Only batches of decodes count for k: prompts have prices of their own.

    Args:
        controller: what is fed.
        page: what all have taken, of a stage its first rank. The executor counts a batch when its tokens are in.
        samplers: how many there are; they share a batch out and work side by side.
    """

    def __init__(self, controller: ConcurrencyController, page: LivePage, *, samplers: int) -> None:
        self.controller = controller
        keys: list[Key] = [("stage", i, 0) for i in range(len(controller.stages))]
        self._stages = [_Delta(page, key) for key in keys]
        self._projections = [_Delta(page, key, _PROJECTION) for key in keys]
        self._samplers = [_Delta(page, ("sampler", i, 0)) for i in range(samplers)]
        self._executor = _Delta(page, ("executor", 0, 0))
        self._coming: list[deque[Iteration]] = [deque(maxlen=MOST_COMING) for _ in keys]
        """What each stage has not said anything of yet, in order."""
        self._ends: deque[float] = deque(maxlen=controller.slots + 1)
        """When batches came back, one after the other, without prompts, pauses or a change of k."""
        self._formed, self._decodes = controller.formed, True

    def pause(self) -> None:
        """There was no request for a while."""
        self._ends.clear()

    def expect(self, iteration: Iteration) -> None:
        """``iteration``, whose load is known, goes through the stages."""
        for coming in self._coming:
            coming.append(iteration)

    def poll(self, now: float | None = None) -> None:
        """Take in what has happened since the last poll, at ``now`` on the monotonic clock."""
        loads, times = [], []
        for process, regression, coming in zip(
            self._stages, self.controller.stages, self._coming, strict=True
        ):
            count, sequences, tokens, spent = process.take()
            load, ended = Load(), process.ended
            for _ in range(count):  # a batch that ends just now is counted by the next poll
                if coming and 0 <= coming[0].number < ended:
                    load = load.plus(coming.popleft().load)
            loads.append(load)
            times.append(spent / 1e9)
            self._decodes &= sequences == tokens
            if count and sequences == tokens:
                regression.add(sequences / count, spent / 1e9 / count, count)
        if any(load.batches for load in loads):
            self.controller.times.add(loads, times)
        for process, regression in zip(self._projections, self.controller.projections, strict=True):
            count, sequences, tokens, spent = process.take()
            if count and sequences == tokens:
                regression.add(sequences / count, spent / 1e9 / count, count)
        count, sequences, _, spent = self._executor.take()
        if not count:
            return
        seconds = spent / 1e9
        drawn = [process.take() for process in self._samplers]
        slowest = max((t.nanoseconds / 1e9 / t.batches for t in drawn if t.batches), default=0.0)
        self.controller.between.add(sequences / count, seconds / count + slowest, count)
        now = time.monotonic() if now is None else now
        formed = self.controller.formed
        if not self._decodes or formed != self._formed or count > formed:
            self._ends.clear()
        self._formed, self._decodes = formed, True
        self._ends.extend([now] * count)
        if len(self._ends) > formed:
            self.controller.took(now - self._ends[-1 - formed], sequences / count, formed)


class Taken(NamedTuple):
    """What a process took for some batches."""

    batches: int
    sequences: int
    tokens: int
    nanoseconds: int


class _Delta:
    """What one process has taken since it was last asked: in ``phases``, or in all that count."""

    def __init__(self, page: LivePage, key: Key, phases: Sequence[Phase] = ()) -> None:
        self._words = page.block(key)
        phases = phases or COUNTED_PHASES[key[0]]
        self._counted = [int(Word.PHASE_NS + phase) for phase in phases]
        self._last = int(Word.PHASE_LAST + MAIN_PHASE[key[0]])
        self._before = Taken(0, 0, 0, 0)

    @property
    def ended(self) -> int:
        """All iterations before this one have been through the main phase."""
        number: int = self._words[self._last]
        return number

    def take(self) -> Taken:
        """Batches, sequences, tokens and nanoseconds since the last call; without a batch, the
        time is left for the call that sees one."""
        words = self._words
        batches, sequences, tokens = words[: Word.TOKENS + 1]
        now = Taken(batches, sequences, tokens, sum([words[word] for word in self._counted]))
        delta = Taken(*(new - old for new, old in zip(now, self._before, strict=True)))
        if delta.batches:
            self._before = now
        return delta
