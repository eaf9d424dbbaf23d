"""An engine in Python until its first token, as a user's script makes it. :mod:`benchmarks.start` runs it.

python -m benchmarks.first_token MODEL -pp 2 --distributed-executor-backend sipipe.Executor
"""

from __future__ import annotations

import argparse
import sys

SAID = "the first answer is there"


def main() -> None:
    """Make the engine, ask it once, say so, and keep it until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("-pp", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--distributed-executor-backend")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        pipeline_parallel_size=args.pp,
        distributed_executor_backend=args.distributed_executor_backend,
    )
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    print(SAID, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
