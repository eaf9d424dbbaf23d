"""The paper's sampler by columns, for :mod:`benchmarks.sampling_columns`.

"Column-Wise CPU Sampling via Metadata Reuse" of the paper, as it says: logits transposed to [V, B],
output tokens appended in place to [longest, B], a dense [V, B] buffer for each of the three
penalties, of which a token changes B elements, and penalties applied to the logits in place. What
the paper leaves open is chosen for speed: lanes of SIMD are sequences; what one pass can find for
the next is found by it, by blocks that stay in the cache; a cut is looked for on every 32nd token
first and then bracketed, so that few candidates are sorted.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sipipe.messages.params import SequenceParams

BLOCK = 256
"""Tokens whose mass is summed, so that a draw looks into one block only."""
EVERY = 32
"""Of so many tokens one is looked at to guess a cut."""
SURE = 12
"""Largest of the looked-at tokens by which top-k begins: at k = 50 a cut for about 400."""
FEW = 2048
"""Candidates between two thresholds that are no longer worth a pass."""
PASSES = 12
LONGEST = 4096
FLAGS = {"nnan", "ninf", "nsz", "contract", "arcp"}


@numba.njit(nogil=True, fastmath=FLAGS, inline="always")
def exp(x: Any) -> Any:
    """e ** x of float32 x <= 0, to 2e-7 of it, in operations that LLVM has for vectors."""
    y = max(x * np.float32(1.4426950408889634), np.float32(-126.0))
    n = np.floor(y)
    f = y - n
    p = np.float32(1.8775767e-3) * f + np.float32(8.9893397e-3)
    p = (p * f + np.float32(5.5826318e-2)) * f + np.float32(2.4015361e-1)
    p = (p * f + np.float32(6.9315308e-1)) * f + np.float32(9.9999994e-1)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@numba.njit(nogil=True, fastmath=FLAGS)
def tops(z: Any, top: Any) -> None:
    """The largest of each lane."""
    top[:] = z[0]
    for v in range(1, z.shape[0]):
        for b in range(z.shape[1]):
            top[b] = max(top[b], z[v, b])


@numba.njit(nogil=True, fastmath=FLAGS)
def penalize(
    z: Any, often: Any, once: Any, seen: Any, alpha: Any, beta: Any, rho: Any, top: Any
) -> None:
    """Z := penalized Z, in place, and the largest of each lane."""
    top[:] = np.float32(-np.inf)
    one, zero = np.float32(1.0), np.float32(0.0)
    for v in range(z.shape[0]):
        # Three loops: LLVM makes vectors of none that may overlap with more than a few arrays.
        for b in range(z.shape[1]):
            r = one + np.float32(seen[v, b]) * (rho[b] - one)
            z[v, b] = min(z[v, b], zero) * r + max(z[v, b], zero) / r
        for b in range(z.shape[1]):
            z[v, b] -= alpha[b] * np.float32(often[v, b]) + beta[b] * np.float32(once[v, b])
        for b in range(z.shape[1]):
            top[b] = max(top[b], z[v, b])


@numba.njit(nogil=True, fastmath=FLAGS)
def first_of(z: Any, top: Any, tokens: Any) -> None:
    """Where each lane is largest."""
    tokens[:] = -1
    left = z.shape[1]
    for v in range(z.shape[0]):
        hits = 0
        for b in range(z.shape[1]):
            hits += z[v, b] == top[b]
        if hits:
            for b in range(z.shape[1]):
                if tokens[b] < 0 and z[v, b] == top[b]:
                    tokens[b] = v
                    left -= 1
            if left == 0:
                return


@numba.njit(nogil=True, fastmath=FLAGS)
def add(z: Any, top: Any, scale: Any, least: Any, total: Any) -> None:
    """The sum of exp((Z - top) * scale) of each lane, without those below ``least``."""
    total[:] = 0
    zero = np.float32(0.0)
    for v in range(z.shape[0]):
        for b in range(z.shape[1]):
            w = exp((z[v, b] - top[b]) * scale[b])
            total[b] += w if w >= least[b] else zero


@numba.njit(nogil=True)
def weights_of(
    z: Any, dense: Any, penalties: Any, scale: Any, least: Any, tops_of: Any, sums: Any
) -> None:
    """``sums`` of blocks, [V / BLOCK, B], relative to ``tops_of`` them: a block is penalized, searched
    and summed while it is in the cache. Where there is a ``least``, which is of all tokens' largest,
    that is found first."""
    whole = least.max() > 0
    for block in range(sums.shape[0]):
        here = slice(block * BLOCK, min(z.shape[0], (block + 1) * BLOCK))
        if penalties.size:
            penalize(
                z[here], dense[0][here], dense[1][here], dense[2][here],
                penalties[0], penalties[1], penalties[2], tops_of[block],
            )  # fmt: skip
        else:
            tops(z[here], tops_of[block])
        if not whole:
            add(z[here], tops_of[block], scale, least, sums[block])
    if whole:
        for block in range(1, sums.shape[0]):
            tops_of[0] = np.maximum(tops_of[0], tops_of[block])
        for block in range(sums.shape[0]):
            tops_of[block] = tops_of[0]
            here = slice(block * BLOCK, min(z.shape[0], (block + 1) * BLOCK))
            add(z[here], tops_of[block], scale, least, sums[block])


@numba.njit(nogil=True)
def drawn_by_blocks(
    z: Any, scale: Any, least: Any, tops_of: Any, sums: Any, uniform: Any, tokens: Any
) -> None:
    """A token of each lane by what :func:`weights_of` has found."""
    masses = np.empty(sums.shape[0])
    for b in range(z.shape[1]):
        top = tops_of[:, b].max()
        for block in range(len(masses)):
            masses[block] = sums[block, b] * np.exp((tops_of[block, b] - top) * scale[b])
        at = uniform[b] * masses.sum()
        block = 0
        while block < len(masses) - 1 and at >= masses[block]:
            at -= masses[block]
            block += 1
        while block > 0 and masses[block] == 0:
            block -= 1
        for v in range(block * BLOCK, min(z.shape[0], (block + 1) * BLOCK)):
            w = np.exp((z[v, b] - top) * scale[b])
            if w >= least[b]:
                tokens[b] = v
                at -= w
                if at < 0:
                    break


@numba.njit(nogil=True, fastmath=FLAGS)
def weigh(z: Any, top: Any, scale: Any, least: Any, sums: Any) -> None:
    """Z := exp((Z - top) * scale), 0 below ``least``; ``sums`` of blocks, [V / BLOCK, B]."""
    sums[:] = 0
    for v in range(z.shape[0]):
        block = v // BLOCK
        for b in range(z.shape[1]):
            w = exp((z[v, b] - top[b]) * scale[b])
            w = w if w >= least[b] else np.float32(0.0)
            z[v, b] = w
            sums[block, b] += w


@numba.njit(nogil=True, fastmath=FLAGS)
def above(w: Any, cuts: Any, mass: Any, count: Any) -> None:
    """Mass and number of weights at or above each of 4 cuts, [4, B]."""
    mass[:] = 0
    count[:] = 0
    zero = np.float32(0.0)
    for v in range(w.shape[0]):
        for j in range(4):
            for b in range(w.shape[1]):
                hit = w[v, b] >= cuts[j, b]
                mass[j, b] += w[v, b] if hit else zero
                count[j, b] += np.float32(hit)


@numba.njit(nogil=True, fastmath=FLAGS)
def between(w: Any, low: Any, high: Any, sums: Any, ids: Any, values: Any, found: Any) -> None:
    """Candidates in [low, high) of each lane, and ``sums`` by block of what is above."""
    sums[:] = 0
    found[:] = 0
    zero = np.float32(0.0)
    for v in range(w.shape[0]):
        block = v // BLOCK
        hits = 0
        for b in range(w.shape[1]):
            x = w[v, b]
            sums[block, b] += x if x >= high[b] else zero
            hits += (x >= low[b]) & (x < high[b])
        if hits:
            for b in range(w.shape[1]):
                x = w[v, b]
                if x >= low[b] and x < high[b] and found[b] < ids.shape[0]:
                    ids[found[b], b] = v
                    values[found[b], b] = x
                    found[b] += 1


@numba.njit(nogil=True)
def drawn(w: Any, least: Any, sums: Any, b: int, at: float) -> int:
    """The token of lane ``b`` at mass ``at`` of what is ``least`` or more."""
    found = -1
    for block in range(sums.shape[0]):
        if at < sums[block, b] or block == sums.shape[0] - 1:
            for v in range(block * BLOCK, min(w.shape[0], (block + 1) * BLOCK)):
                if w[v, b] >= least and w[v, b] > 0:
                    found = v
                    at -= w[v, b]
                    if at < 0:
                        return v
            return found
        at -= sums[block, b]
    return found


@numba.njit(nogil=True)
def sorted_lane(values: Any, ids: Any, found: Any, b: int) -> Any:
    """Candidates of lane ``b``, the largest first, and of equal ones the highest id."""
    value, token = values[: found[b], b][::-1].copy(), ids[: found[b], b][::-1].copy()
    order = np.argsort(-value, kind="mergesort")
    return value[order], token[order]


@numba.njit(nogil=True)
def draw_of_few(
    values: Any, ids: Any, found: Any, k: int, p: float, least: Any, scale: Any, uniform: Any,
    tokens: Any,
) -> None:  # fmt: skip
    """top-k among candidates, among which all of it is, and the other filters on what is left."""
    for b in range(len(found)):
        value, token = sorted_lane(values, ids, found, b)
        mass = np.empty(len(value))
        count, total = 0, 0.0
        while count < len(value) and value[count] >= value[k - 1]:
            w = np.exp(np.float64(value[count] - value[0]) * scale[b])
            if w < least[b]:
                break
            total += w
            mass[count] = total
            count += 1
        if p < 1:
            count = min(np.searchsorted(mass[:count], p * total) + 1, count)
        place = np.searchsorted(mass[:count], uniform[b] * mass[count - 1], "right")
        tokens[b] = token[min(place, count - 1)]


@numba.njit(nogil=True)
def narrow(
    some: Any, places: Any, cuts: Any, reached: Any, counted: Any, wanted: Any, ends: Any,
    counts: Any, ranks: Any,
) -> float:  # fmt: skip
    """Move ``ends`` [2, B] of each lane to the two of 4 falling cuts around the one looked for, with
    ``counts`` of what is at or above them and their ``ranks`` among ``some`` weights, and put new
    cuts between; the most tokens that a lane has there."""
    low, high = ends
    for b in range(len(wanted)):
        over = 0
        for j in range(4):
            over += reached[j, b] < wanted[b]
        if over < 4 and cuts[over, b] > low[b]:
            low[b], counts[0, b], ranks[0, b] = cuts[over, b], counted[over, b], places[over, b]
        if over and cuts[over - 1, b] < high[b]:
            over -= 1
            high[b], counts[1, b], ranks[1, b] = cuts[over, b], counted[over, b], places[over, b]
        apart = ranks[0, b] - ranks[1, b]
        for j in range(4):
            places[j, b] = ranks[1, b] + (j + 1) * apart // 5
            if apart < 5:  # weights that are much alike
                cuts[j, b] = low[b] + (4 - j) * (min(high[b], np.float32(1.0)) - low[b]) / 5
            else:
                cuts[j, b] = some[places[j, b], b]
    return (counts[0] - counts[1]).max()


@numba.njit(nogil=True)
def draw_of_the_mass(
    w: Any, high: Any, sums: Any, ids: Any, values: Any, found: Any, wanted: Any, uniform: Any,
    tokens: Any,
) -> None:  # fmt: skip
    """Of all at or above ``high``, and as many of the candidates below it as make the mass."""
    for b in range(len(wanted)):
        total = end = sums[:, b].astype(np.float64).sum()
        value, token = sorted_lane(values, ids, found, b)
        masses = total + value.astype(np.float64).cumsum()
        last = min(np.searchsorted(masses, wanted[b]), len(value) - 1)
        if len(value):
            end = masses[last]
        at = uniform[b] * end
        if at < total:
            tokens[b] = drawn(w, high[b], sums, b, at)
        else:
            tokens[b] = token[min(np.searchsorted(masses, at, "right"), last)]


class PaperColumns:
    """One microbatch's state and sampler, after the paper; all sequences have the same ``params``,
    and [B, n] tokens so far. ``kind``: dtype of the three dense buffers; the paper's are real."""

    def __init__(
        self,
        params: SequenceParams,
        vocab: int,
        prompts: np.ndarray,
        outputs: np.ndarray,
        kind: Any = np.float32,
    ) -> None:
        batch = len(outputs)
        self._params, self._lanes = params, np.arange(batch)
        self.dense = np.zeros((3, vocab, batch), kind)
        self._texts = np.zeros((LONGEST, batch), np.int32)
        self._length = 0
        fill = lambda value: np.full(batch, value, np.float32)  # noqa: E731
        of = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
        self._penalties = np.stack([fill(value) for value in of])
        self._scale, self._least = fill(1 / (params.temperature or 1)), fill(params.min_p)
        self._top, self._tokens = fill(0), np.zeros(batch, np.int32)
        self._sums, self._tops = np.zeros((2, -(-vocab // BLOCK), batch), np.float32)
        self._ids = np.zeros((LONGEST, batch), np.int32)
        self._values = np.zeros((LONGEST, batch), np.float32)
        self._found = np.zeros(batch, np.int64)
        for row in prompts.T:
            self.dense[2, row, self._lanes] = 1
        for row in outputs.T:
            self.append(row)

    def append(self, tokens: np.ndarray) -> None:
        """B elements of each buffer change."""
        self._texts[self._length] = tokens
        self._length += 1
        self.dense[0, tokens, self._lanes] += 1
        self.dense[1:, tokens, self._lanes] = 1

    def sample(self, z: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """A token a lane of logits ``z`` [V, B], which are overwritten; ``uniform`` [B] in [0, 1)."""
        params = self._params
        largest = 0 < params.top_k < len(z)
        if params.greedy or largest or params.top_p < 1:
            if params.penalized:
                penalize(z, *self.dense, *self._penalties, self._top)
            elif not largest:
                tops(z, self._top)
            if params.greedy:
                first_of(z, self._top, self._tokens)
                return self._tokens
            if largest:
                return self._of_the_largest(z, uniform)
            weigh(z, self._top, self._scale, self._least, self._sums)
            return self._of_the_mass(z, uniform)
        penalties = self._penalties if params.penalized else self._penalties[:0]
        weights_of(z, self.dense, penalties, self._scale, self._least, self._tops, self._sums)
        drawn_by_blocks(z, self._scale, self._least, self._tops, self._sums, uniform, self._tokens)
        return self._tokens

    def _of_the_largest(self, z: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """top-k, and the other filters on what is left."""
        params = self._params
        some = z[::EVERY]
        at = max(0, len(some) - max(SURE, -(-2 * params.top_k // EVERY)))
        low = np.partition(some, at, 0)[at]
        high = np.full_like(low, np.inf)
        while True:  # bound: each time fewer tokens are left out, at last none
            between(z, low, high, self._sums, self._ids, self._values, self._found)
            if not (lacking := self._found < params.top_k).any():
                break
            low = np.where(lacking, np.where(low < 0, 2 * low, low / 2) - 1, low)
        draw_of_few(
            self._values, self._ids, self._found, params.top_k, params.top_p, self._least,
            self._scale, uniform, self._tokens,
        )  # fmt: skip
        return self._tokens

    def _of_the_mass(self, w: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """top-p of weights ``w``: brackets the cut, then sorts what is in it."""
        wanted = self._params.top_p * self._sums.sum(0, dtype=np.float64)
        some = np.sort(w[::EVERY], 0)[::-1]
        mass = some.cumsum(0)
        at = (mass < self._params.top_p * mass[-1]).sum(0)
        guesses = at * np.array([0.5, 0.8, 1.25, 2])[:, None]
        places = guesses.astype(np.int64).clip(0, len(some) - 1)
        cuts = np.take_along_axis(some, places, 0)
        reached, counted = np.zeros((2, 4, w.shape[1]), np.float32)
        ends, counts = np.zeros((2, 2, w.shape[1]), np.float32)
        ranks = np.full((2, w.shape[1]), -1)
        ends[1], counts[0], ranks[0] = np.inf, len(w), len(some) - 1
        for _ in range(PASSES):
            above(w, cuts, reached, counted)
            if narrow(some, places, cuts, reached, counted, wanted, ends, counts, ranks) <= FEW:
                break
        between(w, *ends, self._sums, self._ids, self._values, self._found)
        draw_of_the_mass(
            w, ends[1], self._sums, self._ids, self._values, self._found, wanted, uniform,
            self._tokens,
        )  # fmt: skip
        return self._tokens
