"""Input preparation of a stage: SiPipe's stage runner beside vLLM's, in one process.

    python -m benchmarks.stage [--quick] [--served]

Three tables:

* time of input preparation per microbatch, under two alternating microbatches as a pipeline has
  them, in steady decode, with one sequence joining and one leaving, and with 10 % of them; beside
  ``_update_states`` + ``_prepare_inputs`` of vLLM's first model runner on the same scheduling
  outputs; with the counts of sequences removed and inserted by either;
* preparation while another thread runs forward passes of a real (tiny) model: what it waits for
  the GIL and for a core;
* the two threads with a device that takes 20 ms and a preparation of 3 ms (and of 30 ms).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness import report
from benchmarks.stage_recorders import (
    SLOTS,
    Counting,
    SleepingStage,
    TimedStage,
    TwoThreads,
    Workload,
    finish_all,
    iterations,
    load_worker,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer iterations")
    args = parser.parse_args()
    quick = args.quick
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="sipipe-bench-") as directory:
        worker = load_worker(directory)
        compare_preparation(worker, quick)
        measure_overlap(worker, quick)
    measure_threads(quick)


# ---- table 1 ------------------------------------------------------------------------------------


def compare_preparation(worker: Any, quick: bool) -> None:
    """Both sides on the same scheduling outputs."""
    count = 40 if quick else 200
    rows = []
    for batch in (16, 128, 512):
        for name, churn in (("steady", 0), ("1 joins, 1 leaves", 1), ("10 % churn", batch // 10)):
            stock = time_stock(worker, Workload(batch, churn), count)
            ours = time_ours(worker, Workload(batch, churn), count)
            rows.append(
                {
                    "B": batch,
                    "case": name,
                    "vLLM state ms": stock["update"],
                    "vLLM inputs ms": stock["prepare"],
                    "vLLM moved": stock["moved"],
                    "SiPipe ms": ours["inputs"],
                    "SiPipe moved": ours["moved"],
                    "ratio": (stock["update"] + stock["prepare"]) / ours["inputs"],
                    "SiPipe with attn metadata ms": ours["all"],
                }
            )
    report(
        "stage",
        "Input preparation per microbatch, two alternating microbatches (medians)",
        rows,
        note="vLLM: _update_states, _prepare_inputs of the first model runner on a stage that is "
        "not the last; neither side's figures hold attention metadata, but the last column's do. "
        "moved: sequences removed or added per iteration.",
    )


def time_stock(worker: Any, workload: Workload, count: int) -> dict[str, float]:
    """vLLM's first model runner, as one stage of several."""
    import torch
    from vllm.distributed import parallel_state

    runner = worker.model_runner
    batch = runner.input_batch
    moved = Counting(batch, add_request=None, remove_request=batch.req_id_to_index)
    update, prepare, moves = [], [], []
    whole, parallel_state._PP = (
        parallel_state._PP,
        SimpleNamespace(is_first_rank=True, is_last_rank=False, world_size=2, rank_in_group=0),
    )
    try:
        with torch.inference_mode(), moved:
            for output in iterations(workload, count):
                before = moved.count
                began = time.perf_counter()
                runner._update_states(output)
                between = time.perf_counter()
                amounts = np.array(
                    [output.num_scheduled_tokens[r] for r in runner.input_batch.req_ids], np.int32
                )
                runner._prepare_inputs(output, amounts)
                prepare.append(time.perf_counter() - between)
                update.append(between - began)
                moves.append(moved.count - before)
            finish_all(runner._update_states, workload)
    finally:
        parallel_state._PP = whole
    return {
        "update": median_ms(update),
        "prepare": median_ms(prepare),
        "moved": float(np.median(moves[2 * SLOTS :])),
    }


def time_ours(worker: Any, workload: Workload, count: int) -> dict[str, float]:
    """SiPipe's stage runner; the attention metadata are timed apart, as vLLM's are."""
    import torch

    from sipipe.worker.runner import StageRunner

    runner = StageRunner(worker.model_runner, slots=SLOTS)
    moved = Counting(runner.preparer.states, add=None, remove=runner.preparer.states.index)
    inputs, everything, moves = [], [], []
    with torch.inference_mode(), moved:
        for number, output in enumerate(iterations(workload, count)):
            before = moved.count
            began = time.perf_counter()
            prepared = runner.prepare(output, number % SLOTS, number % 2, number)
            between = time.perf_counter()
            runner.attention.build(prepared)  # the device thread's part
            everything.append(time.perf_counter() - began)
            inputs.append(between - began)
            moves.append(moved.count - before)
    return {
        "inputs": median_ms(inputs),
        "all": median_ms(everything),
        "moved": float(np.median(moves[2 * SLOTS :])),
    }


def median_ms(seconds: list[float]) -> float:
    """Of all but the iterations that filled the microbatches."""
    return 1e3 * float(np.median(seconds[2 * SLOTS :]))


# ---- table 2 ------------------------------------------------------------------------------------


def measure_overlap(worker: Any, quick: bool) -> None:
    """Preparation while forward passes run beside it, against preparation alone."""
    from sipipe.worker.runner import StageRunner

    rows = []
    for name, sets in (("in turn", 1), ("overlapped", 2)):
        stage = TimedStage(StageRunner(worker.model_runner, slots=SLOTS, sets=sets))
        workload = Workload(128, 0)
        outputs = list(iterations(workload, 60 if quick else 300))
        with TwoThreads(stage, sets) as buffer:
            for number, output in enumerate(outputs):
                if number == 2 * SLOTS:
                    buffer.drain()
                    began = time.perf_counter()
                buffer.prepare(number, number % SLOTS, output)
            buffer.drain()
            took = time.perf_counter() - began
        waits = np.array(stage.wall) - np.array(stage.cpu)
        rows.append(
            {
                "B 128, steady": name,
                "prepare ms": median_ms(stage.wall),
                "of it CPU ms": median_ms(stage.cpu),
                "of it waiting (GIL, core) ms": median_ms(waits.tolist()),
                "waiting p99 ms": 1e3 * float(np.percentile(waits[2 * SLOTS :], 99)),
                "forward ms": median_ms(stage.forwards),
                "iteration ms": 1e3 * took / (len(outputs) - 2 * SLOTS),
            }
        )
    report(
        "stage",
        "Preparation beside forward passes of a tiny model (4 layers, hidden 128, float32)",
        rows,
        note="waiting = wall time - the thread's CPU time",
        file="stage-overlap",
    )


# ---- table 3 ------------------------------------------------------------------------------------


def measure_threads(quick: bool) -> None:
    """The double buffer's own cost: iteration time against the longer of the two parts."""
    rows = []
    for prepare, forward, sets in ((3, 20, 2), (3, 20, 1), (30, 20, 2)):
        stage = SleepingStage(prepare / 1e3, forward / 1e3)
        with TwoThreads(stage, sets) as buffer:
            for number in range(20 if quick else 100):
                buffer.prepare(number, 0, None)
            buffer.drain()
        gaps = 1e3 * np.diff(stage.ends)[3:]
        rows.append(
            {
                "prepare ms": prepare,
                "device ms": forward,
                "sets of input buffers": sets,
                "iteration ms": float(np.median(gaps)),
                "p95 ms": float(np.percentile(gaps, 95)),
            }
        )
    report(
        "stage",
        "Preparing thread and device thread, a device that sleeps",
        rows,
        file="stage-executors",
    )


if __name__ == "__main__":
    main()
