"""Which sampler draws for which sequence: least loaded first, by the measured cost of its parameters."""

from collections.abc import Iterable

from sipipe.messages.cost import cost_estimate
from sipipe.messages.params import SequenceParams


class Balancer:
    """Shares sequences out over samplers so that their expected work per iteration stays even.

    An iteration is one microbatch, and is drawn when its last sampler is done. So a new sequence
    goes to the sampler with the least to do in the microbatch that it joins; among equal ones, to
    the one with the least in all. It stays there for life, because that is where its state is.
    Loads are in seconds per iteration as :func:`cost_estimate` measures them, so one top-p sequence
    weighs as much as several greedy ones.
    """

    def __init__(self, samplers: int, *, vocab_size: int) -> None:
        assert samplers >= 1
        self._vocab_size = vocab_size
        self._load = [0.0] * samplers
        self._count = [0] * samplers

    def loads(self, sequences: Iterable[tuple[int, SequenceParams]]) -> list[float]:
        """What each sampler has to do for ``sequences``, each with its sampler."""
        loads = [0.0] * len(self._load)
        for sampler, params in sequences:
            loads[sampler] += self._cost(params)
        return loads

    def place(self, params: SequenceParams, beside: list[float]) -> int:
        """The sampler for a new sequence, counted from 0.

        ``beside``: :meth:`loads` of the microbatch that it joins; the sequence is added there.
        """
        cost = self._cost(params)
        sampler = min(range(len(beside)), key=lambda index: (beside[index], self._load[index]))
        beside[sampler] += cost
        self._load[sampler] += cost
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
