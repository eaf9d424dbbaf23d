"""The paper's sampler by columns, beside SiPipe's by rows: milliseconds a sequence.

    python -m benchmarks.sampling_columns [--quick]

"Column-Wise CPU Sampling via Metadata Reuse" of the paper, as it says: logits transposed to [V, B],
output tokens appended in place to [longest, B], a dense [V, B] buffer for each of the three
penalties, of which a token changes B elements, and penalties applied to the logits in place. What
the paper leaves open is chosen for speed: one pass applies the penalties and finds what the next
needs; lanes of SIMD are sequences; a cut is looked for on every 32nd token first and then
bracketed, so that few candidates are sorted. Both sides have one thread, and draw exactly
(tests/sampler/test_paper_columns.py). "transposed" adds making [V, B] of the [B, V] that a device's
product has.
"""

from __future__ import annotations

import argparse
from typing import Any

import numba
import numpy as np

from benchmarks.harness import report
from benchmarks.sampling import STRATEGIES, V, joined, milliseconds, ours, read, texts
from benchmarks.sampling_cliffs import normal
from sipipe.messages.params import SequenceParams
from sipipe.sampler.warmup import warm_up

BLOCK = 256
"""Tokens whose mass is summed, so that a draw looks into one block only."""
EVERY = 32
"""Of so many tokens one is looked at to guess a cut."""
SURE = 12
"""Largest of the looked-at tokens by which top-k begins: at k = 50 a cut for about 400."""
FEW = 64
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
    p = np.float32(1.8775767e-3)
    p = p * f + np.float32(8.9893397e-3)
    p = p * f + np.float32(5.5826318e-2)
    p = p * f + np.float32(2.4015361e-1)
    p = p * f + np.float32(6.9315308e-1)
    p = p * f + np.float32(9.9999994e-1)
    return p * ((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


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
    for v in range(z.shape[0]):
        for b in range(z.shape[1]):
            x = z[v, b]
            r = np.float32(1.0) + np.float32(seen[v, b]) * (rho[b] - np.float32(1.0))
            x = x / r if x > 0 else x * r
            x = x - alpha[b] * np.float32(often[v, b]) - beta[b] * np.float32(once[v, b])
            z[v, b] = x
            top[b] = max(top[b], x)


@numba.njit(nogil=True, fastmath=FLAGS)
def first_of(z: Any, top: Any, tokens: Any) -> None:
    """Where each lane is largest."""
    for b in range(z.shape[1]):
        tokens[b] = -1
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
    for block in range(sums.shape[0]):
        if at < sums[block, b] or block == sums.shape[0] - 1:
            last = -1
            for v in range(block * BLOCK, min(w.shape[0], (block + 1) * BLOCK)):
                if w[v, b] >= least and w[v, b] > 0:
                    last = v
                    at -= w[v, b]
                    if at < 0:
                        return v
            if last >= 0:
                return last
        at -= sums[block, b]
    return -1


class PaperColumns:
    """One microbatch's state and sampler, after the paper; all sequences have one strategy.

    Args:
        params: of all sequences.
        vocab: V.
        prompts, outputs: [B, n] tokens so far.
        kind: dtype of the three dense buffers; the paper's are real.
    """

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
        self._alpha, self._beta = fill(params.frequency_penalty), fill(params.presence_penalty)
        self._rho, self._scale = (
            fill(params.repetition_penalty),
            fill(1 / (params.temperature or 1)),
        )
        self._least = fill(params.min_p)
        self._top, self._tokens = fill(0), np.zeros(batch, np.int64)
        self._sums = np.zeros((-(-vocab // BLOCK), batch), np.float32)
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
        if params.penalized:
            penalize(z, *self.dense, self._alpha, self._beta, self._rho, self._top)
        elif params.greedy or not params.top_k:
            tops(z, self._top)
        if params.greedy:
            first_of(z, self._top, self._tokens)
            return self._tokens
        if 0 < params.top_k < len(z):
            return self._of_the_largest(z, uniform)
        weigh(z, self._top, self._scale, self._least, self._sums)
        if params.top_p < 1:
            return self._of_the_mass(z, uniform)
        masses = uniform * self._sums.sum(0, dtype=np.float64)
        return np.array([drawn(z, 0.0, self._sums, b, masses[b]) for b in self._lanes])

    def _of_the_largest(self, z: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """top-k, and the other filters on what is left."""
        params = self._params
        some = z[::EVERY]
        at = max(0, len(some) - max(SURE, -(-2 * params.top_k // EVERY)))
        low = np.partition(some, at, 0)[at]
        high = np.full_like(low, np.inf)
        while True:  # bound: each time fewer tokens are left out, at last none
            between(z, low, high, self._sums, self._ids, self._values, self._found)
            if (lacking := self._found < params.top_k).any():
                low = np.where(lacking, np.where(low < 0, 2 * low, low / 2) - 1, low)
                continue
            break
        for b in self._lanes:
            count = self._found[b]
            self._tokens[b] = self._of_few(
                self._values[:count, b], self._ids[:count, b], uniform[b]
            )
        return self._tokens

    def _of_few(self, values: np.ndarray, ids: np.ndarray, uniform: float) -> int:
        params = self._params
        order = np.lexsort((-ids, -values))
        values, ids = values[order], ids[order]
        kept = values >= values[params.top_k - 1]
        weights = np.exp((values[kept].astype(float) - values[0]) / params.temperature)
        weights[weights < params.min_p] = 0
        mass = weights.cumsum()
        if params.top_p < 1:
            last = np.searchsorted(mass, params.top_p * mass[-1])
            mass = mass[: last + 1]
        return int(ids[min(np.searchsorted(mass, uniform * mass[-1], "right"), len(mass) - 1)])

    def _of_the_mass(self, w: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """top-p of weights ``w``: brackets the cut, then sorts what is in it."""
        wanted = self._params.top_p * self._sums.sum(0, dtype=np.float64)
        low, high = np.zeros((2, w.shape[1]), np.float32)
        high[:] = np.inf
        some = np.sort(w[::EVERY], 0)[::-1]
        mass = some.cumsum(0, dtype=np.float64)
        at = (mass < self._params.top_p * mass[-1]).sum(0)
        width = np.maximum(2, np.sqrt(at)).astype(int)
        around = np.array([at - width, at - width // 4, at + width // 4, at + width])
        cuts = some[np.clip(around, 0, len(some) - 1), self._lanes]
        reached, counted = np.zeros((2, 4, w.shape[1]), np.float32)
        inside = np.full(w.shape[1], float(len(w)))
        for _ in range(PASSES):
            above(w, cuts, reached, counted)
            for b in self._lanes:
                over = int((reached[:, b] < wanted[b]).sum())  # cuts fall, so masses rise
                if over < 4 and cuts[over, b] > low[b]:
                    low[b] = cuts[over, b]
                if over and cuts[over - 1, b] < high[b]:
                    high[b] = cuts[over - 1, b]
                first = counted[over - 1, b] if over else 0
                inside[b] = (counted[over, b] if over < 4 else len(w)) - first
            if inside.max() <= FEW:
                break
            steps = np.linspace(0.8, 0.2, 4, dtype=np.float32)[:, None]
            cuts = low + steps * (np.minimum(high, 1.0) - low)
        between(w, low, high, self._sums, self._ids, self._values, self._found)
        total = self._sums.sum(0, dtype=np.float64)
        for b in self._lanes:
            count = self._found[b]
            values, ids = self._values[:count, b], self._ids[:count, b]
            order = np.lexsort((-ids, -values))
            masses = total[b] + values[order].cumsum(dtype=np.float64)
            last = min(int(np.searchsorted(masses, wanted[b])), count - 1)
            end = masses[last] if count else total[b]
            at = uniform[b] * end
            if at < total[b]:
                self._tokens[b] = drawn(w, high[b], self._sums, b, at)
            else:
                place = min(int(np.searchsorted(masses, at, "right")), last)
                self._tokens[b] = ids[order[place]]
        return self._tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 sequences, 32,000 tokens")
    args = parser.parse_args()
    batch, vocab = (16, 32_000) if args.quick else (64, V)
    warm_up()
    x = normal(batch, vocab)
    z = np.ascontiguousarray(x.T)
    copy = np.empty_like(z)
    given = np.random.default_rng(3).random(batch)
    prompts, outputs = texts(batch, vocab)

    def filled() -> None:
        np.copyto(copy, z)

    def transposed() -> None:
        np.copyto(copy, x.T)

    one, filling, turning = read(x), milliseconds(filled, batch), milliseconds(transposed, batch)
    rows: list[dict[str, Any]] = []
    for name, strategy in STRATEGIES.items():
        row: dict[str, Any] = {"strategy": name}
        row["rows"] = milliseconds(ours(joined(name, batch, vocab), x), batch)
        kinds = {"columns": np.float32, "columns, 1-byte buffers": np.int8}
        for title, kind in kinds.items():
            columns = PaperColumns(SequenceParams(**strategy), vocab, prompts, outputs, kind)

            def call(columns: PaperColumns = columns) -> None:
                np.copyto(copy, z)
                columns.sample(copy, given)

            row[title] = max(milliseconds(call, batch) - filling, 0.0)
        row["columns, transposed"] = row["columns"] + turning
        row["columns / rows"] = row["columns"] / row["rows"]
        rows.append(row)
    report(
        "sampling",
        f"The paper's sampler by columns, ms a sequence, V {vocab:,}, B {batch}, one thread",
        rows,
        note="columns: logits [V, B], three dense float32 buffers; 1-byte buffers: the same with "
        f"counts to 127; transposed: with making [V, B] of [B, V], {turning:.3f} ms; one read of the "
        f"rows: {one:.3f} ms. Dense state of a sequence: {12 * vocab / 1e3:,.0f} KB",
        file="sampling-columns",
    )


if __name__ == "__main__":
    main()
