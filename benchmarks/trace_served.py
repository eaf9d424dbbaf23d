"""Tracing a real engine: what it costs, and whether a stage's parts add up to the wall time.

    python -m benchmarks.trace_served [--quick]      # make bench-trace-served

The benchmark model in two CPU stages through SiPipe, 64 greedy requests at once, in engines with and
without ``"trace"`` in turns. The wall time of a round is the client's: from before the requests are
sent to after the last token. Beside it stand the parts of the same span, as the traces tell them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness import of_the_checkout, report
from benchmarks.make_model.checkpoint import make_model
from sipipe.tools.child import answer, measured
from sipipe.tools.report.accounting import KIND_OF, KINDS
from sipipe.tools.report.reader import read_trace
from sipipe.tools.report.summary import Run

MODULE = "benchmarks.trace_served"
MODELS = Path("build/models")
REQUESTS, TOKENS, STAGES = 64, 64, 2


def engine(model: str, trace: str | None, rounds: int) -> dict[str, Any]:
    """One engine in a process of its own: the span of each round, ns of the monotonic clock, and
    the CPU seconds that all its processes took meanwhile."""
    job = {"model": model, "trace": trace, "rounds": rounds}
    return measured("traced" if trace else "untraced", job, of_the_checkout(MODULE))


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """In that process."""
    from vllm import LLM, SamplingParams

    import sipipe

    llm = LLM(
        job["model"],
        pipeline_parallel_size=STAGES,
        distributed_executor_backend=sipipe.Executor,
        max_model_len=2048,
        enable_prefix_caching=False,
        # As many microbatches in every engine: how many pay is measured anew by each, and two
        # that chose differently would not be told from two that are traced and not.
        additional_config={"sipipe": {"trace": job["trace"], "microbatches": {"min_sequences": 1}}},
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    spans, cpu = [], []
    for number in range(1 + job["rounds"]):
        prompts: Any = [
            {"prompt_token_ids": rng.integers(3, 400, 16).tolist()} for _ in range(REQUESTS)
        ]
        before = cpu_seconds()
        began = time.monotonic_ns()
        llm.generate(prompts, params, use_tqdm=False)
        if number:  # the first warms up
            spans.append((began, time.monotonic_ns()))
            cpu.append(cpu_seconds() - before)
    return {"spans": spans, "cpu": cpu}


def cpu_seconds() -> float:
    """CPU seconds so far of this process and all that it started."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def parts(traces: Path, spans: list[tuple[int, int]]) -> list[dict[str, object]]:
    """Each stage over all rounds: kinds of time as shares of the client's wall time, and their sum."""
    wall = sum(end - began for began, end in spans)
    rows: list[dict[str, object]] = []
    for stage in Run(read_trace(traces)).account:
        spent = np.zeros(len(KINDS))
        for began, end in spans:
            inside = np.minimum(stage.segments["end_ns"], end) - np.maximum(
                stage.segments["start_ns"], began
            )
            kinds = KIND_OF[stage.segments["cause"]]
            spent += np.bincount(kinds, np.maximum(inside, 0), minlength=len(KINDS))
        rows.append(
            {
                "stage": f"{stage.index}",
                **{f"{kind} %": 100 * part / wall for kind, part in zip(KINDS, spent, strict=True)},
                "sum / wall": spent.sum() / wall,
            }
        )
    return rows


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one engine a side, fewer rounds")
    options = parser.parse_args()
    model = str(make_model("llama", MODELS / "llama-bench", size="bench"))
    turns, rounds = (1, 3) if options.quick else (3, 5)
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    cpu: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory(prefix="sipipe-bench-trace-") as scratch:
        for turn in range(turns):
            for side in ("off", "on") if turn % 2 == 0 else ("on", "off"):
                traces = str(Path(scratch) / f"{turn}") if side == "on" else None
                result = engine(model, traces, rounds)
                seconds[side] += [(end - began) / 1e9 for began, end in result["spans"]]
                cpu[side] += result["cpu"]
                if traces:
                    rows = parts(Path(traces), result["spans"])
    base, base_cpu = statistics.median(seconds["off"]), statistics.median(cpu["off"])
    report(
        "trace-served",
        "A round with and without tracing",
        [
            {
                "trace": side,
                "rounds": len(times),
                "median s": statistics.median(times),
                "fastest s": min(times),
                "slowest s": max(times),
                "tok/s": REQUESTS * TOKENS / statistics.median(times),
                "cost %": 100 * (statistics.median(times) / base - 1),
                "CPU s a round": statistics.median(cpu[side]),
                "CPU cost %": 100 * (statistics.median(cpu[side]) / base_cpu - 1),
            }
            for side, times in seconds.items()
        ],
        note=f"{REQUESTS} requests of {TOKENS} tokens; {turns} engine(s) a side, in turns",
    )
    report(
        "trace-served",
        "Parts of the wall time, by stage",
        rows,
        note="shares of the client's wall time over the rounds of the last engine",
        file="trace-served-parts",
    )


if __name__ == "__main__":
    if "".join(sys.argv[1:]).isdigit():  # the socket of the process that measures
        answer(run_engine)
    else:
        main()
