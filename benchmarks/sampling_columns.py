"""The paper's sampler by columns, beside SiPipe's by rows: milliseconds a sequence.

    python -m benchmarks.sampling_columns [--quick]

The former is :mod:`benchmarks.paper_columns`. Both sides have one thread, and draw exactly
(tests/sampler/test_paper_columns.py). "transposed" adds making [V, B] of the [B, V] that a device's
product has. To copy logits into place, which a device would do, is outside the time, which is the
thread's CPU time, the least of 9 calls.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import report
from benchmarks.paper_columns import PaperColumns
from benchmarks.sampling import STRATEGIES, V, joined, ours, texts
from benchmarks.sampling_cliffs import normal
from sipipe.messages.params import SequenceParams
from sipipe.sampler.warmup import warm_up


def least(call: Callable[[], object], batch: int, before: Callable[[], object] = int) -> float:
    """Milliseconds of CPU time a sequence."""
    times = []
    for _ in range(10):
        before()
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return min(times[1:]) / batch * 1e3


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

    one = least(lambda: x.max(axis=1), batch)
    turning = least(lambda: np.copyto(copy, x.T), batch)
    rows: list[dict[str, Any]] = []
    for name, strategy in STRATEGIES.items():
        row: dict[str, Any] = {"strategy": name}
        row["rows"] = least(ours(joined(name, batch, vocab), x), batch)
        kinds = {"columns": np.float32, "columns, 1-byte buffers": np.int8}
        for title, kind in kinds.items():
            columns = PaperColumns(SequenceParams(**strategy), vocab, prompts, outputs, kind)
            draw = functools.partial(columns.sample, copy, given)
            row[title] = least(draw, batch, filled)
        row["columns, transposed"] = row["columns"] + turning
        row["columns / rows"] = row["columns"] / row["rows"]
        row["columns, in reads"] = row["columns"] / one
        rows.append(row)
    report(
        "sampling",
        f"The paper's sampler by columns, ms a sequence, V {vocab:,}, B {batch}",
        rows,
        note="one thread's CPU time; columns: logits [V, B], three dense float32 buffers; 1-byte buffers: the same with "
        f"counts to 127; transposed: with making [V, B] of [B, V], {turning:.3f} ms; one read of the "
        f"rows: {one:.3f} ms. Dense state of a sequence: {12 * vocab / 1e3:,.0f} KB",
        file="sampling-columns",
    )


if __name__ == "__main__":
    main()
