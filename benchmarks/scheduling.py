"""Microbatches: SiPipe's slots against vLLM's scheduler and gLLM's token throttling.

Simulated: recorded arrival traces (``benchmarks/traces``) through pipelines of 2, 4 and 8 stages
with stage costs like a GPU's and like a CPU's. Served, it is rows of ``sipipe bench``.

    python -m benchmarks.scheduling [--quick] [--only beside]
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulation.cluster import emulation
from benchmarks.harness import report
from benchmarks.simulator.engine_model import EngineModel
from benchmarks.simulator.rules import DynamicChunksRule, Rule, SlotRule, TokenThrottlingRule
from benchmarks.simulator.simulator import Outcome, StageCosts, simulate
from benchmarks.simulator.workload import (
    Arrival,
    at_rate,
    bursty_trace,
    load_trace,
    poisson_trace,
)
from sipipe.config import MicrobatchSettings
from sipipe.engine.scheduling.times import Prices, usual

TRACES = Path(__file__).parent / "traces"
BUDGET = 2048
COSTS = {
    # Weights dominate a decode step; 200 tokens of prefill cost as much again.
    "GPU-like": StageCosts(prices=Prices(8e-3, 6e-5, 4e-5, 2e-8, 2e-9)),
    # Little to amortize; every token costs.
    "CPU-like": StageCosts(prices=Prices(3e-3, 2e-4, 1.5e-4, 0.0, 0.0)),
}
SMALL = StageCosts(prices=Prices(5e-3, 4e-4, 4e-4, 1e-7, 1e-7))
"""About SmolLM2-135M's on one core a stage."""
UNBOUNDED = MicrobatchSettings(tpot_target_ms=1e9)
LATE = 93.0
"""Second in which a long prompt comes, when others have decoded for three."""
DEVICES = ("deepseek-v3", "llama-3.1-70b")
"""Eight H200 a stage, by data sheet."""
CHUNKS = (2048, 4096, 8192, 16384, 32768)
LOADS = (0.5, 0.8, 0.95, float("inf"))


SEEDS = range(20, 40)
"""Of arrivals that are made up."""
COUNTED = 2.5
"""Points of idle share that count as more."""
Runs = dict[str, Outcome]
"""By rule."""


def serve(
    trace: list[Arrival], rule: Rule, stages: int, costs: StageCosts, extra: int = 0
) -> Outcome:
    """One simulated run, with ``stages + extra`` microbatches in flight."""
    engine = EngineModel(max_tokens=BUDGET, max_running=256, kv_tokens=131_072)
    inflight = stages + extra
    return simulate(trace, rule, stages=stages, inflight=inflight, costs=costs, engine=engine)


def at_load(
    trace: list[Arrival],
    full: list[Arrival],
    stages: int,
    load: float,
    *,
    extra: int = 0,
    kind: str = "GPU-like",
) -> Runs:
    """``trace`` by each rule, at ``load`` times the rate at which token throttling serves ``full``,
    never short of requests. ``extra``: 1 has the slots as the engine has them, p + 1, of which as
    many are open as pay; 0: p, all open."""
    costs = COSTS[kind]
    flood = at_rate(full, float("inf"))
    most = serve(flood, TokenThrottlingRule(depth=stages), stages, costs)
    trace = at_rate(trace, len(trace) / most.seconds * load)
    slots = SlotRule(slots=stages + extra, max_tokens=BUDGET, stages=stages, paced=bool(extra))
    return {
        "vLLM": serve(trace, Rule(), stages, costs),
        "token throttling": serve(trace, TokenThrottlingRule(depth=stages), stages, costs),
        "slots": serve(trace, slots, stages, costs, extra),
    }


def worst_ratio(ours: Outcome, theirs: Outcome, times: str) -> float:
    """Of medians and of 99th percentiles."""
    found = [np.percentile(getattr(outcome, times), (50, 99)) for outcome in (ours, theirs)]
    return float((found[0] / found[1]).max())


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
    full, trace = (load_trace(TRACES / f"{each}.csv")[:requests] for each in ("poisson", name))
    runs = at_load(trace, full, depth, load, kind=kind)
    rows = []
    for label, outcome in runs.items():
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


