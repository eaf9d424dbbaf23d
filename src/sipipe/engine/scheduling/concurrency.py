"""The concurrency controller: how many microbatches to form, by measured stage times.

n sequences in k microbatches of b = n / k get a token each in one pipeline period,

    R(k) = max(sum of s_i(b) + h(b), k * max of s_i(b))

where s_i(b) is the time of stage i for b sequences and h(b) what is needed between the last stage
and the first (sampling, scheduling, messages): k times what :mod:`sipipe.messages.period` has. The
first term is one microbatch's way through the pipeline, the second the slowest stage's work on all
k. With equal stages k = p or p + 1 is best however thin the microbatches are; where one stage is much
longer than the others (a large vocabulary behind few layers, say) or h is small, a second thin
microbatch only pays that stage's fixed cost again. What no phase has (wake-ups, messages, the way
between hosts) is part of h: it is what a period takes longer than its phases, where the first term is
the longer one.

All times are :class:`sipipe.engine.scheduling.times.BatchTimes`, fitted twice on each stage. The prices
that prompts are cut by are fitted to all batches. Each s_i is fitted to decodes alone, by their rows
alone, and begins with hardly a price of a row: so one microbatch fewer is tried, and one fewer again,
until batches have differed enough in size to tell it.

Who runs here: the engine's thread, alone. Relies on being asked once a visit; :class:`MeasuredTimes`
takes in what was measured while an iteration is out.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
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
"""Part of what no phase has that is then still believed, as far as one microbatch says anything."""
UNSEEN_RATE = 0.1
"""Weight of the last period in what no phase has."""
ALIKE = 1.5
"""Ratio of two numbers of sequences up to which they are about as many."""
MOST_COMING = 1024
"""Iterations that a stage may be behind with its figures; the oldest of more is forgotten."""
KEPT_AGAIN = 4
"""Multiple of fits after which prices are kept again: an engine of a million batches does it nine times."""
_CHUNK = 1024.0
"""Tokens of a prompt's chunk by which the slowest stage is found."""
_LEVEL = Prices(fixed=1.0, row=1e-3, token=0.0, context=0.0, pair=0.0)
"""Prices to begin with of what only decodes: a row hardly counts."""


