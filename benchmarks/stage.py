"""What a stage's device thread does on the host in an iteration, and what the preparing thread does.

    python -m benchmarks.stage [--quick] [--profile]

Two tables:

* the host time of launching an iteration (``execute_model`` and ``sample_tokens`` of vLLM's second
  runner; and the whole launch, with what is SiPipe's around them) when vLLM prepares inputs and when
  SiPipe does, on the same scheduling outputs, on stages of one, two and four: where the model reads
  the prepared set (CPUs), and where it is copied (GPUs; here from host to host memory). Beside it
  SiPipe's preparation, which runs ahead in the preparing thread, and the whole launch without the
  publisher's thread. CPU time of the thread that does it. There is no model, no link, and vLLM's
  kernels do nothing: what is left is Python;
* the two threads with a device that takes 20 ms and a preparation of 3 ms (and of 30 ms).

``--profile`` says where the device thread's time goes with SiPipe's preparation, instead.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from benchmarks.harness import report
from benchmarks.stage_recorders import (
    SLOTS,
    NoPublisher,
    SleepingStage,
    Timed,
    TwoThreads,
    Workload,
    iterations,
    open_stage,
)
from sipipe.messages.header import Header, Kind
from sipipe.worker.inputs.buffers import PackedInputBuffers
from sipipe.worker.inputs.placement import Copied, InPlace
from sipipe.worker.publisher import Publisher

STAGES = {
    "first": (0, 2),
    "last": (1, 2),
    "only": (0, 1),
    "first of 4": (0, 4),
    "third of 4": (2, 4),
    "last of 4": (3, 4),
}
"""Which stage it is, and of how many."""
ALONE = "SiPipe prepares, alone"
SIDES = ("vLLM prepares", "SiPipe prepares, copied", "SiPipe prepares", ALONE)
"""In this order: a set that is read in place takes the place of vLLM's block tables for good."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer iterations")
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        measure_launching(args.stage, 60 if args.quick else 200, args.profile)
        return
    compare_launching(sys.argv[1:])
    if not args.profile:
        measure_threads(args.quick)


# ---- table 1 ------------------------------------------------------------------------------------


def compare_launching(options: list[str]) -> None:
    """A process for each stage: vLLM keeps which one it is for a process's life."""
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    rows: list[dict[str, Any]] = []
    for stage in STAGES:
        command = [sys.executable, "-m", "benchmarks.stage", "--stage", stage, *options]
        said = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        if "--profile" in options:
            print(said.stdout)
            continue
        rows += msgspec.json.decode(said.stdout.splitlines()[-1])
    if rows:
        report(
            "stage",
            "Host time of an iteration on a stage's device thread",
            rows,
            note="two alternating microbatches that decode; lower tenths of thread CPU time; first and "
            "last: of two stages; without a model, kernels or links; preparation ahead is the "
            "preparing thread's; alone: without the publisher's thread",
        )


def measure_launching(stage: str, count: int, profile: bool) -> None:
    """One stage; prints rows, or profiles."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="sipipe-bench-") as directory:
        opened, runner = open_stage(directory, *STAGES[stage])
        # vLLM first: SiPipe's stand in their places from then on.
        times = {}
        for side in SIDES:
            name = "sipipe.worker.sampled_stage.why_vllm_prepares"
            why = "asked" if side == SIDES[0] else ""
            publisher = NoPublisher if side == ALONE else Publisher
            place = Copied if side == SIDES[1] else InPlace
            if side == SIDES[1]:  # as on a GPU, with the host's memory on both sides
                real = runner.runner
                sizes = real.max_num_reqs, real.max_num_tokens, SLOTS * 128
                real.input_buffers = PackedInputBuffers(*sizes, real.device)
            # As a stage is opened once: what the side before has put around it is taken off.
            vars(runner.runner.model_state).pop("prepare_attn", None)
            with (
                patch(name, return_value=why),
                patch("sipipe.worker.hooks.preparation.placement_of", place),
                patch("sipipe.worker.sampled_stage.Publisher", publisher),
            ):
                running = opened()
            for batch in (1, 32, 128):
                workload = Workload(batch, 0)
                if profile and side == SIDES[2]:
                    show(running, runner, workload, count, f"{stage} stage, B {batch}")
                else:
                    times[side, batch] = launching(running, runner, workload, count)
            running.close()
        if profile:
            return
    for batch in (1, 32, 128):
        (_, *theirs), (_, *copied), (ahead, *ours), (_, *alone) = (
            times[side, batch] for side in SIDES
        )
        rows.append(
            {
                "stage": stage,
                "B": batch,
                "vLLM prepares us": theirs[1],
                "SiPipe prepares us": ours[1],
                "ratio": ours[1] / theirs[1],
                "copied us": copied[1],
                "copied, ratio": copied[1] / theirs[1],
                "whole launch, vLLM us": theirs[0],
                "whole launch, SiPipe us": ours[0],
                "whole launch, alone us": alone[0],
                "SiPipe's, ahead us": ahead,
            }
        )
    print(msgspec.json.encode(rows).decode())


def launching(
    stage: Any, runner: Timed, workload: Workload, count: int, around: Any = None
) -> list[float]:
    """Microseconds of an iteration: of preparing and launching it, and of the runner's part."""
    import torch

    times = []
    with torch.inference_mode():
        for number, output in enumerate(iterations(workload, count)):
            began = time.thread_time_ns()
            samples = len(output.num_scheduled_tokens)
            header = Header(Kind.SCHEDULE, number % SLOTS, number, 0, samples)
            inputs = stage.prepare(header, number % 2, output)
            prepared, runner.nanoseconds = time.thread_time_ns(), 0
            if around is not None and number >= 2 * SLOTS:
                around.runcall(stage.run, inputs)
            else:
                stage.run(inputs)
            launched = time.thread_time_ns() - prepared
            times.append((prepared - began, launched, runner.nanoseconds))
        last = Header(Kind.SCHEDULE, 0, count)
        stage.run(stage.prepare(last, count % 2, workload.end()))
    steady = np.array(times[2 * SLOTS :])
    return (np.quantile(steady, 0.1, 0) / 1e3).tolist()  # type: ignore[no-any-return]


def show(stage: Any, runner: Timed, workload: Workload, count: int, title: str) -> None:
    profile = cProfile.Profile()
    launching(stage, runner, workload, count, profile)
    print(title)
    pstats.Stats(profile, stream=sys.stdout).sort_stats("cumtime").print_stats(40)


# ---- table 2 ------------------------------------------------------------------------------------


def measure_threads(quick: bool) -> None:
    """The double buffer's own cost: iteration time against the longer of the two parts."""
    rows = []
    for prepare, forward, sets in ((3, 20, 2), (3, 20, 1), (30, 20, 2)):
        stage = SleepingStage(prepare / 1e3, forward / 1e3)
        with TwoThreads(stage, sets) as buffer:
            for number in range(20 if quick else 100):
                buffer.prepare(Header(Kind.SCHEDULE, 0, number), None)
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