def prompts_alone(lengths: tuple[int, ...], stages: tuple[int, ...]) -> None:
    """One long prompt in an idle pipeline: seconds to its first token by each rule, and efficiency."""
    rows = [_prompt_alone(*case) for case in itertools.product(DEVICES, stages, lengths)]
    report(
        "scheduling",
        "Simulated: one long prompt, chunks of equal time and others",
        rows,
        note="ours: the seventh prompt; x: how many times as long as that; first prompt: ours before "
        "anything was measured; dynamic: SGLang's rule with the best first chunk of these; "
        "efficiency: a stage's own work in one chunk over TTFT",
        file="scheduling-prompts",
    )


def _prompt_alone(name: str, depth: int, length: int) -> dict[str, Any]:
    made = emulation(f"{name}-{8 * depth}xh200", depth, jitter=0.0)
    stage = max(made.profile.stages, key=lambda one: one.layers(8192))
    token = (stage.layers(8192) - stage.layers(4096)) / 4096
    prices = Prices(stage.layers(4096) - 4096 * token, 0.0, token, 0.0, stage.prompt_context)
    costs = StageCosts(prices=prices)

    def seconds(rule: Rule, budget: int, earlier: int = 0) -> float:
        """Until the first token of the last of some prompts, each of which is alone."""
        engine = EngineModel(max_tokens=budget, max_running=8, kv_tokens=1 << 22)
        trace = [Arrival(1e4 * number, length, 1) for number in range(earlier + 1)]
        inflight = depth + isinstance(rule, SlotRule)
        found = simulate(trace, rule, stages=depth, inflight=inflight, costs=costs, engine=engine)
        return float(found.ttft[-1])

    def ours(earlier: int) -> float:
        first, most = usual(made.facts), CHUNKS[-1]
        rule = SlotRule(slots=depth + 1, max_tokens=most, stages=depth, paced=True, first=first)
        return seconds(rule, most, earlier)

    best = ours(6)
    row: dict[str, Any] = {"model": name, "stages": depth, "prompt": length, "TTFT, s": best}
    row["efficiency"] = (prices.chunk(0, length) + prices.fixed) / best
    row["x first prompt"] = ours(0) / best
    for chunk in CHUNKS:
        row[f"x {chunk} tokens"] = seconds(Rule(), chunk) / best
    for smoothing in (0.6, 0.85):
        rules = [DynamicChunksRule(chunk, prices, smoothing) for chunk in CHUNKS]
        found = min(seconds(rule, 2 * CHUNKS[-1]) for rule in rules)
        row[f"x dynamic, {smoothing}"] = found / best
    return row


def beside_decodes(
    costs: StageCosts,
    stages: int,
    settings: MicrobatchSettings | None = None,
    *,
    earlier: float = 3.0,
) -> dict[str, Any]:
    """A prompt of 8,000 tokens beside 16 sequences that decode: milliseconds between two tokens of
    these while the prompt is computed, and before, and its seconds to the first token.

    Args:
        earlier: Seconds before the prompt at which the sequences come.
    """
    learnt = [Arrival(0.0, 1000, 2), Arrival(10.0, 2000, 2)]  # from these prices are known
    decoding = [Arrival(LATE - earlier + 0.01 * number, 16, 800) for number in range(16)]
    slots = stages + 1
    outcome = simulate(
        [*learnt, *decoding, Arrival(LATE, 8000, 2)],
        SlotRule(slots=slots, max_tokens=BUDGET, stages=stages, paced=True, settings=settings),
        stages=stages,
        inflight=slots,
        costs=costs,
        engine=EngineModel(max_tokens=BUDGET, max_running=256, kv_tokens=131_072),
    )
    streams = outcome.times[len(learnt) : -1]
    alone = _gaps(streams, LATE - min(1, earlier), LATE)
    beside = _gaps(streams, LATE, outcome.times[-1][0])
    return {
        "stages": stages,
        "alone, ms": float(np.median(alone)),
        "beside p50, ms": float(np.median(beside)),
        "beside p99, ms": float(np.percentile(beside, 99)),
        "x alone": float(np.median(beside) / np.median(alone)),
        "TTFT, s": float(outcome.ttft[-1]),
    }


