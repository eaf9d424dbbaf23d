"""The paper's sampler by columns, beside SiPipe's by rows and stock vLLM's: milliseconds a sequence.

    python -m benchmarks.sampling_columns [--quick] [--shards 2] [--no-stock]

The first is :mod:`benchmarks.paper_columns`, and behind N workers with a shard of the logits each, "t
N", :class:`PaperShards`; both draw exactly (tests/sampler/test_paper_columns.py). All have one thread,
but for "t N": N samplers, by columns and by rows, share the sequences out, a thread each, of which
the slowest counts. "transposed" adds making [V, B] of the shards [B, V / t] that devices'
products have, t threads again; by rows a shard is only copied to its columns. To copy logits into
place, which a device would do, is outside all other times. Times are CPU time, the least of 9 calls;
stock's, as in :mod:`benchmarks.sampling`, the median of 3.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Barrier
from typing import Any

import numpy as np

from benchmarks.harness import report
from benchmarks.paper_columns import PaperColumns
from benchmarks.sampling import STRATEGIES, V, joined, ours, stock, texts
from benchmarks.sampling_cliffs import normal
from sipipe.messages.params import SequenceParams
from sipipe.sampler.warmup import warm_up

Call = Callable[[], object]
KINDS: dict[str, Any] = {"columns": np.float32, "columns, 1-byte buffers": np.int8}


def shares(whole: int, parts: int) -> list[slice]:
    """``whole`` in so many neighbouring parts, as even as can be."""
    return [slice(*ends) for ends in pairwise(whole * at // parts for at in range(parts + 1))]


class PaperShards:
    """The paper's sampler behind ``t`` tensor-parallel workers, and as many samplers.

    "Low-cost pipelined integration", as the paper says: each worker of the last stage has a shard of
    the logits, [B, V / t], transposes it by itself, and the shards are concatenated along the rows of
    [V, B]. Here each writes to where its rows are, so that nothing is gathered or copied again. How
    the pool of samplers shares a microbatch is left open: here each has whole sequences, with logits
    and buffers of its own, so that its lanes lie together. One thread at a time uses a worker's or a
    sampler's part, and a sampler's when all workers have transposed. Arguments are those of
    :class:`PaperColumns`.
    """

    def __init__(
        self,
        params: SequenceParams,
        vocab: int,
        prompts: np.ndarray,
        outputs: np.ndarray,
        kind: Any = np.float32,
        *,
        t: int,
    ) -> None:
        self.tokens, self.lanes = shares(vocab, t), shares(len(outputs), t)
        self.samplers = [
            PaperColumns(params, vocab, prompts[lanes], outputs[lanes], kind)
            for lanes in self.lanes
        ]
        self.logits = [
            np.empty((vocab, lanes.stop - lanes.start), np.float32) for lanes in self.lanes
        ]
        """[V, B / t] of each sampler."""

    def transpose(self, worker: int, shard: np.ndarray) -> None:
        """A worker's ``shard`` [B, V / t] to where samplers look for it. NumPy's copy is quicker than
        by blocks."""
        for lanes, z in zip(self.lanes, self.logits, strict=True):
            np.copyto(z[self.tokens[worker]], shard[lanes].T)

    def sample(self, sampler: int, uniform: np.ndarray) -> np.ndarray:
        """Tokens of a sampler's lanes; ``uniform`` [B] as for all of them. Overwrites the logits."""
        lanes = self.lanes[sampler]
        return self.samplers[sampler].sample(self.logits[sampler], uniform[lanes])


def least(calls: Sequence[Call], batch: int, before: Sequence[Call] = ()) -> float:
    """Milliseconds of CPU time a sequence of the slowest of ``calls``, side by side, a thread each."""
    together = Barrier(len(calls), timeout=60)

    def timed(call: Call) -> float:
        together.wait()  # wait: 60 s; the other threads
        began = time.thread_time()
        call()
        return time.thread_time() - began

    times = []
    with ThreadPoolExecutor(len(calls)) as pool:
        for _ in range(10):
            for call in before:
                call()
            times.append(max(pool.map(timed, calls)))
    return min(times[1:]) / batch * 1e3