class ConcurrencyController:
    """Stage times seen so far, and the number of microbatches that they recommend.

    Args:
        stages: Stages of the pipeline, p.
        slots: The most microbatches.
        first: Prices of a load before it has been measured; None: :func:`usual` ones.
        keep: Receives measured prices, in seconds, now and then; returns at once, False if it has to
            be asked again at the next fit. None: nobody does.
    """

    def __init__(
        self,
        *,
        stages: int,
        slots: int,
        first: Prices | None = None,
        keep: Callable[[Prices], bool] | None = None,
    ) -> None:
        self.stages = stages
        self.slots = slots
        self.first = first or usual()
        self.times = BatchTimes([self.first] * stages + [_LEVEL] * (2 * stages + 1))
        """Times of each stage; of its decodes; of their output projection; and, in the last place, of
        the way from the last stage to the first."""
        self._prices = self.first
        self._priced = 0  # fits of the times that the prices are of
        self.unseen = 0.0
        """Seconds of a pipeline period that no phase has: wake-ups, messages, the way between hosts."""
        self.rows = 1.0
        """Rows of a sequence in a pass, lately: with drafts more than one. Prices are by rows."""
        # Of one stage a second microbatch hides no other stage: it only reads the weights again.
        self.chosen = 1 if stages == 1 else slots
        """The number that the last choice fell on, also where there are fewer sequences."""
        self.formed = self.chosen
        """The number that :meth:`microbatches` returned last."""
        self._keep = keep
        self._kept_at = 0  # fits of the times that were kept last
        self._keeping = BestEffort("keeping the stages' times for the next start", bounded=False)
        self._pricing = BestEffort("pricing by the stages' times", bounded=False)
        self._choosing = BestEffort("choosing the number of microbatches", bounded=False)
        # Visits since the last choice, the sequences that it was for, and those of the last question.
        self._visits = 0
        self._chosen_for = 0
        self._asked_for = 0

    def prices(self) -> Prices:
        """Prices on the stage that takes longest for a prompt's chunk (for a decoding batch it may be
        another), in seconds; in tokens until that is known."""
        if self.times.fits != self._priced:
            self._priced = self.times.fits
            self._prices = self._pricing(self._prices, self._slowest)
            due = self.measured and self.times.fits >= KEPT_AGAIN * self._kept_at
            # What fails counts as kept: it is not tried again at each fit.
            if due and self._keep is not None and self._keeping(True, self._keep, self._prices):
                self._kept_at = self.times.fits
        return self._prices

    def _slowest(self) -> Prices:
        """Prices on the slowest stage; the first ones until all stages' are sure."""
        if not all(self.times.sure(stage) for stage in range(self.stages)):
            return self.first
        stages = [self.times.prices(stage) for stage in range(self.stages)]
        pairs = _CHUNK * _CHUNK / 2
        chunk = Load(batches=1.0, rows=0.0, tokens=_CHUNK, context=0.0, pairs=pairs)
        slowest = max(stages, key=lambda prices: prices.of(chunk))
        # The throttle divides by a token's price, and takes prompts without one for none.
        return slowest._replace(token=max(slowest.token, 1e-9))

    @property
    def measured(self) -> bool:
        """True if :meth:`prices` are seconds."""
        return self._prices is not self.first

    def period(self, sequences: int, microbatches: int) -> float:
        """R(k): seconds in which each of ``sequences`` gets a token, or several by drafts."""
        largest = -(-sequences // microbatches)
        return self._period(largest * self.rows, microbatches, self.unseen)

    def alone(self, sequences: int) -> float:
        """Seconds of a period in which all of ``sequences`` decode, in the microbatches that are formed,
        and no prompt is computed; 0 where that is not known, or nothing decodes.

        As long as hardly a microbatch was of decodes alone, as where requests and a long prompt have come
        together, it is what prices of all batches say of the slowest stage.
        """
        if not sequences:
            return 0.0
        microbatches = max(1, min(self.formed, sequences))
        if self._ready():
            return self.period(sequences, microbatches)
        if not self.measured:
            return 0.0
        largest = -(-sequences // microbatches)
        return microbatches * self._prices.of(Load(batches=1.0, rows=largest * self.rows))

    def _period(self, rows: float, microbatches: int, unseen: float) -> float:
        """Seconds of a period of so many microbatches of ``rows`` each, with ``unseen`` ones."""
        slowest, phases = self._decoding(rows)
        return microbatches * period([slowest], phases + unseen, microbatches)

    def _decoding(self, rows: float) -> tuple[float, float]:
        """Seconds of one microbatch on the slowest stage, and of its way that are some phase's."""
        seconds = self.times.seconds(Load(batches=1.0, rows=rows))
        stages = seconds[self.stages : 2 * self.stages]
        projections = seconds[2 * self.stages : 3 * self.stages]
        between = seconds[3 * self.stages]
        return max(stages), passing(stages, projections) + between

    def _ready(self) -> bool:
        """Say if the stages' times for decodes are known."""
        return min(self.times.weight[self.stages : 2 * self.stages]) >= ENOUGH

    def _sloped(self) -> bool:
        """Say if the stages' decodes have differed in size enough to tell a row's price."""
        return all(self.times.sloped[self.stages : 2 * self.stages])

    def price(self, sequences: float) -> float | None:
        """The part of a period, 0 to 1, that one more row in each microbatch of ``sequences`` costs;
        None: not known yet. What no phase has is left out: rows lengthen it too on few cores."""
        if not self._ready() or not self._sloped():
            return None
        rows = sequences * self.rows
        before = self._period(rows, self.formed, 0.0)
        after = self._period(rows + 1, self.formed, 0.0)
        return max(0.0, after - before) / before

    def within(self, seconds: float, most: int) -> int:
        """The most rows in each microbatch, up to ``most``, with which a period takes ``seconds`` at
        most; ``most`` where times are not known."""
        if not self._ready():
            return most
        took = partial(self._period, microbatches=self.formed, unseen=self.unseen)
        return bisect_right(range(1, most + 1), seconds, key=took)

    def took(self, seconds: float, batch: float, microbatches: int) -> None:
        """Learn that a pipeline period of so many microbatches of ``batch`` sequences took ``seconds``.

        Where the slowest stage fills it, what no phase has is at most what is left, and is forgotten
        little by little: too much of it speaks for many microbatches, with which nothing would ever
        correct it; too little brings fewer, with which it is seen.
        """
        if not self._ready():
            return
        slowest, phases = self._decoding(batch)
        unseen = min(seconds - phases, OUTLIER * max(self.unseen, 0.0) + 1e-3)
        if microbatches > 1 and microbatches * slowest > FULL * seconds:
            unseen = min(unseen, FORGET * self.unseen)
        self.unseen += UNSEEN_RATE * (unseen - self.unseen)

    def microbatches(self, sequences: int) -> int:
        """The number of microbatches that ``sequences`` decoding sequences should form, 1 to
        :attr:`slots`; one call a visit."""
        most = max(1, min(self.slots, sequences))
        self._visits += 1
        self._choosing(None, self._choose, sequences, most)
        self.formed = min(self.chosen, most)
        return self.formed

    def _choose(self, sequences: int, most: int) -> None:
        """Choose anew where another number, ``most`` at most, promises a period shorter by :data:`GAIN`."""
        if not self._ready():
            return
        # A choice holds for a while, but for about as many sequences only: what was chosen for the
        # last few of a burst says nothing for the next burst.
        few, many = sorted((sequences, self._chosen_for))
        if self._visits < HOLD and many <= ALIKE * few:
            return
        # A visit costs the engine's thread what it asks; answers change as stages' times do.
        if sequences == self._asked_for and self._visits % TOGETHER != 0:
            return
        self._asked_for = sequences
        current = min(self.chosen, most)
        # Until a row's price is known, fewer microbatches always look shorter. One fewer tells that
        # price, and costs little where the promise is wrong; a single one would idle every other stage.
        fewest = 1 if self._sloped() else max(1, current - 1)
        periods = {number: self.period(sequences, number) for number in range(fewest, most + 1)}
        best = min(periods, key=lambda number: (periods[number], -number))
        if periods[best] < (1 - GAIN) * periods[current]:
            self.chosen = best
            self._chosen_for = sequences
            self._visits = 0


class MeasuredTimes:
    """Feeds a controller what the processes have taken since the last poll; a stage is measured by its
    first rank. The executor counts a batch when its tokens are in; samplers share it out, and work
    side by side.

    Args:
        page: The page that the processes count on.
        samplers: Samplers that draw; 0 where the last stage does.
        way: The executor's phases between the last stage and the first; none: all.
    """

    def __init__(
        self,
        controller: ConcurrencyController,
        page: LivePage,
        *,
        samplers: int,
        way: Sequence[Phase] = (),
    ) -> None:
        self.controller = controller
        keys: list[Key] = [("stage", stage, 0) for stage in range(controller.stages)]
        self._stages = [_Delta(page, key) for key in keys]
        self._projections = [_Delta(page, key, (Phase.LOGITS,)) for key in keys]
        self._samplers = [_Delta(page, ("sampler", number, 0)) for number in range(samplers)]
        self._executor = _Delta(page, ("executor", 0, 0), way)
        self._coming: list[deque[Iteration]] = [deque(maxlen=MOST_COMING) for _ in keys]
        """Iterations, in order, that each stage has not said anything of yet."""
        self._ends: deque[float] = deque(maxlen=controller.slots + 1)
        """Times when batches came back, one after the other, without prompts, pauses or a change of k."""
        self._formed = controller.formed
        self._only_decodes = True

    def pause(self) -> None:
        """Note that there was no request for a while."""
        self._ends.clear()

    def expect(self, iteration: Iteration) -> None:
        """Note that ``iteration``, whose load is known, goes through the stages."""
        for coming in self._coming:
            coming.append(iteration)

    def poll(self, now: float | None = None) -> None:
        """Count all that has happened since the last poll, at ``now`` on the monotonic clock."""
        stages = [process.advance() for process in self._stages]
        loads = self._loads(stages)
        projections = [process.advance() for process in self._projections]
        returned = self._executor.advance()
        drawing = self._drawing() if returned.batches else 0.0
        decodes = stages + projections
        loads += [progress.decodes for progress in decodes]
        loads.append(Load(batches=returned.batches, rows=returned.sequences))
        times: list[float] = [progress.nanoseconds for progress in stages + decodes]
        times.append(returned.nanoseconds + drawing * returned.batches)
        if any(load.batches for load in loads):
            self.controller.times.add(loads, [nanoseconds / 1e9 for nanoseconds in times])
        if returned.batches:
            self._count_periods(returned, time.monotonic() if now is None else now)

    def _loads(self, stages: Sequence["Progress"]) -> list[Load]:
        """The loads, by stage, of the iterations that ``stages`` have counted."""
        loads = []
        for process, progress, coming in zip(self._stages, stages, self._coming, strict=True):
            load = Load()
            ended = process.ended
            for _ in range(progress.batches):  # one that ends just now is counted by the next poll
                if coming and 0 <= coming[0].number < ended:
                    load = load.plus(coming.popleft().scheduled.load)
            loads.append(load)
            self._only_decodes &= progress.sequences == progress.tokens
        return loads

    def _drawing(self) -> float:
        """Nanoseconds that a batch takes on the sampler that takes longest."""
        drawn = [process.advance() for process in self._samplers]
        return max(
            (progress.nanoseconds / progress.batches for progress in drawn if progress.batches),
            default=0.0,
        )

    def _count_periods(self, returned: "Progress", now: float) -> None:
        """Tell the controller what a period took, where k batches in a row were of decodes alone."""
        formed = self.controller.formed
        if not self._only_decodes or formed != self._formed or returned.batches > formed:
            self._ends.clear()
        self._formed = formed
        self._only_decodes = True
        self._ends.extend([now] * returned.batches)
        if len(self._ends) > formed:
            seconds = now - self._ends[-1 - formed]
            self.controller.took(seconds, returned.sequences / returned.batches, formed)


class Progress(NamedTuple):
    """Batches that a process has worked through, and the time that they took."""

    batches: int
    sequences: int
    tokens: int
    nanoseconds: int

    @property
    def decodes(self) -> Load:
        """The load, where it was of decodes alone; of others, nothing."""
        if self.sequences != self.tokens:
            return Load()
        return Load(batches=self.batches, rows=self.sequences)


NOTHING = Progress(batches=0, sequences=0, tokens=0, nanoseconds=0)


class _Delta:
    """Progress of one process from call to call; its time in ``phases``, or in all that count."""

    def __init__(self, page: LivePage, key: Key, phases: Sequence[Phase] = ()) -> None:
        self._words = page.block(key)
        phases = phases or COUNTED_PHASES[key[0]]
        self._counted = [int(Word.PHASE_NS + phase) for phase in phases]
        self._last = int(Word.PHASE_LAST + MAIN_PHASE[key[0]])
        self._before = NOTHING

    @property
    def ended(self) -> int:
        """The first iteration that may not have been through the main phase: all before it have."""
        number: int = self._words[self._last]
        return number

    def advance(self) -> Progress:
        """Progress since the last call; without a batch there is none, and the time is left for the
        call that sees one."""
        batches = self._words[Word.BATCHES]
        before = self._before
        if batches == before.batches:
            return NOTHING
        now = Progress(
            batches=batches,
            sequences=self._words[Word.SEQUENCES],
            tokens=self._words[Word.TOKENS],
            nanoseconds=sum([self._words[word] for word in self._counted]),
        )
        self._before = now
        return Progress(
            batches=now.batches - before.batches,
            sequences=now.sequences - before.sequences,
            tokens=now.tokens - before.tokens,
            nanoseconds=now.nanoseconds - before.nanoseconds,
        )
