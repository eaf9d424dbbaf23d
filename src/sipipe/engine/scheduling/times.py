"""What a microbatch takes on a stage, by what is in it: what prompts are cut by.

A stage's time is a sum of five prices,

    fixed + row * rows + token * tokens + context * c + pair * sum of x (L + x / 2)

for so many rows of logits, tokens, c earlier tokens that decoding sequences attend to, and prompt
chunks of x tokens behind prefixes of L. The last term is why a chunk takes the longer the more of
its prompt lies before it. Prices are fitted while the engine serves, to relative errors, so that
short and long microbatches count alike; old ones are forgotten. What batches do not tell apart
(with one size there is no slope) keeps the ratio that it had before, at first that of :func:`usual`. Runs on the engine's thread alone.
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
"""Times of more than this multiple of the expected one are cut to it: the stage was interrupted."""
READ = 128.0
"""Products in the time of reading a weight: about what GPUs' data sheets say, and CPUs do."""
FIRM = 1e-2
"""How firmly prices stay where batches do not tell them apart, as a share of what these say: all by
the same factor, the firmer the smaller their part of the time is."""
TOGETHER = 8
"""Additions that are taken in at once."""
SPREAD = 0.15
"""Standard deviation of batches' rows, as a share of their mean, from which on they tell a row's part."""
SHORTEST = 1e-7
"""Seconds: what took less was not measured."""
DOUBT = 0.5
"""Relative error, in the mean of some batches, from which on the prices are not believed."""


class Load(NamedTuple):
    """What is in one microbatch; of several, the sums."""

    batches: float = 0.0
    rows: float = 0.0
    """Of logits."""
    tokens: float = 0.0
    """Of prompts."""
    context: float = 0.0
    """Tokens in the KV cache that decoding sequences attend to."""
    pairs: float = 0.0
    """Of prompt chunks: each token with each one that it attends to."""

    def plus(self, other: "Load") -> "Load":
        return Load(*(a + b for a, b in zip(self, other, strict=True)))


class Prices(NamedTuple):
    """What each part of a load takes, in seconds; before there are measurements, in tokens."""

    fixed: float
    row: float
    token: float
    context: float
    pair: float

    def of(self, load: Load) -> float:
        """What ``load`` takes."""
        return sum(price * part for price, part in zip(self, load, strict=True))

    def chunk(self, start: int, tokens: float) -> float:
        """What ``tokens`` of a prompt add to a microbatch, behind ``start`` of them."""
        return tokens * (self.token + self.pair * (start + tokens / 2))

    def fitting(self, seconds: float, start: int) -> float:
        """How many tokens behind ``start`` add ``seconds``: the inverse of :meth:`chunk`."""
        each = self.token + self.pair * start
        if seconds <= 0 or math.isinf(seconds):
            return max(seconds, 0.0)
        if self.pair * seconds < 1e-6 * each * each:  # a straight line, as far as that goes
            return seconds / each if each > 0 else math.inf
        return (math.sqrt(each * each + 2 * self.pair * seconds) - each) / self.pair

    @property
    def sequence(self) -> float:
        """Tokens of context that take as long as one more decoding sequence; 1 or more."""
        return max(1.0, self.row / self.context) if self.context > 0 else math.inf


def usual(facts: ModelFacts | None = None) -> Prices:
    """Prices in tokens where nothing is measured, of that model or of a dense one. A device reads a
    weight in the time in which it multiplies it with :data:`READ` tokens, and a pass reads all of
    them; prompts attend by products of their heads; decoding sequences share nothing, and read
    4,096 tokens of context while they are multiplied once."""
    if facts is None:
        return Prices(READ, 1.0, 1.0, 1 / 4096, 1 / 24576)
    attention = facts.attention
    values = attention.value_dim or attention.head_dim
    width = attention.heads * (attention.head_dim + attention.rope_dim + values)
    weights = facts.active_parameters / facts.layers
    read = READ * facts.parameters / facts.active_parameters
    return Prices(read, 1.0, 1.0, 1 / 4096, width / weights)


