"""Tokens per second of a whole engine: stock vLLM, and SiPipe with each way to place the output
projection: on the last stage with even layers or a cut by cost, or shared out (docs/vocabulary.md).

    python -m benchmarks.serving [--quick] [--shape bench,2] [--requests 64] [--tokens 64] [--ways]
                                [--dtype DTYPE]

First one product with the projection, by its rows: where it takes as long for many as for one, its
time is that of reading the matrix. Then, for two stages, for four, and for two of the shape of
Qwen2.5-0.5B, all of them random checkpoints
made on the spot: served tokens per second, tokens of the KV cache, and by SiPipe's traces which
share of the time each stage's device was busy. Each row is an engine in a process of its own, all
requests sent at once; engines are started forwards, then backwards, so that a machine whose speed
drifts favours no row.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from benchmarks.harness import BUILD, measure_in_turn, median_seconds, report
from benchmarks.make_model.checkpoint import make_model
from benchmarks.make_model.families import SIZES
from sipipe.observe.phases import Phase
from sipipe.tools.report.reader import read_trace
from sipipe.tools.report.summary import Run

MODELS = Path("build/models")
WAYS = ("greedy", "all")
REPEAT = 3
ROWS = (1, 8, 16, 32, 64, 128)
SHAPES = ("bench,2", "bench,4", "qwen2.5-0.5b,2")
SETTINGS: dict[str, dict[str, Any] | None] = {
    "stock vLLM": None,
    "even layers": {"layers": "even", "vocabulary": "last"},
    "layers cut by cost": {"vocabulary": "last", "kv_loss": 0.99},
    "shared output projection": {"vocabulary": "shared"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one engine a row, the first shape")
    parser.add_argument("--requests", type=int, default=64, help="sent at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (default: 64)")
    what = "of benchmarks.make_model, and stages; may be repeated (default: three)"
    parser.add_argument("--shape", action="append", metavar="SIZE,STAGES", help=what)
    parser.add_argument("--ways", action="store_true", help="SiPipe's rows only, without stock")
    parser.add_argument("--dtype", default="bfloat16", help="without AVX-512 and AMX: float32")
    args = parser.parse_args()
    _report_products(getattr(torch, args.dtype))
    for shape in args.shape or (SHAPES[:1] if args.quick else SHAPES):
        size, stages = shape.split(",")
        _measure(size, int(stages), args)


def _report_products(dtype: torch.dtype) -> None:
    """Times of vLLM's kernel with the benchmark model's projection and a half of it, on one core."""
    config = SIZES["bench"]
    vocabulary, hidden = config.vocab, config.hidden
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    heads = {}
    for part in (1, 2):
        head = heads[part] = torch.nn.Module()
        weight = torch.randn(vocabulary // part, hidden, dtype=dtype)
        head.weight = torch.nn.Parameter(weight, requires_grad=False)
        with set_current_vllm_config(VllmConfig()):
            dispatch_cpu_unquantized_gemm(head, remove_weight=True)
    rows: list[dict[str, Any]] = []
    for count in ROWS:
        inputs = torch.randn(count, hidden, dtype=dtype)
        whole, half = (
            1e3 * median_seconds(partial(head.cpu_linear, inputs, head.weight, None))
            for head in heads.values()
        )
        rows.append(
            {
                "rows": count,
                "all columns ms": whole,
                "half of them ms": half,
                "GFLOP/s": 2e-6 * count * vocabulary * hidden / whole,
            }
        )
    torch.set_num_threads(threads)
    report(
        "serving",
        f"One product with the output projection, {vocabulary:,} x {hidden}, one core",
        rows,
        note=f"{dtype}, vLLM's kernel",
        file="serving-product",
    )


def _measure(size: str, stages: int, args: argparse.Namespace) -> None:
    model = make_model("llama", MODELS / f"llama-{size}", size=size)
    job = {
        "argv": [str(model), "-pp", str(stages), "--max-model-len", "2048", "--dtype", args.dtype],
        "sampling": list(WAYS),
        "requests": args.requests,
        "prompt_tokens": 16,
        "tokens": args.tokens,
        "repeat": REPEAT,
    }
    settings = {title: own for title, own in SETTINGS.items() if own or not args.ways}
    rows = []
    # A place of its own that stays: settings, and so this path, are part of what vLLM's cache of
    # compiled code goes by.
    traces = BUILD / "traces" / f"serving-{size}-pp{stages}"
    shutil.rmtree(traces, ignore_errors=True)
    speeds, kept = measure_in_turn(job, settings, both_ways=not args.quick, traces=traces)
    tokens = args.requests * args.tokens * REPEAT * len(WAYS)
    for title in settings:
        row: dict[str, Any] = {"engine": title, "KV cache tokens": f"{kept[title]:,}"}
        for way, figures in speeds[title].items():
            median = statistics.median(figures)
            row[f"{way} tok/s"] = f"{median:,.0f} ({min(figures):,.0f}-{max(figures):,.0f})"
        found = [_busy(trace, tokens) for trace in sorted(traces.glob(f"* {title}"))]
        busy = np.mean(found, 0) if found else ()  # stock vLLM records nothing
        row["stages busy, %"] = ", ".join(f"{100 * share:.0f}" for share in busy)
        rows.append(row)
    report(
        "serving",
        f"Served tokens/s, llama {size}, PP {stages}, {args.requests} requests at once, "
        f"{args.tokens} new tokens each",
        rows,
        note=f"{args.dtype}, compiled, prompts of 16 tokens; medians and ranges; busy: forward and logits",
        file=f"serving-{size}-pp{stages}",
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
