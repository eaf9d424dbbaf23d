"""Values of wrong types, given to a real engine: each is its request's own fault. See odd_clients.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.make_model.checkpoint import make_model

pytestmark = [pytest.mark.engine, pytest.mark.ci]

CLIENTS = Path(__file__).with_name("odd_clients.py")
NAMES = {
    "float": "sampling_params.max_tokens",
    "int": "sampling_params.ignore_eos",
    "key": "sampling_params.extra_args",
}
"""Names of values that are not as the engine reads them."""


@pytest.mark.parametrize("door", ["async", "sync"])
def test_a_value_of_a_wrong_type_is_its_requests_own_fault(tmp_path, door):
    model = make_model("llama", tmp_path / "tiny")
    run = subprocess.run(
        [sys.executable, str(CLIENTS), str(model), "2", door],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout.splitlines()[-1])
    assert len(said["alone"]) == 24
    assert said["behind"] == said["alone"]
    for tokens in said["huge"].values():
        assert len(tokens) == 128 - 3, "up to --max-model-len"
        assert tokens[:24] == said["alone"]
    kind = "VLLMValidationError" if door == "async" else "error"
    for name, value in NAMES.items():
        error, message = said["one"][name]
        assert error == kind
        assert message.startswith("Invalid request: the engine cannot read it: Expected")
        assert value in message
    for answers in (said["one"], said["two"]):
        for name in ("numpy", "object"):
            error, message = answers[name]
            assert "is not serializable" in message, error
    if door == "async":
        check_others(said)


def check_others(said):
    """Others at the same time, and other values than a request's parameters."""
    assert said["beside"] == [said["alone"]] * 3
    assert said["left"] == 0
    error, message = said["priority"]
    assert error == "VLLMValidationError"
    assert "priority" in message
    error, message = said["adapter"]
    assert error == "VLLMValidationError"
    assert message.startswith('Invalid request: LoRA adapter "a" cannot be loaded: ')
    assert "/nowhere" in message
    assert "has the id 2147483648" in said["large id"][1]
    assert "request_id must be a string" in said["number"][1]
    assert "the result of the call cannot be sent" in said["call"]