class BatchTimes:
    """Prices on each of some processes, by least squares with forgetting; none is below 0.
    ``first``: those to begin with, of each process; their ratios count."""

    def __init__(self, first: Sequence[Prices]) -> None:
        self._prices = self._first = np.array(first, np.float64)  # [processes, 5]
        self._gram = np.zeros((len(first), 5, 5))
        self._moment = np.zeros((len(first), 5))
        self._weight, self._seen, self._error = np.zeros((3, len(first)))
        self.sloped = np.zeros(len(first), np.bool_)
        """Of each process: whether batches have differed in size enough to tell a row's part."""
        self.fits = 0
        """How many times prices have been fitted."""
        self._new: list[tuple[Sequence[Load], Sequence[float]]] = []

    @property
    def weight(self) -> list[float]:
        """Of the batches that count, by process."""
        return self._weight.tolist()  # type: ignore[no-any-return]

    def sure(self, process: int) -> bool:
        """Whether a process's prices are worth something."""
        return bool(self._weight[process] >= ENOUGH and self._error[process] < DOUBT)

    def seconds(self, load: Load) -> list[float]:
        """What ``load`` takes, by process; 0 where that is not known yet."""
        known = self._weight >= ENOUGH
        return np.where(known, self._prices @ load, 0.0).tolist()  # type: ignore[no-any-return]

    def prices(self, process: int) -> Prices:
        return Prices(*self._prices[process].tolist())

    def add(self, loads: Sequence[Load], seconds: Sequence[float]) -> None:
        """``seconds`` were taken for ``loads``, by process; a load of no batches says nothing.
        Counts with the next :data:`TOGETHER`, at once: so one costs 15 us, and 90 alone."""
        self._new.append((loads, seconds))
        if len(self._new) >= TOGETHER:
            self._take(*map(np.array, zip(*self._new, strict=True)))
            self._new.clear()
            self._fit()

    def _take(self, features: NDArray[np.float64], taken: NDArray[np.float64]) -> None:
        """Features [n, processes, 5] of batches took [n, processes] seconds."""
        count = features[:, :, 0]
        seen = self._seen + count.cumsum(0)
        self._seen = seen[-1]
        count = np.where((seen > COLD) & (taken > SHORTEST), count, 0.0)
        told = count > 0
        taken = np.where(told, taken, 1.0)
        expected = (features * self._prices).sum(2)
        believed = self._weight >= ENOUGH
        taken = np.where(believed, np.minimum(taken, OUTLIER * expected + 1e-9), taken)
        first = told & (self._weight == 0) & (expected > 0)
        ratio = np.where(first, taken / np.where(first, expected, 1.0), 0.0).sum(0)
        scale = np.where(first.any(0), ratio / np.maximum(first.sum(0), 1), 1.0)[:, None]
        self._prices, self._first = self._prices * scale, self._first * scale
        # Of all of them: that single ones of a few milliseconds are disturbed says nothing of prices.
        error = np.abs(np.where(told, expected / taken - 1, 0.0).sum(0))
        error /= np.maximum(told.sum(0), 1)
        self._error += np.where(told.any(0) & believed, 0.3, 0.0) * (error - self._error)
        later = count.sum(0) - count.cumsum(0)
        each = features * (told / taken)[:, :, None]
        weighted = each * (count * MEMORY**later)[:, :, None]
        kept = MEMORY ** count.sum(0)
        self._weight = self._weight * kept + (count * MEMORY**later).sum(0)
        self._gram *= kept[:, None, None]
        self._gram += np.einsum("npi,npj->pij", weighted, each)
        self._moment = self._moment * kept[:, None] + weighted.sum(0)
        (one, rows), (_, squares) = self._gram[:, :2, :2].transpose(1, 2, 0)
        self.sloped |= one * squares > (1 + SPREAD**2) * rows * rows

    def _fit(self) -> None:
        gram, moment = self._gram.copy(), self._moment.copy()
        kept = np.maximum(self._prices, self._first)
        part = np.sqrt(np.einsum("pii->pi", gram))
        firm = FIRM * part * (kept * part).sum(1, keepdims=True) / (kept + 1e-30) + 1e-30
        np.einsum("pii->pi", gram)[:] += firm
        moment += firm * self._prices
        for _ in range(gram.shape[1]):  # bound: each pass takes a price out, but for the last
            found = np.linalg.solve(gram, moment[:, :, None])[:, :, 0]
            if not (negative := found < 0).any():
                break
            gram[negative[:, :, None] | negative[:, None, :]] = 0.0
            np.einsum("pii->pi", gram)[negative] = 1.0
            moment[negative] = 0.0
        self._prices, self.fits = np.maximum(found, 0.0), self.fits + 1
