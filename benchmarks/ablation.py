"""What each part of SiPipe contributes: served tokens per second with one part more a row.

    python -m benchmarks.ablation [--quick] [--requests 64] [--tokens 32]

The paper's ablation (section 5) on two CPU stages and the benchmark model. From stock vLLM to
SiPipe as it is by default, in the order in which the parts can be had: without CPU sampling vLLM's
own runner and sampler run in SiPipe's workers, so there is nothing to overlap yet. Engines are
started forwards, then backwards, so that a machine whose speed drifts favours no row.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from benchmarks.serving import MODELS, STAGES
from sipipe.tools.child import measure_sides
from sipipe.tools.make_model.checkpoint import make_model

WAYS = ("greedy", "all")
BASE = {
    "cpu_sampling": "off",
    "overlap": False,
    "scheduler": "vllm",
    "layers": "even",
    "vocabulary": "last",
}
STEPS: dict[str, dict[str, Any] | None] = {
    "stock vLLM": None,
    "+ channels and transmission": {},
    "+ CPU sampling, SiPipe's stage runner": {"cpu_sampling": "on"},
    "+ token-safe execution": {"overlap": True},
    "+ pipeline scheduler": {"scheduler": "pipeline"},
    "+ layers cut by cost, whatever KV cache that costs": {"layers": "auto", "kv_loss": 0.99},
    "+ output projection by who is quicker: SiPipe": {"vocabulary": "auto", "kv_loss": 0.1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one engine a row")
    parser.add_argument("--requests", type=int, default=64, help="sent at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens (default: 32)")
    args = parser.parse_args()
    model = make_model("llama", MODELS / "llama-bench", size="bench")
    job = {
        "argv": [str(model), "-pp", str(STAGES), "--max-model-len", "2048"],
        "sampling": list(WAYS),
        "requests": args.requests,
        "prompt_tokens": 16,
        "tokens": args.tokens,
        "repeat": 3,
    }
    settings: dict[str, dict[str, Any] | None] = {}
    so_far: dict[str, Any] = dict(BASE)
    for title, more in STEPS.items():
        so_far = so_far | (more or {})
        settings[title] = None if more is None else so_far
    speeds, _ = measure_in_turn(job, settings, both_ways=not args.quick)
    rows, before = [], None
    for title in STEPS:
        median = {way: statistics.median(speeds[title][way]) for way in WAYS}
        row: dict[str, Any] = {"engine": title}
        for way in WAYS:
            low, high = min(speeds[title][way]), max(speeds[title][way])
            row[f"{way} tok/s"] = f"{median[way]:,.0f} ({low:,.0f}-{high:,.0f})"
            row[f"{way}: of the row above"] = median[way] / before[way] if before else 1.0
        rows.append(row)
        before = median
    report(
        "ablation",
        f"Served tokens/s, llama bench, PP {STAGES}, {args.requests} requests at once, "
        f"{args.tokens} new tokens each, with one part more a row",
        rows,
        note="bf16, compiled, prompts of 16 tokens; medians and ranges",
    )


def measure_in_turn(
    job: dict[str, Any],
    settings: dict[str, dict[str, Any] | None],
    *,
    both_ways: bool,
    traces: Path | None = None,
) -> tuple[dict[str, dict[str, list[float]]], dict[str, int]]:
    """``job`` on an engine of each of ``settings`` (None: stock vLLM), in order, and backwards.

    Returns by title the tokens/s of each way of sampling, and the tokens of the KV cache. ``traces``
    gets a directory ``NUMBER TITLE`` of each engine of SiPipe.
    """
    speeds: dict[str, dict[str, list[float]]] = {title: {} for title in settings}
    kept: dict[str, int] = {}
    order = [*settings, *reversed(settings)] if both_ways else list(settings)
    for number, title in enumerate(order):
        side, own = ("stock", {}) if settings[title] is None else ("sipipe", settings[title])
        if traces is not None and own:
            own = own | {"trace": str(traces / f"{number} {title}")}
        result = measure_sides(job, own or {}, sides=(side,))[side]
        kept[title] = result["kv_tokens"]
        for way, figures in result["tokens_per_second"].items():
            speeds[title].setdefault(way, []).extend(figures)
    return speeds, kept


if __name__ == "__main__":
    main()
