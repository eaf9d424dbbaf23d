"""An engine that fails before SiPipe's executor runs in it."""

import multiprocessing

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.engine import core

from sipipe.engine.start import ends
from sipipe.ipc.last_word import last_word


def test_what_fails_before_the_executor_is_one_line_and_the_cause(
    monkeypatch, capfd, own_last_word
):
    def fail(*_args, **_kwargs):
        raise ValueError("the scheduler\ncannot be made")

    monkeypatch.setattr(core.EngineCoreProc, "__init__", fail)
    monkeypatch.setattr(ends, "_run_engine_core", lambda: core.EngineCoreProc())
    process = multiprocessing.get_context("fork").Process(
        target=ends.run_engine, name="EngineCore_DP0"
    )
    process.start()
    process.join(60)
    assert process.exitcode == 1
    assert last_word() == "the scheduler cannot be made"
    assert "Traceback" not in capfd.readouterr().err
