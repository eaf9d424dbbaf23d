"""Which sampler draws for which sequence: least loaded first, by the measured cost of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sipipe.engine.iteration.tracked_request import TrackedRequest
from sipipe.messages.cost import cost_estimate
from sipipe.messages.params import SequenceParams

TOLERATED = 0.05
"""Share of its work by which a sampler may have more than another before a sequence moves."""
MOVABLE = 32_768
"""Tokens up to which a sequence moves: they take three entries of BIC-I, which has 64 for each of the
microbatches that a sampler can be behind. So who moves one waits for no sampler
(:meth:`sipipe.engine.iteration.dispatch.Dispatcher.publish_due`)."""
PAYS = 0.9
"""A sequence moves only if it costs less than this part of the difference: else back and forth."""


class Balancer:
    """Shares the sequences of a microbatch out over samplers so that their work stays even.

    A microbatch is drawn when its last sampler is done, so only what is drawn together counts. A new
    sequence goes to the sampler with least to do in its microbatch. As sequences leave and move,
    one changes its sampler too, at most one each iteration: its state is built from its tokens.

    Bound: once nothing joins, leaves or changes microbatches, and all may move, the busiest sampler
    has no more than the idlest one and the larger of ``TOLERATED`` of its own work and the cost of
    its lightest sequence, divided by ``PAYS``.
    """

    def __init__(self, samplers: int, *, vocab_size: int) -> None:
        assert samplers >= 1
        self.samplers = samplers
        self._vocab_size = vocab_size
        self._turn = 0

    def cost(self, params: SequenceParams) -> float:
        """Seconds per iteration: one top-p sequence weighs as much as several greedy ones."""
        return cost_estimate(params, self._vocab_size)

    def loads(self, sequences: Iterable[TrackedRequest]) -> list[float]:
        """Estimate the seconds that each sampler has to do for ``sequences``."""
        loads = [0.0] * self.samplers
        for sequence in sequences:
            loads[sequence.sampler] += sequence.cost
        return loads

    def place(self, cost: float, beside: list[float]) -> int:
        """The sampler for a new sequence, counted from 0; among equal ones they take turns.
        ``beside``: :meth:`loads` of the microbatch that it joins; the sequence is added there."""
        count = self.samplers
        self._turn = self._turn + 1
        sampler = min(range(count), key=lambda i: (beside[i], (i - self._turn + 1) % count))
        beside[sampler] += cost
        return sampler

    def move(self, members: Sequence[TrackedRequest]) -> int | None:
        """Give one of ``members`` another sampler if that evens their work. Returns its index."""
        if self.samplers == 1:
            return None
        loads = self.loads(members)
        busiest = loads.index(max(loads))
        idlest = loads.index(min(loads))
        gap = loads[busiest] - loads[idlest]
        if gap <= TOLERATED * loads[busiest]:
            return None
        fitting = [
            (abs(gap - 2 * member.cost), index)
            for index, member in enumerate(members)
            if member.sampler == busiest and member.cost < PAYS * gap and len(member) <= MOVABLE
        ]
        if not fitting:
            return None
        _, index = min(fitting)
        members[index].sampler = idlest
        return index
