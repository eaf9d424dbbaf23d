"""Microbatches: SiPipe's slots against vLLM's scheduler and gLLM's token throttling.

Simulated: recorded arrival traces (``benchmarks/traces``) through pipelines of 2, 4 and 8 stages
with stage costs like a GPU's and like a CPU's. Served, it is rows of ``sipipe bench``.

    python -m benchmarks.scheduling [--quick]
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import report
from benchmarks.simulator.engine_model import EngineModel
from benchmarks.simulator.rules import Rule, SlotRule, TokenThrottlingRule
from benchmarks.simulator.simulator import Outcome, StageCosts, simulate
from benchmarks.simulator.workload import Arrival, at_rate, load_trace
from sipipe.engine.scheduling.times import Prices

TRACES = Path(__file__).parent / "traces"
BUDGET = 2048
COSTS = {
    # Weights dominate a decode step; 200 tokens of prefill cost as much again.
    "GPU-like": StageCosts(prices=Prices(8e-3, 2e-5, 4e-5, 2e-8, 2e-9)),
    # Little to amortize; every token costs.
    "CPU-like": StageCosts(prices=Prices(3e-3, 5e-5, 1.5e-4, 0.0, 0.0)),
}
LOADS = (0.5, 0.8, 0.95, float("inf"))


def serve(trace: list[Arrival], rule: Rule, stages: int, costs: StageCosts) -> Outcome:
    """One simulated run."""
    engine = EngineModel(max_tokens=BUDGET, max_running=256, kv_tokens=131_072)
    return simulate(trace, rule, stages=stages, inflight=stages, costs=costs, engine=engine)


def simulated(requests: int, loads: tuple[float, ...], stages: tuple[int, ...]) -> None:
    """Every trace, cost and depth; one row per rule."""
    cases = list(itertools.product(COSTS, stages, ("poisson", "bursty"), loads))
    with ProcessPoolExecutor() as pool:  # no time is measured here
        found = pool.map(_simulated, cases, itertools.repeat(requests))
        rows = [row for part in found for row in part]
    report(
        "scheduling",
        "Simulated pipelines: scheduling rules on recorded traces",
        rows,
        note="idle until 95 % of the tokens are served; ms",
        file="scheduling-simulated",
    )
    slots = [row for row in rows if row["rule"] == "slots"]
    summary: list[dict[str, Any]] = []
    for key in ("tok/s", "idle %", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"):
        line: dict[str, Any] = {"slots against others": key}
        for label in ("vLLM", "token throttling"):
            others = [row for row in rows if row["rule"] == label]
            ratios = [ours[key] / theirs[key] for ours, theirs in zip(slots, others, strict=True)]
            line[f"{label}, mean"] = float(np.exp(np.mean(np.log(ratios))))
            line[f"{label}, worst"] = float(min(ratios) if key == "tok/s" else max(ratios))
        summary.append(line)
    report(
        "scheduling",
        "Ratios, geometric mean and worst case (below 1 is better, for tok/s above 1)",
        summary,
        file="scheduling-summary",
    )


def _simulated(case: tuple[str, int, str, float], requests: int) -> list[dict[str, Any]]:
    """One trace through one pipeline at one load, by each rule."""
    kind, depth, name, load = case
    flood = at_rate(load_trace(TRACES / "poisson.csv")[:requests], float("inf"))
    # One rate for all rules: what token throttling serves when never short of requests.
    full = serve(flood, TokenThrottlingRule(depth=depth), depth, COSTS[kind])
    trace = at_rate(load_trace(TRACES / f"{name}.csv")[:requests], requests / full.seconds * load)
    rules: dict[str, Rule] = {
        "vLLM": Rule(),
        "token throttling": TokenThrottlingRule(depth=depth),
        "slots": SlotRule(slots=depth, max_tokens=BUDGET, stages=depth),
    }
    rows = []
    for label, rule in rules.items():
        outcome = serve(trace, rule, depth, COSTS[kind])
        rows.append(
            {
                "costs": kind,
                "stages": depth,
                "trace": name,
                "load": "all at once" if load == float("inf") else f"{load:.0%}",
                "rule": label,
                "tok/s": outcome.tokens_per_second,
                "idle %": 100 * outcome.idle_share,
                **_latencies(outcome.ttft, outcome.tpot),
            }
        )
    return rows


def _latencies(ttft: np.ndarray, tpot: np.ndarray) -> dict[str, float]:
    return {
        f"{name} p{q}": 1e3 * float(np.percentile(values, q))
        for name, values in (("TTFT", ttft), ("TPOT", tpot))
        for q in (50, 99)
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests, depths and loads")
    options = parser.parse_args()
    if options.quick:
        simulated(120, (0.8, float("inf")), (2, 4))
    else:
        simulated(300, LOADS, (2, 4, 8))


if __name__ == "__main__":
    main()
