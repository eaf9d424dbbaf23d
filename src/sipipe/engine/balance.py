"""Which sampler draws for which sequence: least loaded first, by the measured cost of its parameters."""

from sipipe.messages.cost import cost_estimate
from sipipe.messages.params import SequenceParams


class Balancer:
    """Shares sequences out over samplers so that their expected work per iteration stays even.

    A sequence stays with its sampler for life, because that is where its state is; new ones go
    to the least loaded. Loads are in seconds per iteration as :func:`cost_estimate` measures
    them, so one top-p sequence weighs as much as several greedy ones.
    """

    def __init__(self, samplers: int, *, vocab_size: int) -> None:
        if samplers < 1:
            raise ValueError(f"samplers must be 1 or more, not {samplers}")
        self._vocab_size = vocab_size
        self._load = [0.0] * samplers
        self._count = [0] * samplers

    def place(self, params: SequenceParams) -> int:
        """The sampler for a new sequence, counted from 0."""
        sampler = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[sampler] += self._cost(params)
        self._count[sampler] += 1
        return sampler

    def remove(self, sampler: int, params: SequenceParams) -> None:
        """A sequence of ``sampler`` left."""
        self._count[sampler] -= 1
        # Exactly zero when empty: rounding must not pile up over millions of requests.
        self._load[sampler] = (
            self._load[sampler] - self._cost(params) if self._count[sampler] else 0.0
        )

    def _cost(self, params: SequenceParams) -> float:
        return cost_estimate(params, self._vocab_size)
