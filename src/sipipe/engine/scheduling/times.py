"""Prices of a microbatch's parts on a stage, which the throttle cuts prompts by.

A stage's time is a sum of five prices,

    fixed + row * rows + token * tokens + context * c + pair * sum of x (L + x / 2)

for so many rows of logits, tokens, c earlier tokens that decoding sequences attend to, and prompt
chunks of x tokens behind prefixes of L. The last term is why a chunk takes the longer the more of
its prompt lies before it.

Prices are fitted while the engine serves, to relative errors, so that short and long microbatches
count alike; old ones are forgotten. What batches do not tell apart (with one size there is no slope)
keeps the ratio that it had before, at first that of :func:`usual`.

Who runs here: the engine's thread, alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sipipe.engine.layers.facts import ModelFacts

MEMORY = 0.995
"""Weight of a batch relative to the one after it: about the last 200 count."""
COLD = 16
"""First batches that do not count: they load pages, warm caches and compile."""
ENOUGH = 12.0
"""Weight of batches that prices need before they are used."""
OUTLIER = 3.0
"""Multiple of the expected time that a longer one is cut to: the stage was interrupted."""
READ = 128.0
"""Products in the time of reading a weight: about what GPUs' data sheets say, and CPUs do."""
FIRM = 1e-2
"""Firmness of prices that batches do not tell apart, as a share of what the batches say. It scales
all prices by the same factor, and is the firmer the smaller their part of the time is."""
TOGETHER = 8
"""Additions that are fitted at once: so one costs 15 us, and by itself it would cost 90."""
SPREAD = 0.15
"""Standard deviation of batches' rows, as a share of their mean, from which on they tell a row's part."""
SHORTEST = 1e-7
"""Seconds that a batch takes at least; a shorter time was not measured."""
DOUBT = 0.5
"""Relative error, in the mean of some batches, from which on the prices are not believed."""
ERROR_RATE = 0.3
"""Weight of the last additions in that mean."""
STRAIGHT = 1e-6
"""Curvature, relative to the slope, below which a chunk's time counts as a straight line: the root
of :meth:`Prices.fitting` would be the difference of two equal numbers."""


class Load(NamedTuple):
    """Amounts of work in one microbatch; of several, the sums."""

    batches: float = 0.0
    """Microbatches."""
    rows: float = 0.0
    """Rows of logits."""
    tokens: float = 0.0
    """Tokens of prompts."""
    context: float = 0.0
    """Tokens in the KV cache that decoding sequences attend to."""
    pairs: float = 0.0
    """Pairs, in prompt chunks, of a token and one that it attends to."""

    def plus(self, other: "Load") -> "Load":
        """The two loads' sum."""
        return Load(
            batches=self.batches + other.batches,
            rows=self.rows + other.rows,
            tokens=self.tokens + other.tokens,
            context=self.context + other.context,
            pairs=self.pairs + other.pairs,
        )


class Prices(NamedTuple):
    """Price of each part of a load, in seconds; before there are measurements, in tokens."""

    fixed: float
    """Price of a microbatch, whatever is in it."""
    row: float
    """Price of a row of logits, with the decoding sequence that it belongs to."""
    token: float
    """Price of a prompt's token."""
    context: float
    """Price of a token that a decoding sequence attends to."""
    pair: float
    """Price of a prompt's token with one that it attends to."""

    def of(self, load: Load) -> float:
        """The time that ``load`` takes."""
        return sum(price * part for price, part in zip(self, load, strict=True))

    def chunk(self, start: int, tokens: float) -> float:
        """The time that ``tokens`` of a prompt, behind ``start`` of them, add to a microbatch."""
        return tokens * (self.token + self.pair * (start + tokens / 2))

    def fitting(self, seconds: float, start: int) -> float:
        """The tokens behind ``start`` that add ``seconds``: the inverse of :meth:`chunk`."""
        if seconds <= 0 or math.isinf(seconds):
            return max(seconds, 0.0)
        first = self.token + self.pair * start  # the price of the first of them
        if self.pair * seconds < STRAIGHT * first * first:
            return seconds / first if first > 0 else math.inf
        return (math.sqrt(first * first + 2 * self.pair * seconds) - first) / self.pair

    @property
    def sequence(self) -> float:
        """Tokens of context that take as long as one more decoding sequence; 1 or more."""
        return max(1.0, self.row / self.context) if self.context > 0 else math.inf


def usual(facts: ModelFacts | None = None) -> Prices:
    """Prices in tokens where nothing is measured, of the model of ``facts`` or of a dense one.

    A device reads a weight in the time in which it multiplies it with :data:`READ` tokens, and a
    pass reads all of them; prompts attend by products of their heads; decoding sequences share
    nothing, and read 4,096 tokens of context while they are multiplied once.
    """
    if facts is None:
        return Prices(fixed=READ, row=1.0, token=1.0, context=1 / 4096, pair=1 / 24576)
    attention = facts.attention
    values = attention.value_dim or attention.head_dim
    width = attention.heads * (attention.head_dim + attention.rope_dim + values)
    weights = facts.active_parameters / facts.layers
    # A pass reads every expert's weights, and multiplies a token with those of a few.
    read = READ * facts.parameters / facts.active_parameters
    return Prices(fixed=read, row=1.0, token=1.0, context=1 / 4096, pair=width / weights)


