"""The output projection on the last stage, with even layers or a cut by cost, or shared out.

    python -m benchmarks.vocabulary [--quick] [--requests 64] [--tokens 64] [--pp 2]

Engines are started forwards, then backwards, so that a machine whose speed drifts favours no row
(docs/vocabulary.md).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.ablation import measure_in_turn
from benchmarks.harness import report
from benchmarks.serving import MODELS
from sipipe.tools.make_model.checkpoint import make_model

WAYS = ("greedy", "all")
SETTINGS: dict[str, dict[str, Any] | None] = {
    "stock vLLM": None,
    "even layers": {"layers": "even", "vocabulary": "last"},
    "layers cut by cost": {"vocabulary": "last"},
    "shared output projection": {"vocabulary": "shared"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one engine a row, no stock vLLM")
    parser.add_argument("--requests", type=int, default=64, help="sent at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (default: 64)")
    parser.add_argument("--pp", type=int, default=2, help="stages (default: 2)")
    parser.add_argument("--size", default="bench", help="of sipipe make-model (default: bench)")
    args = parser.parse_args()
    model = make_model("llama", MODELS / f"llama-{args.size}", size=args.size)
    job = {
        "argv": [str(model), "-pp", str(args.pp), "--max-model-len", "2048"],
        "sampling": list(WAYS),
        "requests": args.requests,
        "prompt_tokens": 16,
        "tokens": args.tokens,
        "repeat": 3,
    }
    settings = dict(list(SETTINGS.items())[args.quick :])
    speeds, kept = measure_in_turn(job, settings, both_ways=not args.quick)
    rows = []
    for title in settings:
        row: dict[str, Any] = {"engine": title, "KV cache tokens": f"{kept[title]:,}"}
        for way, figures in speeds[title].items():
            median = statistics.median(figures)
            row[f"{way} tok/s"] = f"{median:,.0f} ({min(figures):,.0f}-{max(figures):,.0f})"
        rows.append(row)
    report(
        "vocabulary",
        f"Served tokens/s, llama {args.size}, PP {args.pp}, {args.requests} requests at once, "
        f"{args.tokens} new tokens each",
        rows,
        note="bf16, compiled, prompts of 16 tokens; medians and ranges",
    )


if __name__ == "__main__":
    main()
