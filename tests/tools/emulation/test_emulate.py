"""`python -m benchmarks.emulate` as people run it."""

from __future__ import annotations

import importlib.util
import re

import pytest
from benchmarks import emulate
from tests.tools.report.made_up_trace import Example, write_example

from sipipe.cli import main
from sipipe.errors import SiPipeError
from sipipe.observe.format import Header
from sipipe.observe.phases import Phase
from sipipe.tools.report.reader import read_trace


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--profile llama-70b", "is not of the form MODEL-NxGPU"),
        ("--profile llama-70b-8xh100 --tp 2", "--tp follows from"),
        ("--profile llama-70b-8xh100 --vocabulary auto", "is shared or last"),
        ("--profile llama-70b-8xh100 --pp 4 --replay no-dir", "no-dir: no such directory"),
    ],
)
def test_a_mistake_is_one_line(options, words):
    with pytest.raises(SiPipeError, match=words) as error:
        emulate.emulated(options.split())
    assert "\n" not in str(error.value)


def test_the_steady_part_is_what_counts(tmp_path):
    write_example(tmp_path / "made", Example(stages=4, iterations=400, stock=False, inflight=5))
    trace = read_trace(str(tmp_path / "made"))
    start, end = trace.window()
    spans = [(start, end), ((start + end) // 2, end)]
    waited = {"a": [0.1], "b": [0.2]}
    result = {
        "busy": {"a": [0.25], "b": [0.5]},
        "waited": waited,
        "ttft": {"a": [[0.2, 0.6, 0.4]], "b": [[1.0]]},
        "tokens": 200,
        "spans": {"a": spans[:1], "b": spans[1:]},
    }
    loads = emulate.figures_of_loads(trace, result)
    assert (loads[1]["busy"], loads[1]["waited"]) == (0.5, 0.2)
    found = loads[0]
    assert found["busy"] == 0.25
    assert len(found["busy_share"]) == 4
    assert (found["iterations"], loads[1]["iterations"] < 300) == (400, True)
    assert list(found["cpu_ms"])[:2] == ["executor", "stage 0"]
    assert all(0 < spent < 1000 for spent in found["cpu_ms"].values())
    assert all(0.5 < share <= 1 for share in found["busy_share"])
    assert 0 < found["turnaround_ms"]["p50"] <= found["turnaround_ms"]["p99"]
    assert found["ttft_p50"] == 0.4
    prompts = emulate.figures_of_loads(trace, result | {"tokens": 1})
    assert [load["ttft_p50"] for load in prompts] == [0.4, 1.0], "nothing decodes: all of it counts"
    assert prompts[0]["iterations"] == 400
    assert all(0.5 < share <= 1 for share in prompts[0]["busy_share"])


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("profile", "stages", "vocabulary"),
    [("qwen3-4b-2xl40s", 2, "last"), ("llama-8b-8xl40s", 8, "shared")],
)
def test_a_pipeline_of_emulated_gpus(tmp_path, capfd, monkeypatch, profile, stages, vocabulary):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    trace = str(tmp_path / "trace")
    words = ["--profile", profile, "--pp", str(stages), "--vocabulary", vocabulary]
    load = ["--requests", "12", "--tokens", "40", "--prompt-tokens", "20"]
    monkeypatch.setattr("sys.argv", ["emulate", *words, *load, "--trace", trace])
    status = emulate.main()
    printed = capfd.readouterr().out
    assert status in (0, 1), "1: this machine was too busy, and the command says so"
    assert ("VOID" in printed) == (status == 1)
    assert re.search(r"iterations/s of \d+ sequences", printed)  # as many as the scheduler chose
    assert f"{stages} stages of 1" in printed
    recorded = read_trace(trace).of("stage")
    header: Header = recorded[1].header
    assert header.model
    drawn = {int(i) for i in recorded[-1].phase(Phase.LOGITS)["iteration"]}
    assert drawn
    for process in recorded[:-1]:  # where it is shared out, every stage has multiplied for the last
        multiplied = {int(i) for i in process.phase(Phase.LOGITS)["iteration"]}
        assert multiplied == (drawn if vocabulary == "shared" else set())
    assert main(["trace", "report", trace]) == 0
