"""Streaming sessions of a real engine that schedules ahead: see session_clients.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.make_model.checkpoint import make_model
from tests.engine.test_features import make_adapter

CLIENTS = Path(__file__).with_name("session_clients.py")


@pytest.mark.engine
@pytest.mark.ci
@pytest.mark.parametrize("stages", [1, 2])
def test_sessions_end_as_their_clients_are_told(tmp_path, stages):
    """Too long, exactly full, refused in a later turn, paused, reset, silent while others need their
    blocks, aborted: each is the session's alone, and the engine serves on. So are requests that only
    an assertion would have met."""
    model = make_model("llama", tmp_path / "tiny")
    adapter = make_adapter(tmp_path / "adapter", json.loads((model / "config.json").read_text()))
    run = subprocess.run(
        [sys.executable, str(CLIENTS), str(model), str(stages), str(adapter)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=os.environ | {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    ends = json.loads(run.stdout.splitlines()[-1])
    assert ends["turns"] == [["length", 3], ["length", 4]]
    assert ends["too long"] == [["length", 3], ["length", 0], ["length", 4]]
    assert ends["exactly full"] == [["length", 3], ["length", 0]]
    assert ends["one left"] == [["length", 3], ["length", 1]]
    assert ends["logprobs"] == [["length", 3], ["length", 4]]
    assert ends["logprobs later"][0] == ["length", 3]
    error, message = ends["logprobs later"][1]
    assert error == "VLLMValidationError"
    assert message.startswith("logprobs of a session is that of its first turn (None)")
    assert all(turns[-1][0] == "abort" for turns in ends["paused"])
    check_refused(ends)
    check_texts(ends)
    alone, others = ends["silent"]
    assert alone == "length"
    assert others == [["length", "length"]] * 11
    for _, last, left in ends["aborted"]:
        assert (last, left) == ("abort", 0)
    assert ends["alive"] == [["length", 3]]


def check_refused(ends):
    """Each by one line to its own client."""
    error, message = ends["grammar"][-1]
    assert error == "VLLMValidationError"
    assert "structured outputs are not for sessions" in message
    error, message = ends["prompt"][-1]
    assert error == "VLLMValidationError"
    assert "prompt_logprobs are not for sessions" in message
    *refused, right = ends["ready"]
    assert all(end.startswith("VLLMValidationError: ") for end in refused), refused
    assert right == "length"
    first, second, third = ends["twice"]
    assert first == third == "length"
    assert "is in use" in second


def check_texts(ends):
    """A session says what a request of the whole text is answered."""
    for amid, (turns, plain) in ends["texts"].items():
        assert turns == plain, amid
    for turns, plain in ends["adapter"]:
        assert turns == plain
        assert turns != ends["texts"][""][0], "the adapter makes a difference"
