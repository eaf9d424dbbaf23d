"""How even the work of an engine's samplers is: what the busiest one draws against an even share.

    python -m benchmarks.balance [--quick] [--requests 192] [--samplers 1,2,4]

One engine for each number of samplers, two stages. Requests with four ways of sampling and outputs
of different lengths come and go, more of them than run at once, and the scheduler moves them
between microbatches. Work is counted in the seconds that the cost table gives a row
(:mod:`sipipe.messages.cost`), not in measured ones: samplers on fewer cores than there are of them
measure each other, and a share does not depend on what else the machine does. Each engine runs twice, with and without sequences that change their sampler.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from typing import Any

from benchmarks.harness import of_the_checkout, report
from benchmarks.make_model.checkpoint import make_model
from benchmarks.serving import MODELS
from sipipe.tools.child import answer, measured

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 and 4 samplers, 96 requests")
    parser.add_argument("--requests", type=int, help="64 of them at a time (default: 192)")
    parser.add_argument("--samplers", help="numbers of them, a list (default: 1,2,4)")
    args = parser.parse_args()
    module = of_the_checkout("benchmarks.balance")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the executor is in the engine's process
    model = make_model("llama", MODELS / "llama-tiny", size="tiny")
    counts = args.samplers or ("2,4" if args.quick else "1,2,4")
    requests = args.requests or (96 if args.quick else 192)
    rows = []
    for samplers in map(int, counts.split(",")):
        job = {"model": str(model), "samplers": samplers, "requests": requests}
        both = measured(f"{samplers} samplers", job, module)
        rows += [{"samplers": samplers, **row} for row in both["rows"]]
    report(
        "balance",
        f"The busiest sampler's work against an even share, PP 2, {requests} requests, "
        "64 at a time",
        rows,
        note="iterations of 8 rows and more; each draws as late as its busiest sampler",
    )


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """In the engine's process, where the executor and its tracker are too."""
    from vllm import LLM, EngineArgs, SamplingParams

    from sipipe.engine.iteration.balance import Balancer
    from sipipe.engine.iteration.requests import RequestTracker
    from sipipe.engine.iteration.work import Work
    from sipipe.engine.start.arguments import parse_engine_args

    shares: list[float] = []
    moved = 0
    advance, move = RequestTracker.advance, Balancer.move

    def watch(tracker: RequestTracker, iteration: int, output: Any) -> Work:
        work = advance(tracker, iteration, output)
        drawn = [tracker._requests[name] for name in work.sampled]
        if len(drawn) >= 8:
            loads = tracker._balancer.loads(drawn)
            shares.append(max(loads) * len(loads) / sum(loads))
        return work

    def count(balancer: Balancer, members: Any) -> int | None:
        nonlocal moved
        index = move(balancer, members)
        moved += index is not None
        return index

    RequestTracker.advance = watch  # type: ignore[method-assign]
    argv = [job["model"], "-pp", "2", "--max-num-seqs", "64", "--max-model-len", "512"]
    args = parse_engine_args([*argv, "--enforce-eager"], {"samplers": job["samplers"]})
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(3, 300) for _ in range(rng.randint(4, 60))]}
        for _ in range(job["requests"])
    ]
    params = [
        SamplingParams(
            **rng.choice(KINDS), seed=i, max_tokens=rng.randint(16, 120), ignore_eos=True
        )
        for i in range(job["requests"])
    ]
    rows = []
    for how in ("they stay", "one may move an iteration"):
        stays = how == "they stay"
        Balancer.move = (lambda *_: None) if stays else count  # type: ignore[method-assign]
        shares.clear()
        moved = 0
        llm.generate(prompts, params, use_tqdm=False)
        rows.append(
            {
                "sequences": how,
                "iterations": len(shares),
                "moved": moved,
                "busiest / even share, mean": statistics.fmean(shares),
                "95 of 100 below": statistics.quantiles(shares, n=20)[-1],
            }
        )
    return {"rows": rows}


if __name__ == "__main__":
    if "".join(sys.argv[1:]).isdigit():  # the socket of the process that measures
        answer(_run)
    else:
        main()
