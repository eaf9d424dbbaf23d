"""Microbatches: SiPipe's slots against vLLM's scheduler and gLLM's token throttling.

Two parts. *Simulated*: recorded arrival traces (``benchmarks/traces``) through pipelines of 2, 4
and 8 stages with stage costs like a GPU's and like a CPU's. *Served*: vLLM with two CPU stages,
its own executor on both sides (``--executor sipipe`` for SiPipe's), once with its scheduler and
once with ours: all requests at once, then Poisson arrivals. With ``--executor both`` it is all of
stock vLLM against all of SiPipe.

``python -m benchmarks.scheduling [--quick] [--part simulated|served|thin|all]``
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_process import answer, run_in_process
from benchmarks.harness import report
from benchmarks.simulator.engine_model import EngineModel
from benchmarks.simulator.rules import Rule, SlotRule, TokenThrottlingRule
from benchmarks.simulator.simulator import Outcome, StageCosts, simulate
from benchmarks.simulator.workload import Arrival, at_rate, load_trace, poisson_trace

TRACES = Path(__file__).parent / "traces"
BUDGET = 2048
COSTS = {
    # Weights dominate a decode step; 200 tokens of prefill cost as much again.
    "GPU-like": StageCosts(fixed=8e-3, per_token=4e-5, per_sequence=2e-5, per_context=2e-8),
    # Little to amortize; every token costs.
    "CPU-like": StageCosts(fixed=3e-3, per_token=1.5e-4, per_sequence=5e-5),
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
        "slots": SlotRule(slots=depth, max_tokens=BUDGET),
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


def served(quick: bool, size: str, executor: str) -> None:
    """The engine itself, one process per scheduler."""
    with tempfile.TemporaryDirectory(prefix="sipipe-bench-") as scratch:
        from sipipe.tools.make_model.checkpoint import make_model

        model = make_model("llama", Path(scratch) / "model", size=size)
        results = {}
        rate = 0.0
        executors = ("stock", "sipipe") if executor == "both" else (executor, executor)
        for scheduler, used in zip(("vllm", "pipeline"), executors, strict=True):
            spec = {
                "model": str(model),
                "scheduler": scheduler,
                "executor": used,
                "counts": [64] if quick else [64, 256],
                "repeats": 1 if quick else 3,
                "output": 16 if quick else 32,
                "rate": rate,
                "loads": [0.8] if quick else [0.5, 0.8, 0.95],
                "requests": 24 if quick else 80,
                "traces": 1 if quick else 3,
            }
            results[scheduler] = _engine(spec)
            # Both sides get the same arrivals: shares of what the stock side can take.
            rate = results[scheduler]["rate"]
    rows = [
        {"case": case, "side": "SiPipe's" if scheduler == "pipeline" else "vLLM's", **values}
        for case in results["vllm"]["cases"]
        for scheduler in ("vllm", "pipeline")
        for values in [results[scheduler]["cases"][case]]
    ]
    report(
        "scheduling",
        f"Served, two stages, model size {size}, greedy: "
        + (
            "SiPipe and stock vLLM"
            if executor == "both"
            else f"SiPipe's and vLLM's scheduler, {executor} executor"
        ),
        rows,
        note="sizes: sequences of the microbatches in the middle of the run; ms",
        file=f"scheduling-served-{executor}-{size}",
    )


def thin(quick: bool, size: str, executor: str) -> None:
    """Few requests: microbatches of one sequence each, or fewer and fuller ones?"""
    counts = [2, 8, 32, 64] if quick else [1, 2, 4, 8, 16, 32, 64, 128]
    with tempfile.TemporaryDirectory(prefix="sipipe-bench-") as scratch:
        from sipipe.tools.make_model.checkpoint import make_model

        model = make_model("llama", Path(scratch) / "model", size=size)
        base = {"model": str(model), "executor": executor, "counts": counts, "loads": []}
        base |= {"repeats": 3, "output": 32, "rate": 1.0, "requests": 0}
        sides: dict[str, dict[str, Any]] = {"vLLM's": {"scheduler": "vllm"}}
        for least, label in ((0, "measured"), (1, "a slot each"), (1000, "one slot")):
            sides[label] = {"scheduler": "pipeline", "microbatches": {"min_sequences": least}}
        rows = []
        for label, side in sides.items():
            cases = _engine({**base, **side})["cases"]
            speeds = {f"{n} requests": cases[f"{n} at once"]["tok/s"] for n in counts}
            rows.append({"scheduler": label, **speeds})
    report(
        "scheduling",
        f"Few requests, two stages, {executor} executor, tok/s",
        rows,
        file=f"scheduling-thin-{executor}-{size}",
    )


def _engine(spec: dict[str, Any]) -> dict[str, Any]:
    return run_in_process("benchmarks.scheduling", spec, VLLM_CPU_OMP_THREADS_BIND="0|1")


def _run_engine(spec: dict[str, Any]) -> None:
    """In a process of its own: one engine, every case; prints one RESULT line."""
    import time

    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory(prefix="sipipe-sizes-") as scratch:
        sizes_file = Path(scratch) / "sizes"
        os.environ[SIZES] = str(sizes_file)
        if spec["executor"] == "sipipe":
            from sipipe.engine.executor import Executor as backend
        else:
            backend = "mp"
        llm = LLM(
            spec["model"],
            pipeline_parallel_size=2,
            distributed_executor_backend=backend,
            scheduler_cls=f"benchmarks.scheduling_recorders.{spec['scheduler'].title()}Recorder",
            max_model_len=2048,
            max_num_batched_tokens=BUDGET,
            enable_prefix_caching=False,
            additional_config={"sipipe": {"microbatches": spec.get("microbatches", {})}},
            disable_log_stats=False,
        )
        engine = llm.llm_engine
        cases: dict[str, dict[str, Any]] = {}

        def run(arrivals: list[Arrival], seed: int) -> tuple[list[Any], float]:
            rng = np.random.default_rng(seed)
            sizes_file.write_text("")
            waiting = list(arrivals)
            finished = []
            began = time.time()
            while waiting or engine.has_unfinished_requests():
                while waiting and time.time() - began >= waiting[0].time:
                    _, prompt, output = waiting.pop(0)
                    ids = rng.integers(3, 400, prompt).tolist()
                    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
                    engine.add_request(f"{seed}-{len(waiting)}", {"prompt_token_ids": ids}, params)
                if engine.has_unfinished_requests():
                    finished += [out for out in engine.step() if out.finished]
                else:
                    time.sleep(max(0.0, waiting[0].time - (time.time() - began)))
            return finished, time.time() - began

        run([Arrival(0.0, 6, 8)] * 32, 0)  # warm-up
        for count in spec["counts"]:
            speeds = []
            for repeat in range(spec["repeats"]):
                arrivals = [Arrival(0.0, 6, spec["output"])] * count
                finished, seconds = run(arrivals, 1 + repeat)
                speeds.append(count * spec["output"] / seconds)
            sizes = [int(size) for size in sizes_file.read_text().split()]
            middle = sizes[len(sizes) // 2 - 2 : len(sizes) // 2 + 2]
            cases[f"{count} at once"] = _row(float(np.median(speeds)), finished, middle)
        if not spec["loads"]:
            answer({"cases": cases, "rate": 0.0})
            return
        traces = [
            [
                a._replace(prompt=min(a.prompt, 512), output=max(4, a.output // 8))
                for a in poisson_trace(spec["requests"], 4 + number)
            ]
            for number in range(spec["traces"])
        ]
        tokens = sum(a.output for trace in traces for a in trace)
        rate = spec["rate"]
        if not rate:
            rate = len(traces[0]) / run(at_rate(traces[0], float("inf")), 8)[1]
        for load in spec["loads"]:
            served: list[Any] = []
            total = 0.0
            for number, trace in enumerate(traces):
                finished, seconds = run(at_rate(trace, rate * load), 9 + number)
                served += finished
                total += seconds
            cases[f"Poisson {load:.0%}"] = _row(tokens / total, served, [])
    answer({"cases": cases, "rate": rate})


def _row(speed: float, finished: list[Any], sizes: list[int]) -> dict[str, Any]:
    ttft, tpot = [], []
    for request in finished:
        metrics = request.metrics
        ttft.append(metrics.first_token_latency)
        count = len(request.outputs[0].token_ids)
        if count > 1:
            tpot.append((metrics.last_token_ts - metrics.first_token_ts) / (count - 1))
    return {
        "tok/s": speed,
        **_latencies(np.array(ttft), np.array(tpot)),
        "sizes": " ".join(map(str, sizes)),
    }


SIZES = "SIPIPE_BENCH_SIZES"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests, depths and loads")
    parser.add_argument("--part", choices=("simulated", "served", "thin", "all"), default="all")
    parser.add_argument("--size", default="bench", help="model size of make-model")
    parser.add_argument("--executor", choices=("stock", "sipipe", "both"), default="stock")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        _run_engine(json.loads(options.engine))
        return
    if options.part in ("simulated", "all"):
        if options.quick:
            simulated(120, (0.8, float("inf")), (2, 4))
        else:
            simulated(300, LOADS, (2, 4, 8))
    if options.part == "thin":
        thin(options.quick, options.size, options.executor)
    if options.part in ("served", "all"):
        served(options.quick, options.size, options.executor)


if __name__ == "__main__":
    main()
