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


class Group:
    """A pipeline group of the second of two stages, whose handles complete when waited for."""

    world_size, rank_in_group, is_last_rank, is_first_rank = 2, 1, True, False

    def irecv_tensor_dict(self, **kwargs):
        return {"hidden": 1}, [Handle()], []

    def isend_tensor_dict(self, tensors, **kwargs):
        return [Handle(), Handle()]


class Handle:
    def __init__(self):
        self.waited = 0

    def wait(self):
        self.waited += 1

    def is_completed(self):
        return True


class Model:
    def compute_logits(self, hidden):
        return hidden + 1


class Runner:
    """The order of calls of vLLM's first runner."""

    def __init__(self):
        self.model = Model()

    def get_model(self):
        return self.model

    def execute_model(self, output, tensors):
        return self.model.compute_logits(self._model_forward(x=tensors))

    def _model_forward(self, *, x):
        return x * 2


class Keep:
    enabled = True

    def __init__(self):
        self.rows = []
        self.closed = False

    def record(self, phase, iteration, slot, start, end, batch=0, tokens=0):
        assert start <= end
        self.rows.append((Phase(phase), iteration, slot, batch, tokens))

    def close(self):
        self.closed = True


class Output:
    def __init__(self, tokens, number=None):
        self.total_num_scheduled_tokens = tokens
        self.num_scheduled_tokens = {"a": tokens}
        if number is not None:
            self.sipipe_iteration = number


@pytest.fixture
def worker(monkeypatch):
    """A recorded worker with stand-ins for vLLM's worker, runner and group."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from benchmarks import stock_trace as trace_stock

    group = Group()
    monkeypatch.setattr(trace_stock, "get_pp_group", lambda: group)
    base = trace_stock.TracedWorker.__mro__[1]

    def execute(self, output):
        if output.total_num_scheduled_tokens:
            tensors, handles, _ = group.irecv_tensor_dict()
            handles[0].wait()
            assert handles[0].is_completed()
            self.model_runner.execute_model(output, 20)
            for handle in group.isend_tensor_dict(tensors)[1:]:
                handle.wait()

    monkeypatch.setattr(base, "execute_model", execute)
    monkeypatch.setattr(base, "sample_tokens", lambda self, grammar: "tokens")
    monkeypatch.setattr(base, "shutdown", lambda self: None)
    made = object.__new__(trace_stock.TracedWorker)
    made.model_runner = Runner()
    made.sipipe_recorder = Keep()
    made.vllm_config = type("Config", (), {"max_concurrent_batches": 2})()
    made._sipipe_wrap()
    return made


ORDER = [
    Phase.WAIT_SCHEDULING, Phase.WAIT_HIDDEN, Phase.WAIT_HIDDEN, Phase.PREPARE, Phase.FORWARD,
    Phase.LOGITS, Phase.SEND, Phase.SEND, Phase.SAMPLE,
]  # fmt: skip


def test_worker_records_what_the_runner_does(worker):
    for number in (0, 7):
        worker.execute_model(Output(5, number))
        assert worker.sample_tokens(None) == "tokens"
    worker.execute_model(Output(0))  # nothing to run: not an iteration
    assert worker.sample_tokens(None) == "tokens"
    rows = worker.sipipe_recorder.rows
    assert [row[0] for row in rows] == ORDER * 2
    assert {row[1:3] for row in rows} == {(0, 0), (7, 1)}
    assert {row[3:] for row in rows} == {(1, 5)}
    worker.shutdown()
    assert worker.sipipe_recorder.closed


def test_worker_counts_where_the_scheduler_does_not_number(worker):
    for _ in range(3):
        worker.execute_model(Output(1))
        worker.sample_tokens(None)
    assert sorted({row[1] for row in worker.sipipe_recorder.rows}) == [0, 1, 2]


def test_scheduler_without_a_directory_is_one_line():
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from benchmarks.stock_trace import _open

    from sipipe.errors import ConfigError

    config = type("Config", (), {"additional_config": {}})()
    with pytest.raises(ConfigError, match="additional-config") as caught:
        _open(config, "executor")
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    base = tmp_path_factory.mktemp("stock")
    model, program, directory = base / "model", base / "program.py", base / "trace"
    make_model("llama", model)
    program.write_text(PROGRAM)
    cores = sorted(os.sched_getaffinity(0))
    bind = f"{cores[0]}|{cores[-1]}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(model), str(directory)],
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
    return directory, json.loads(line)


@pytest.mark.slow
@pytest.mark.engine
def test_trace_of_stock_is_complete_and_adds_up(recorded):
    directory, said = recorded
    trace = read_trace(directory)
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
            assert (process.phase(phase)["iteration"] == scheduled).all(), phase
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
    for stage in run.account.stages:
        assert sum(stage.by_kind) == run.account.wall_ns
    # The window is the call of generate(), but for what comes before the first step.
    assert run.account.wall_ns / 1e9 <= said["took"] * 1.01
    summary = run.summary
    assert summary["tokens"] == said["tokens"]
    assert summary["share"]["busy"] > 0
