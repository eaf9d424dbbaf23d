"""Served tokens per second with and without overlap: the same engine, two sets of input
buffers or one.

    python -m benchmarks.stage_served [--quick] [--requests 64] [--tokens 64]

PP 2, the benchmark model, greedy. Engines are started in turn (with, without, without, with), so
that a machine whose speed drifts favours neither; each answers the same requests several times.
Both record a trace, which says what tokens per second on a shared machine cannot: how much of the
time a stage stood still because inputs were being prepared, and what CPU time an iteration cost.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import report
from benchmarks.serving import MODELS, STAGES
from sipipe.observe.phases import Phase
from sipipe.tools.child import measure_sides
from sipipe.tools.make_model.checkpoint import make_model
from sipipe.tools.report.accounting import Cause, account
from sipipe.tools.report.reader import read_trace

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
    speeds: dict[str, list[float]] = {side: [] for side in SIDES}
    costs: dict[str, list[tuple[float, float, float]]] = {side: [] for side in SIDES}
    for side in order:
        with tempfile.TemporaryDirectory(prefix="sipipe-bench-") as directory:
            settings = {"overlap": SIDES[side], "trace": directory}
            result = measure_sides(job, settings, sides=("sipipe",))
            costs[side].append(cost(directory))
        speeds[side] += result["sipipe"]["tokens_per_second"]["greedy"]
    in_turn = statistics.median(speeds["in turn"])
    report(
        "stage",
        f"Served tokens/s with and without overlap, llama bench, PP {STAGES}, "
        f"{requests} requests at once, {tokens} new tokens each, greedy",
        [
            {
                "input preparation": side,
                "tok/s, median": statistics.median(speeds[side]),
                "lowest": min(speeds[side]),
                "highest": max(speeds[side]),
                "ratio": statistics.median(speeds[side]) / in_turn,
                "preparation ms an iteration": of(costs[side], 0),
                "of it stage stood still ms": of(costs[side], 1),
                "CPU ms an iteration": of(costs[side], 2),
            }
            for side in SIDES
        ],
        note="bf16, compiled; prompts of 16 tokens. The last three: means per stage and iteration, "
        "from the trace; they do not see what else the machine does, tokens/s do",
        file="stage-served",
    )


def cost(directory: str | Path) -> tuple[float, float, float]:
    """Milliseconds of a stage's iteration: preparing, standing still for it, CPU time."""
    trace = read_trace(directory)
    stages = trace.of("stage")
    iterations = sum(len(stage.phase(Phase.FORWARD)) for stage in stages)
    prepare = [stage.phase(Phase.PREPARE) for stage in stages]
    spent = sum(int((records["end_ns"] - records["start_ns"]).sum()) for records in prepare)
    still = sum(stage.by_cause[Cause.PREPARING] for stage in account(trace).stages)
    start, end = trace.window()
    cpu = 0
    for stage in stages:
        inside = (stage.cpu["start_ns"] >= start) & (stage.cpu["end_ns"] <= end)
        cpu += int(stage.cpu["cpu_ns"][inside].sum())
    return spent / iterations / 1e6, still / iterations / 1e6, cpu / iterations / 1e6


def of(costs: list[tuple[float, float, float]], place: int) -> float:
    """The mean over engines."""
    return statistics.mean(figures[place] for figures in costs)


if __name__ == "__main__":
    main()