def by_columns(
    name: str, x: np.ndarray, uniform: np.ndarray, t: int, kind: Any = np.float32
) -> tuple[float, float]:
    """Of the paper's samplers behind ``t`` workers, and of those workers' transposing."""
    batch, vocab = x.shape
    params = SequenceParams(**STRATEGIES[name])
    shards = PaperShards(params, vocab, *texts(batch, vocab), kind, t=t)
    workers = [
        partial(shards.transpose, number, np.ascontiguousarray(x[:, tokens]))
        for number, tokens in enumerate(shards.tokens)
    ]
    samplers = [partial(shards.sample, number, uniform) for number in range(t)]
    return least(samplers, batch, workers), least(workers, batch)


def by_rows(name: str, x: np.ndarray, t: int) -> float:
    """Of as many of SiPipe's samplers."""
    lanes = [x[part] for part in shares(len(x), t)]
    return least([ours(joined(name, *part.shape), part) for part in lanes], len(x))


def placing(x: np.ndarray, t: int) -> float:
    """Of ``t`` workers that copy their shards to their columns."""
    whole, parts = np.empty_like(x), shares(x.shape[1], t)
    shards = [np.ascontiguousarray(x[:, part]) for part in parts]
    pairs = zip(parts, shards, strict=True)
    return least([partial(np.copyto, whole[:, part], shard) for part, shard in pairs], len(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 sequences, 32,000 tokens")
    parser.add_argument("--shards", type=int, default=2, help="workers, and samplers (default: 2)")
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    batch, vocab = (16, 32_000) if args.quick else (64, V)
    t = args.shards
    warm_up()
    x = normal(batch, vocab)
    given = np.random.default_rng(3).random(batch)
    one = least([lambda: x.max(axis=1)], batch)
    rows: list[dict[str, Any]] = []
    for name in STRATEGIES:
        row: dict[str, Any] = {"strategy": name}
        theirs = stock(name, batch, vocab, time.thread_time) if args.stock else None
        row["stock"] = theirs and theirs(x)
        row["rows"] = by_rows(name, x, 1)
        for title, kind in KINDS.items():
            row[title], turning = by_columns(name, x, given, 1, kind)
        row["columns, transposed"] = row["columns"] + turning
        row["columns / rows"] = row["columns"] / row["rows"]
        row["columns, in reads"] = row["columns"] / one
        row[f"rows, t {t}"] = by_rows(name, x, t)
        row[f"columns, t {t}"], turning = by_columns(name, x, given, t)
        row[f"columns, t {t}, transposed"] = row[f"columns, t {t}"] + turning
        row[f"columns / rows, t {t}"] = row[f"columns, t {t}"] / row[f"rows, t {t}"]
        rows.append(row)
    placed = " and ".join(f"{placing(x, each):.3f}" for each in (1, t))
    report(
        "sampling",
        f"The paper's sampler by columns, ms a sequence, V {vocab:,}, B {batch}",
        rows,
        note="threads' CPU time; stock: vLLM's sampler, one thread; columns: logits [V, B], three dense float32 buffers; 1-byte buffers: the same with "
        f"counts to 127; t {t}: as many workers with a shard of V / t each, and as many samplers with a "
        "part of the sequences each, a thread each, the slowest; transposed: with making [V, B] of the "
        f"shards; to copy shards of 1 and {t} to their columns of rows: {placed} ms; one read of the "
        f"rows: {one:.3f} ms. Dense state of a sequence: {12 * vocab / 1e3:,.0f} KB",
        file="sampling-columns",
        columns=list(rows[0]),
    )


if __name__ == "__main__":
    main()
