"""Tokens per second of a whole engine: SiPipe beside stock vLLM, two pipeline stages, in one run.

Each side is a process of its own that starts, warms up, and answers the same requests, all sent
at once, for each way of sampling. Models are random checkpoints made on the spot: ``bench`` (a
small decoder under a vocabulary of 151,936) and, with ``--large``, the shape of Qwen2.5-0.5B.

    python -m benchmarks.serving [--quick] [--large] [--requests 64] [--tokens 16,128]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from sipipe.tools.child import measure_sides
from sipipe.tools.make_model.checkpoint import make_model

MODELS = Path("build/models")
STAGES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one repetition, two ways of sampling")
    parser.add_argument("--large", action="store_true", help="the shape of Qwen2.5-0.5B")
    parser.add_argument("--requests", type=int, default=64, help="sent at once (default: 64)")
    parser.add_argument("--tokens", default="16", help="new tokens, a list (default: 16)")
    args = parser.parse_args()
    size = "qwen2.5-0.5b" if args.large else "bench"
    model = make_model("llama", MODELS / f"llama-{size}", size=size)
    ways = ["greedy", "all"] if args.quick else ["greedy", "temperature", "top-p", "all"]
    rows: list[dict[str, Any]] = []
    for tokens in map(int, args.tokens.split(",")):
        job = {
            "argv": [str(model), "-pp", str(STAGES), "--max-model-len", "2048"],
            "sampling": ways,
            "requests": args.requests,
            "prompt_tokens": 16,
            "tokens": tokens,
            "repeat": 1 if args.quick else 5 if tokens <= 16 else 3,
        }
        results = measure_sides(job, {})
        median = {
            side: {way: statistics.median(result["tokens_per_second"][way]) for way in ways}
            for side, result in results.items()
        }
        rows += [
            {
                "sampling": way,
                "new tokens": tokens,
                "stock tok/s": median["stock"][way],
                "SiPipe tok/s": median["sipipe"][way],
                "ratio": median["sipipe"][way] / median["stock"][way],
                "of its greedy": median["sipipe"][way] / median["sipipe"]["greedy"],
            }
            for way in ways
        ]
    report(
        "serving",
        f"Served tokens/s, llama {size}, PP {STAGES}, {args.requests} requests at once",
        rows,
        note="bf16, compiled, prompts of 16 tokens, medians; seeds given, end of text ignored",
        file="serving-large" if args.large else None,
    )


if __name__ == "__main__":
    main()