def _gaps(streams: list[list[float]], begin: float, end: float) -> np.ndarray:
    """Milliseconds between two tokens of a stream that both lie between ``begin`` and ``end``, in seconds."""
    inside = [[1e3 * time for time in times if begin <= time <= end] for times in streams]
    return np.concatenate([np.diff(times) for times in inside])


def prompts_beside(stages: tuple[int, ...]) -> None:
    """A long prompt beside sequences that decode, with the default bound and without one."""
    rows = []
    for name, costs in (("GPU-like", COSTS["GPU-like"]), ("small model on CPUs", SMALL)):
        for depth, bound in itertools.product(stages, ("default", "none")):
            settings = UNBOUNDED if bound == "none" else None
            rows.append({"costs": name, "bound": bound} | beside_decodes(costs, depth, settings))
    report(
        "scheduling",
        "Simulated: a prompt of 8,000 tokens beside 16 sequences that decode",
        rows,
        note="time per token of the 16, while the prompt is computed and before; TTFT: the prompt's",
        file="scheduling-beside",
    )


def many_arrivals(requests: int, stages: tuple[int, ...]) -> None:
    """What the engine does, p + 1 slots of which some close; a row per depth."""
    rows = []
    for depth in stages:
        cases = [(make, seed) for make in (poisson_trace, bursty_trace) for seed in SEEDS]
        with ProcessPoolExecutor() as pool:  # no time is measured here
            found = list(pool.map(_seeded, cases, itertools.repeat((depth, requests))))
        idle = {rule: [100 * runs[rule].idle_share for runs in found] for rule in found[0]}
        more = np.subtract(idle["slots"], idle["token throttling"])
        row = {"stages": depth, "runs": len(found)}
        row |= {f"idle %, {rule}": float(np.median(shares)) for rule, shares in idle.items()}
        row |= {
            "slots more idle than throttling": int((more > COUNTED).sum()),
            "most idle %, slots": max(idle["slots"]),
            "least tok/s, of vLLM's": min(
                runs["slots"].tokens_per_second / runs["vLLM"].tokens_per_second for runs in found
            ),
            "worst percentile, of vLLM's": max(
                worst_ratio(runs["slots"], runs["vLLM"], times)
                for runs in found
                for times in ("ttft", "tpot")
            ),
        }
        rows.append(row)
    report(
        "scheduling",
        "Simulated pipelines, p + 1 slots of which some close: many arrivals at 90 % load",
        rows,
        note="Poisson and bursty arrivals, as many of each; idle: medians; more idle: by more than "
        f"{COUNTED} points; percentiles: p50 and p99 of first and later tokens",
        file="scheduling-seeds",
    )


def _seeded(case: tuple[Any, int], of: tuple[int, int]) -> Runs:
    (make, seed), (depth, requests) = case, of
    trace = make(requests, seed)
    return at_load(trace, trace, depth, 0.9, extra=1)


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
    parts = ("rules", "alone", "beside", "arrivals")
    parser.add_argument("--only", choices=parts, help="one of the tables")
    options = parser.parse_args()
    quick = options.quick
    if options.only in (None, "rules"):
        if quick:
            simulated(120, (0.8, float("inf")), (2, 4))
        else:
            simulated(300, LOADS, (2, 4, 8))
    if options.only in (None, "alone"):
        lengths = (131_072,) if quick else (16_384, 131_072, 524_288, 1_000_000)
        prompts_alone(lengths, (4,) if quick else (1, 2, 4, 8))
    if options.only in (None, "beside"):
        prompts_beside((2,) if quick else (2, 4, 8))
    if options.only in (None, "arrivals"):
        many_arrivals(60 if quick else 150, (2, 4) if quick else (2, 4, 8))


if __name__ == "__main__":
    main()
