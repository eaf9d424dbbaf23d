"""Few requests: SiPipe beside stock vLLM of the same degree, with one stage and with two.

    python -m benchmarks.small [--quick] [--requests 1,2,4,8,16] [--tokens 32] [--pp 1,2]

Engines start in turn: stock, SiPipe, and without ``--quick`` SiPipe, stock, so that a machine whose
speed drifts favours neither. Each answers every load several times.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.harness import report
from benchmarks.serving import MODELS
from sipipe.tools.child import measure_sides
from sipipe.tools.make_model.checkpoint import make_model

SIDES = ("stock", "sipipe")
WAYS = ("greedy", "all")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one engine a side")
    parser.add_argument("--requests", default="1,2,4,8,16", help="sent at once, a list")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens (default: 32)")
    parser.add_argument("--pp", default="1,2", help="stages, a list (default: 1,2)")
    args = parser.parse_args()
    model = make_model("llama", MODELS / "llama-bench", size="bench")
    counts = [int(count) for count in args.requests.split(",")]
    for stages in args.pp.split(","):
        job = {
            "argv": [str(model), "-pp", stages, "--max-model-len", "2048"],
            "sampling": list(WAYS),
            "requests": counts,
            "prompt_tokens": 16,
            "tokens": args.tokens,
            "repeat": 3,
        }
        speeds: dict[tuple[str, str], list[float]] = {}
        for side in SIDES if args.quick else (*SIDES, *reversed(SIDES)):
            found = measure_sides(job, {}, sides=(side,))[side]["tokens_per_second"]
            for load, figures in found.items():
                speeds.setdefault((side, load), []).extend(figures)
        rows: list[dict[str, Any]] = []
        for load in found:
            stock, ours = (speeds[side, load] for side in SIDES)
            rows.append(
                {
                    "load": load,
                    "stock tok/s": statistics.median(stock),
                    "range": f"{min(stock):,.0f}-{max(stock):,.0f}",
                    "SiPipe tok/s": statistics.median(ours),
                    "its range": f"{min(ours):,.0f}-{max(ours):,.0f}",
                    "ratio": statistics.median(ours) / statistics.median(stock),
                }
            )
        report(
            "small",
            f"Served tokens/s of few requests, llama bench, PP {stages}, {args.tokens} new tokens",
            rows,
            note="bf16, compiled, prompts of 16 tokens; both sides on the same cores",
            file=f"small-pp{stages}",
        )


if __name__ == "__main__":
    main()
