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

All times are :class:`sipipe.engine.scheduling.times.BatchTimes`, fitted twice on each stage. What
prompts are cut by is fitted to all batches. Each s_i is fitted to decodes alone, by their rows alone,
and begins with hardly a price of a row: so fewer and larger batches are tried until some differ in
size, which tells it.

Runs on the engine's thread alone, and is not safe for more. It relies on being asked once a visit;
:class:`MeasuredTimes` takes in what was measured while an iteration is out.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial
from operator import sub
from typing import NamedTuple

from sipipe.best_effort import BestEffort
from sipipe.engine.iteration.iteration import Iteration
from sipipe.engine.scheduling.times import (
    ENOUGH,
    OUTLIER,
    TOGETHER,
    BatchTimes,
    Load,
    Prices,
    usual,
)
from sipipe.messages.period import passing, period
from sipipe.observe.live import Key, LivePage, Word
from sipipe.observe.phases import COUNTED_PHASES, MAIN_PHASE, Phase

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
_LEVEL = Prices(1.0, 1e-3, 0.0, 0.0, 0.0)
"""A row hardly counts."""


class ConcurrencyController:
    """Stage times seen so far, and the number of microbatches, ``slots`` at most, that they
    recommend. ``first``: what a load takes before it has been measured."""

    def __init__(self, *, stages: int, slots: int, first: Prices | None = None) -> None:
        self.first = first or usual()
        self.times = BatchTimes([self.first] * stages + [_LEVEL] * (2 * stages + 1))
        """Of each stage; of its decodes, and of their output projection; from the last to the first."""
        self._prices, self._priced = self.first, 0
        self.stages = stages
        self.unseen = 0.0
        """Seconds of a pipeline period that no phase has: wake-ups, messages, the way between hosts."""
        self.formed = slots
        """What :meth:`microbatches` said last."""
        self.rows = 1.0
        """Of a sequence in a pass, lately: with drafts more than one. Lines are by rows."""
        self.slots = slots
        self.chosen = slots
        self._pricing = BestEffort("pricing by the stages' times", bounded=False)
        self._choosing = BestEffort("choosing the number of microbatches", bounded=False)
        self._held = 0
        self._held_for = self._asked = 0

    def prices(self) -> Prices:
        """On the stage that takes longest for a prompt's chunk (for a decoding batch it may be
        another), in seconds; in tokens until that is known."""
        if self.times.fits != self._priced:
            self._priced = self.times.fits
            self._prices = self._pricing(self._prices, self._slowest)
        return self._prices

    def _slowest(self) -> Prices:
        found = [self.times.prices(i) for i in range(self.stages)]
        sure = all(self.times.sure(i) for i in range(self.stages))
        chunk = Load(1.0, 0.0, _CHUNK, 0.0, _CHUNK * _CHUNK / 2)
        slowest = max(found, key=lambda each: each.of(chunk))
        # What is pending has a price.
        slowest = slowest._replace(token=max(slowest.token, 1e-9))
        return slowest if sure else self.first

    @property
    def measured(self) -> bool:
        """Whether :meth:`prices` are seconds."""
        return self._prices is not self.first

    def period(self, sequences: int, microbatches: int) -> float:
        """R(k): seconds in which each of ``sequences`` gets a token, or several by drafts."""
        return self._period(-(-sequences // microbatches) * self.rows, microbatches, self.unseen)

    def _period(self, batch: float, microbatches: int, unseen: float) -> float:
        slowest, phases = self._decoding(batch)
        return microbatches * period([slowest], phases + unseen, microbatches)

    def _decoding(self, batch: float) -> tuple[float, float]:
        """Seconds of one microbatch on the slowest stage, and of its way that are some phase's."""
        each, p = self.times.seconds(Load(1.0, batch)), self.stages
        own, shared = each[p : 2 * p], each[2 * p : 3 * p]
        return max(own), passing(own, shared) + each[3 * p]

    def _ready(self) -> bool:
        return min(self.times.weight[self.stages : 2 * self.stages]) >= ENOUGH

    def price(self, sequences: float) -> float | None:
        """What part of a period one more row in each microbatch of ``sequences`` costs, 0 to 1;
        None: not known yet. What no phase has is left out: rows lengthen it too on few cores."""
        if not self._ready() or not all(self.times.sloped[self.stages : 2 * self.stages]):
            return None
        rows = sequences * self.rows
        now, more = (self._period(rows + added, self.formed, 0.0) for added in (0, 1))
        return max(0.0, more - now) / now

    def within(self, seconds: float, most: int) -> int:
        """With how many rows in each microbatch, up to ``most``, a period takes so long at most."""
        if not self._ready():
            return most
        took = partial(self._period, microbatches=self.formed, unseen=self.unseen)
        return bisect_right(range(1, most + 1), seconds, key=took)

    def took(self, seconds: float, batch: float, microbatches: int) -> None:
        """A pipeline period of so many microbatches of ``batch`` sequences took ``seconds``. Where
        the slowest stage fills it, what no phase has is at most what is left, and is forgotten
        little by little: too much of it speaks for many microbatches, with which nothing would ever
        correct it; too little brings fewer, with which it is seen."""
        if not self._ready():
            return
        slowest, phases = self._decoding(batch)
        unseen = min(seconds - phases, OUTLIER * max(self.unseen, 0.0) + 1e-3)
        if microbatches > 1 and microbatches * slowest > FULL * seconds:
            unseen = min(unseen, FORGET * self.unseen)
        self.unseen += 0.1 * (unseen - self.unseen)

    def microbatches(self, sequences: int) -> int:
        """How many microbatches ``sequences`` decoding sequences should form; one call a visit."""
        most = max(1, min(self.slots, sequences))
        self._held += 1
        self._choosing(None, self._choose, sequences, most)
        self.formed = min(self.chosen, most)
        return self.formed

    def _choose(self, sequences: int, most: int) -> None:
        # What was chosen for the last few of a burst says nothing for the next burst.
        few, many = sorted((sequences, self._held_for))
        held = self._held < HOLD and many <= ALIKE * few
        # A visit costs the engine's thread what it asks; answers change as stages' times do.
        again = sequences != self._asked or self._held % TOGETHER == 0
        if not held and again and self._ready():
            self._asked = sequences
            best = min(range(1, most + 1), key=lambda k: (self.period(sequences, k), -k))
            now = self.period(sequences, min(self.chosen, most))
            if self.period(sequences, best) < (1 - GAIN) * now:
                self.chosen, self._held, self._held_for = best, 0, sequences


class MeasuredTimes:
    """Feeds a controller what the processes have taken since the last poll, by ``page``: of a stage
    its first rank. The executor counts a batch when its tokens are in; samplers share it out, and
    work side by side. ``way``: the executor's phases between the last stage and the first; none: all."""

    def __init__(
        self,
        controller: ConcurrencyController,
        page: LivePage,
        *,
        samplers: int,
        way: Sequence[Phase] = (),
    ) -> None:
        self.controller = controller
        keys: list[Key] = [("stage", i, 0) for i in range(controller.stages)]
        self._stages = [_Delta(page, key) for key in keys]
        self._projections = [_Delta(page, key, (Phase.LOGITS,)) for key in keys]
        self._samplers = [_Delta(page, ("sampler", i, 0)) for i in range(samplers)]
        self._executor = _Delta(page, ("executor", 0, 0), way)
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
        loads = []
        stages = [process.take() for process in self._stages]
        for process, taken, coming in zip(self._stages, stages, self._coming, strict=True):
            load, ended = Load(), process.ended
            for _ in range(taken.batches):  # one that ends just now is counted by the next poll
                if coming and 0 <= coming[0].number < ended:
                    load = load.plus(coming.popleft().scheduled.load)
            loads.append(load)
            self._decodes &= taken.sequences == taken.tokens
        decodes = stages + [process.take() for process in self._projections]
        count, sequences, _, spent = self._executor.take()
        drawn = [process.take() for process in self._samplers] if count else []
        slowest = max((t.nanoseconds / t.batches for t in drawn if t.batches), default=0.0)
        loads += [taken.decodes for taken in decodes] + [Load(count, sequences)]
        times = [taken.nanoseconds for taken in stages + decodes] + [spent + slowest * count]
        if any(load.batches for load in loads):
            self.controller.times.add(loads, [each / 1e9 for each in times])
        if not count:
            return
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

    @property
    def decodes(self) -> Load:
        """Of decodes alone; of others, nothing."""
        return Load(self.batches, self.sequences) if self.sequences == self.tokens else Load()


NOTHING = Taken(0, 0, 0, 0)


class _Delta:
    """What one process has taken since it was last asked: in ``phases``, or in all that count."""

    def __init__(self, page: LivePage, key: Key, phases: Sequence[Phase] = ()) -> None:
        self._words = page.block(key)
        phases = phases or COUNTED_PHASES[key[0]]
        self._counted = [int(Word.PHASE_NS + phase) for phase in phases]
        self._last = int(Word.PHASE_LAST + MAIN_PHASE[key[0]])
        self._before = NOTHING

    @property
    def ended(self) -> int:
        """All iterations before this one have been through the main phase."""
        number: int = self._words[self._last]
        return number

    def take(self) -> Taken:
        """Batches, sequences, tokens and nanoseconds since the last call; without a batch, the
        time is left for the call that sees one."""
        words, before = self._words, self._before
        batches, sequences, tokens = words[0], words[1], words[2]
        if batches == before.batches:
            return NOTHING
        now = Taken(batches, sequences, tokens, sum([words[word] for word in self._counted]))
        delta = Taken(*map(sub, now, before))
        self._before = now
        return delta
