"""Served tokens per second with and without overlap: the same engine, two input versions or one.

    python -m benchmarks.stage_served [--quick] [--requests 64] [--tokens 64]

PP 2, the benchmark model, greedy. Engines are started in turn (with, without, without, with), so
that a machine whose speed drifts favours neither; each answers the same requests several times.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.harness import report
from benchmarks.serving import MODELS, STAGES
from sipipe.cli.bench import measure_sides
from sipipe.models import make_model

SIDES = {"overlapped": True, "in turn": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one engine a side")
    parser.add_argument("--requests", type=int, default=64, help="sent at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (default: 64)")
    args = parser.parse_args()
    compare_served(requests=args.requests, tokens=args.tokens, quick=args.quick)


def compare_served(*, requests: int = 64, tokens: int = 64, quick: bool = False) -> None:
    """Both settings of ``overlap``, in one run."""
    model = make_model("llama", MODELS / "llama-bench", size="bench")
    job = {
        "argv": [str(model), "-pp", str(STAGES), "--max-model-len", "2048"],
        "sampling": ["greedy"],
        "requests": requests,
        "prompt_tokens": 16,
        "tokens": tokens,
        "repeat": 3 if quick else 5,
    }
    order = list(SIDES) if quick else [*SIDES, *reversed(SIDES)]
    figures: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in order:
        result = measure_sides(job, {"overlap": SIDES[side]}, stages=STAGES, sides=("sipipe",))
        figures[side] += result["sipipe"]["tokens_per_second"]["greedy"]
    whole = statistics.median(figures["in turn"])
    report(
        "stage",
        f"Served tokens/s with and without overlap, llama bench, PP {STAGES}, "
        f"{requests} requests at once, {tokens} new tokens each, greedy",
        [
            {
                "input preparation": side,
                "tok/s, median": statistics.median(figures[side]),
                "lowest": min(figures[side]),
                "highest": max(figures[side]),
                "ratio": statistics.median(figures[side]) / whole,
                "engines": order.count(side),
            }
            for side in SIDES
        ],
        note="bf16, compiled; prompts of 16 tokens",
        file="stage-served",
    )


if __name__ == "__main__":
    main()