class BatchTimes:
    """Prices on each of some processes, by least squares with forgetting; none is below 0.

    Args:
        first: Prices of each process to begin with; their ratios count, not their unit.
    """

    def __init__(self, first: Sequence[Prices]) -> None:
        processes = len(first)
        self._first = np.array(first, np.float64)  # [processes, 5]
        self._prices = self._first
        # Normal equations of all batches so far, each divided by its time: gram @ prices = moment.
        self._gram = np.zeros((processes, 5, 5))
        self._moment = np.zeros((processes, 5))
        self._weight = np.zeros(processes)
        self._seen = np.zeros(processes)
        self._error = np.zeros(processes)
        self.sloped = np.zeros(processes, np.bool_)
        """Processes, [processes], whose batches have differed in size enough to tell a row's part."""
        self.fits = 0
        """Times that prices have been fitted."""
        self._new: list[tuple[Sequence[Load], Sequence[float]]] = []

    @property
    def weight(self) -> list[float]:
        """Weight of the batches that count, by process."""
        return self._weight.tolist()

    def sure(self, process: int) -> bool:
        """Say if a process's prices are worth something."""
        return bool(self._weight[process] >= ENOUGH and self._error[process] < DOUBT)

    def seconds(self, load: Load) -> list[float]:
        """The time that ``load`` takes, by process; 0 where that is not known yet."""
        known = self._weight >= ENOUGH
        return np.where(known, self._prices @ load, 0.0).tolist()  # type: ignore[no-any-return]

    def prices(self, process: int) -> Prices:
        """The prices on one process, fitted or not."""
        return Prices._make(self._prices[process].tolist())

    def add(self, loads: Sequence[Load], seconds: Sequence[float]) -> None:
        """Learn that the processes took ``seconds`` for ``loads``, both by process; a load of no
        batches says nothing. It counts with the next :data:`TOGETHER`, at once."""
        self._new.append((loads, seconds))
        if len(self._new) >= TOGETHER:
            features = np.array([loads for loads, _ in self._new])
            times = np.array([seconds for _, seconds in self._new])
            self._new.clear()
            self._accumulate(features, times)
            self._fit()

    def _accumulate(self, features: NDArray[np.float64], times: NDArray[np.float64]) -> None:
        """Add batches to the normal equations.

        Args:
            features: [n, processes, 5], their loads.
            times: [n, processes], seconds that they took.
        """
        counts = self._counting(features[:, :, 0], times)
        measured = counts > 0
        times = np.where(measured, times, 1.0)  # the others have no weight: anything that divides
        expected = (features * self._prices).sum(2)
        known = self._weight >= ENOUGH
        times = np.where(known, np.minimum(times, OUTLIER * expected + 1e-9), times)
        self._scale(measured, times, expected)
        self._follow_error(measured & known, times, expected)
        # Of n additions the last has its full weight, and each before it less.
        later = counts.sum(0) - counts.cumsum(0)
        weights = counts * MEMORY**later
        memory = MEMORY ** counts.sum(0)
        relative = features * (measured / times)[:, :, None]
        weighted = relative * weights[:, :, None]
        self._weight = self._weight * memory + weights.sum(0)
        self._gram *= memory[:, None, None]
        self._gram += np.einsum("npi,npj->pij", weighted, relative)
        self._moment = self._moment * memory[:, None] + weighted.sum(0)
        # Weighted sums of 1, of rows, and of their squares: is the variance large enough?
        batches = self._gram[:, 0, 0]
        rows = self._gram[:, 0, 1]
        squares = self._gram[:, 1, 1]
        self.sloped |= batches * squares > (1 + SPREAD**2) * rows * rows

    def _counting(
        self, batches: NDArray[np.float64], times: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """``batches`` [n, processes] that count: 0 while a process is cold, and without a time."""
        seen = self._seen + batches.cumsum(0)
        self._seen = seen[-1]
        return np.where((seen > COLD) & (times > SHORTEST), batches, 0.0)

    def _scale(
        self,
        measured: NDArray[np.bool_],
        times: NDArray[np.float64],
        expected: NDArray[np.float64],
    ) -> None:
        """Bring the prices that a process began with to seconds, by its first batches that count."""
        first = measured & (self._weight == 0) & (expected > 0)
        ratios = np.where(first, times / np.where(first, expected, 1.0), 0.0).sum(0)
        scale = np.where(first.any(0), ratios / np.maximum(first.sum(0), 1), 1.0)[:, None]
        self._prices = self._prices * scale
        self._first = self._first * scale

    def _follow_error(
        self,
        foreseen: NDArray[np.bool_],
        times: NDArray[np.float64],
        expected: NDArray[np.float64],
    ) -> None:
        """Follow how far prices are off, in the mean of the additions that they had ``foreseen``: that
        single batches of a few milliseconds are disturbed says nothing of prices."""
        errors = np.where(foreseen, expected / times - 1, 0.0).sum(0)
        error = np.abs(errors) / np.maximum(foreseen.sum(0), 1)
        self._error += np.where(foreseen.any(0), ERROR_RATE, 0.0) * (error - self._error)

    def _fit(self) -> None:
        """Solve the normal equations, with prices held firm where batches do not tell them apart."""
        gram = self._gram.copy()
        moment = self._moment.copy()
        ratios = np.maximum(self._prices, self._first)
        part = np.sqrt(np.einsum("pii->pi", gram))
        firm = FIRM * part * (ratios * part).sum(1, keepdims=True) / (ratios + 1e-30) + 1e-30
        np.einsum("pii->pi", gram)[:] += firm
        moment += firm * self._prices
        # A price below 0 is taken out of the equations, as 0, and the others are solved again.
        for _ in range(gram.shape[1]):  # bound: each pass takes a price out, but for the last
            prices = np.linalg.solve(gram, moment[:, :, None])[:, :, 0]
            negative = prices < 0
            if not negative.any():
                break
            gram[negative[:, :, None] | negative[:, None, :]] = 0.0
            np.einsum("pii->pi", gram)[negative] = 1.0
            moment[negative] = 0.0
        self._prices = np.maximum(prices, 0.0)
        self.fits += 1
