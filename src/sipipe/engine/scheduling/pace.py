"""How many microbatches to form: as many as make a rotation shortest, by measured stage times.

n sequences in k microbatches of b = n / k go round in

    R(k) = max(sum of s_i(b) + h(b), k * max of s_i(b))

where s_i(b) is the time of stage i for b sequences and h(b) what is needed between the last stage
and the first (sampling, scheduling, messages). The first term is one microbatch's way through the
pipeline, the second the slowest stage's work on all k. With equal stages k = p or p + 1 is best
however thin the microbatches are; where one stage is much longer than the others (a large
vocabulary behind few layers, say) or h is small, a second thin microbatch only pays that stage's
fixed cost again.

Each s_i is a straight line, fixed + per sequence, fitted to what the stages took lately. Batches of
one size say nothing of its slope. The slope seen last, when sizes differed, is kept then; before
there was any, all is taken as fixed cost, and the smaller k that follows brings the batches of
another size that settle it.

Runs on the engine's thread alone, and is not safe for more. It relies on being asked once a visit.
"""

from __future__ import annotations

import dataclasses

__all__ = ["Line", "Pace"]

MEMORY = 0.995
"""Weight of a batch relative to the one after it: about the last 200 count."""
COLD = 16
"""First batches that do not count: they load pages, warm caches and compile."""
ENOUGH = 12.0
"""Weight of batches that a line needs before it is used."""
OUTLIER = 3.0
"""Times of more than this multiple of the expected one are cut to it: the stage was interrupted."""
SPREAD = 0.15
"""Standard deviation of batch sizes, as a share of their mean, below which they give no slope."""
GAIN = 0.05
"""Share of a rotation that a change of k must promise."""
HOLD = 24
"""Visits between two changes for about as many sequences."""
ALIKE = 1.5
"""Ratio of two numbers of sequences up to which they are about as many."""


@dataclasses.dataclass(slots=True)
class Line:
    """Seconds of a batch by its sequences: weighted least squares with forgetting."""

    weight: float = 0.0
    _b: float = 0.0
    _bb: float = 0.0
    _t: float = 0.0
    _bt: float = 0.0
    _slope: float = 0.0
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

    def __call__(self, batch: float) -> float:
        """Expected seconds of a batch of ``batch`` sequences."""
        mean, time = self._b / self.weight, self._t / self.weight
        slope = min(max(self._slope, 0.0), time / mean if mean else 0.0)
        return time + slope * (batch - mean)


class Pace:
    """Stage times seen so far, and the number of microbatches that they recommend.

    Args:
        stages: Pipeline stages, p.
        slots: Microbatches in flight at most, m.
    """

    def __init__(self, *, stages: int, slots: int) -> None:
        self.stages = [Line() for _ in range(stages)]
        self.between = Line()
        """What sampling and scheduling take between the last stage and the first."""
        self.unseen = 0.0
        """Seconds of a rotation that no phase has: wake-ups, messages. Seen with one microbatch
        alone in the pipeline, and kept."""
        self.formed = slots
        """What :meth:`microbatches` said last."""
        self.slots = slots
        self.chosen = slots
        self._held = 0
        self._held_for = 0

    def rotation(self, sequences: int, microbatches: int) -> float:
        """R(k): seconds in which each of ``sequences`` gets a token."""
        batch = -(-sequences // microbatches)
        times = [stage(batch) for stage in self.stages]
        between = self.between(batch) if self.between.weight >= ENOUGH else 0.0
        return max(sum(times) + between + self.unseen, microbatches * max(times))

    def alone(self, seconds: float) -> None:
        """A rotation of one microbatch took ``seconds`` more than its phases.

        A pause between requests looks the same: what is much more than before is cut.
        """
        seconds = min(max(seconds, 0.0), OUTLIER * self.unseen + 1e-3)
        self.unseen += 0.1 * (seconds - self.unseen)

    def microbatches(self, sequences: int) -> int:
        """How many microbatches ``sequences`` decoding sequences should form; one call a visit."""
        most = max(1, min(self.slots, sequences))
        self._held += 1
        # What was chosen for the last few of a burst says nothing for the next burst.
        few, many = sorted((sequences, self._held_for))
        held = self._held < HOLD and many <= ALIKE * few
        if not held and all(stage.weight >= ENOUGH for stage in self.stages):
            best = min(range(1, most + 1), key=lambda k: (self.rotation(sequences, k), -k))
            now = self.rotation(sequences, min(self.chosen, most))
            if self.rotation(sequences, best) < (1 - GAIN) * now:
                self.chosen, self._held, self._held_for = best, 0, sequences
        self.formed = min(self.chosen, most)
        return self.formed
