"""Few requests: SiPipe beside stock vLLM of the same degree, with one stage and with two.

    python -m benchmarks.small [--quick] [--requests 1,2,4,8,16] [--tokens 32] [--pp 1,2]

Both engines of a degree stay and answer all loads in turn, ``--repeat`` times each. A ratio is the
median of those of two neighbouring answers, so that a machine whose speed drifts favours neither
side.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from benchmarks.harness import report
from benchmarks.in_turn import measured_in_turn
from benchmarks.make_model.checkpoint import make_model
from benchmarks.serving import MODELS

WAYS = ("greedy", "all")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one stage, 3 repetitions")
    parser.add_argument("--requests", default="1,2,4,8,16", help="sent at once, a list")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens (default: 32)")
    parser.add_argument("--pp", help="stages, a list (default: 1,2)")
    parser.add_argument("--repeat", type=int, help="answers to each load (default: 7)")
    parser.add_argument("--config", default="{}", help="SiPipe's settings, as JSON")
    args = parser.parse_args()
    model = make_model("llama", MODELS / "llama-bench", size="bench")
    rows: list[dict[str, Any]] = []
    for stages in (args.pp or ("1" if args.quick else "1,2")).split(","):
        job = {
            "argv": [str(model), "-pp", stages, "--max-model-len", "2048"],
            "sampling": WAYS,
            "requests": [int(count) for count in args.requests.split(",")],
            "prompt_tokens": 16,
            "tokens": args.tokens,
            "repeat": args.repeat or (3 if args.quick else 7),
        }
        settings = {"stock": None, "SiPipe": json.loads(args.config)}
        found = measured_in_turn({side: {**job, "settings": settings[side]} for side in settings})
        speeds = {side: found[side]["tokens_per_second"] for side in found}
        for load in speeds["stock"]:
            stock, ours = speeds["stock"][load], speeds["SiPipe"][load]
            ratios = [mine / theirs for mine, theirs in zip(ours, stock, strict=True)]
            sampling, requests = load.split(", ")
            rows.append(
                {
                    "stages": int(stages),
                    "sampling": sampling,
                    "requests": int(requests.split()[0]),
                    "stock tok/s": statistics.median(stock),
                    "SiPipe tok/s": statistics.median(ours),
                    "ratio": statistics.median(ratios),
                    "from-to": f"{min(ratios):.2f}-{max(ratios):.2f}",
                }
            )
    report(
        "small",
        f"Served tokens/s of few requests, llama bench, {args.tokens} new tokens",
        rows,
        note="bf16, compiled, prompts of 16 tokens; both sides on the same cores, answers in turn; "
        "medians, of the ratios too",
    )


if __name__ == "__main__":
    main()
