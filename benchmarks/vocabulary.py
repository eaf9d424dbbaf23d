"""The output projection on the last stage, with even layers or a cut by cost, or shared out.

    python -m benchmarks.vocabulary [--quick] [--shape bench,2] [--requests 64] [--tokens 64]

For two stages, for four, and for two of the shape of Qwen2.5-0.5B: served tokens per second, tokens
of the KV cache, and by the engines' traces which share of the time each stage's device was busy.
Engines are started forwards, then backwards, so that a machine whose speed drifts favours no row
(docs/vocabulary.md).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import BUILD, measure_in_turn, report
from benchmarks.serving import MODELS
from sipipe.observe.phases import Phase
from sipipe.tools.make_model.checkpoint import make_model
from sipipe.tools.report.reader import read_trace
from sipipe.tools.report.summary import Run

WAYS = ("greedy", "all")
REPEAT = 3
SHAPES = ("bench,2", "bench,4", "qwen2.5-0.5b,2")
SETTINGS: dict[str, dict[str, Any] | None] = {
    "even layers": {"layers": "even", "vocabulary": "last"},
    "layers cut by cost": {"vocabulary": "last", "kv_loss": 0.99},
    "shared output projection": {"vocabulary": "shared"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one engine a row")
    parser.add_argument("--requests", type=int, default=64, help="sent at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (default: 64)")
    what = "of sipipe make-model, and stages; may be repeated (default: all three)"
    parser.add_argument("--shape", action="append", metavar="SIZE,STAGES", help=what)
    args = parser.parse_args()
    for shape in args.shape or SHAPES:
        size, stages = shape.split(",")
        _measure(size, int(stages), args)


def _measure(size: str, stages: int, args: argparse.Namespace) -> None:
    model = make_model("llama", MODELS / f"llama-{size}", size=size)
    job = {
        "argv": [str(model), "-pp", str(stages), "--max-model-len", "2048"],
        "sampling": list(WAYS),
        "requests": args.requests,
        "prompt_tokens": 16,
        "tokens": args.tokens,
        "repeat": REPEAT,
    }
    rows = []
    # A place of its own that stays: settings, and so this path, are part of what vLLM's cache of
    # compiled code goes by.
    traces = BUILD / "traces" / f"vocabulary-{size}-pp{stages}"
    shutil.rmtree(traces, ignore_errors=True)
    speeds, kept = measure_in_turn(job, SETTINGS, both_ways=not args.quick, traces=traces)
    tokens = args.requests * args.tokens * REPEAT * len(WAYS)
    for title in SETTINGS:
        row: dict[str, Any] = {"engine": title, "KV cache tokens": f"{kept[title]:,}"}
        for way, figures in speeds[title].items():
            median = statistics.median(figures)
            row[f"{way} tok/s"] = f"{median:,.0f} ({min(figures):,.0f}-{max(figures):,.0f})"
        found = [_busy(trace, tokens) for trace in sorted(traces.glob(f"* {title}"))]
        row["stages busy, %"] = ", ".join(f"{100 * share:.0f}" for share in np.mean(found, 0))
        rows.append(row)
    report(
        "vocabulary",
        f"Served tokens/s, llama {size}, PP {stages}, {args.requests} requests at once, "
        f"{args.tokens} new tokens each",
        rows,
        note="bf16, compiled, prompts of 16 tokens; medians and ranges; busy: forward and logits",
        file=f"vocabulary-{size}-pp{stages}",
    )


def _busy(directory: Path, tokens: int) -> list[float]:
    """Share of the time in which each stage's device was busy, while the last ``tokens`` tokens were
    drawn: those of the measured runs."""
    trace = read_trace(str(directory))
    assert trace.executor is not None
    drawn = trace.executor.phase(Phase.GATHER)
    before = np.cumsum(drawn["tokens"][::-1]) >= tokens
    begin = drawn["start_ns"][::-1][int(np.argmax(before))]
    run = Run(trace, (int(begin) - trace.window()[0]) / 1e9)
    return [stage["share"]["busy"] for stage in run.summary["stage_table"]]


if __name__ == "__main__":
    main()
