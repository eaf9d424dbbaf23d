"""Streaming sessions of a real engine that schedules ahead: see session_clients.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.make_model.checkpoint import make_model

CLIENTS = Path(__file__).with_name("session_clients.py")


@pytest.mark.engine
@pytest.mark.ci
def test_sessions_end_as_their_clients_are_told(tmp_path):
    """Too long, exactly full, logprobs from a later turn, and pauses amid them: each is the session's
    alone, and the engine serves on."""
    model = make_model("llama", tmp_path / "tiny")
    run = subprocess.run(
        [sys.executable, str(CLIENTS), str(model)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
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
    assert ends["alive"] == [["length", 3]]
