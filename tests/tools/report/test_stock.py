"""Stock vLLM, recorded: an engine of two stages runs, and its trace is complete and adds up."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.make_model.checkpoint import make_model

from sipipe.observe.phases import Phase
from sipipe.tools.report.reader import read_trace
from sipipe.tools.report.summary import Run

PROGRAM = """
import json, sys, time
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, directory = sys.argv[1:]
    llm = LLM(
        model=model, pipeline_parallel_size=2, max_model_len=256, max_num_seqs=16,
        worker_cls="benchmarks.stock_trace.TracedWorker",
        scheduler_cls="benchmarks.stock_trace.TracedScheduler",
        additional_config={"sipipe": {"trace": directory}},
    )
    began = time.perf_counter()
    outputs = llm.generate(
        [f"prompt number {i}" for i in range(16)],
        SamplingParams(max_tokens=40, temperature=0.8, ignore_eos=True, seed=1),
    )
    took = time.perf_counter() - began
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    print(json.dumps({"took": took, "tokens": tokens}), flush=True)
"""


def record(base: Path) -> dict:
    """The trace is under ``base``; what the program says of its run."""
    model, program = base / "model", base / "program.py"
    make_model("llama", model)
    program.write_text(PROGRAM)
    cores = sorted(os.sched_getaffinity(0))
    bind = f"{cores[0]}|{cores[-1]}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(model), str(base / "trace")],
        env={
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": bind,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(line)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_trace_of_stock_is_complete_and_adds_up(tmp_path):
    said = record(tmp_path)
    trace = read_trace(tmp_path / "trace")
    assert trace.warnings == ()
    assert trace.label == "stock vLLM"
    assert trace.stages == 2
    executor, (first, last) = trace.executor, trace.of("stage")
    assert executor is not None
    scheduled = executor.phase(Phase.SCHEDULE)["iteration"]
    assert (scheduled == np.arange(len(scheduled))).all()
    assert executor.phase(Phase.GATHER)["tokens"].sum() == said["tokens"]
    for process, phases in (
        (first, (Phase.WAIT_SCHEDULING, Phase.PREPARE, Phase.FORWARD, Phase.SEND)),
        (last, (Phase.WAIT_SCHEDULING, Phase.PREPARE, Phase.WAIT_HIDDEN, Phase.FORWARD,
                Phase.LOGITS, Phase.SAMPLE)),
    ):  # fmt: skip
        for phase in phases:
            # By gloo, where CPUs have no AVX-512, hidden states are several sends.
            assert (np.unique(process.phase(phase)["iteration"]) == scheduled).all(), phase
    for process in trace.processes:
        assert (process.records["end_ns"] >= process.records["start_ns"]).all()
    # The order of an iteration's phases, across processes: clocks and numbers agree.
    assert len(executor.phase(Phase.IDLE))
    dispatched = executor.phase(Phase.DISPATCH)["end_ns"]
    gathered = executor.phase(Phase.GATHER)["end_ns"]
    assert (dispatched <= first.phase(Phase.PREPARE)["start_ns"]).all()
    assert (first.phase(Phase.FORWARD)["end_ns"] <= last.phase(Phase.FORWARD)["start_ns"]).all()
    assert (last.phase(Phase.SAMPLE)["end_ns"] <= gathered).all()

    run = Run(trace)
    for stage in run.account:
        assert sum(stage.by_kind) == run.wall_ns
    # The window is the call of generate(), but for what comes before the first step.
    assert run.wall_ns / 1e9 <= said["took"] * 1.01
    summary = run.summary
    assert summary["tokens"] == said["tokens"]
    assert summary["share"]["busy"] > 0
