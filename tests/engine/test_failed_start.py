"""An engine that cannot start says one cause, by each way to start it."""

import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file
from tests.engine.engines import Engine, engine_environment, model, shared
from tests.ipc.link.conftest import free_port

pytestmark = pytest.mark.engine

CAUSE = "Attempted to load weight"


@pytest.fixture(scope="module")
def damaged(models):
    """A checkpoint with a weight of another model: a file that is not whole is found before."""
    path = models / "damaged"
    shutil.copytree(model(models), path)
    [file] = path.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"][::2].clone()
    save_file(weights, file)
    return path


COMMANDS = {
    "sipipe": ["-m", "sipipe", "serve", "--pp", "2"],
    "vllm": [
        *("-m", "vllm.entrypoints.cli.main", "serve", "-pp", "2"),
        *("--distributed-executor-backend", "sipipe.Executor"),
    ],
}


@pytest.mark.ci
@pytest.mark.parametrize("door", ["sipipe", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_command_says_it_without_a_traceback(damaged, door):
    command = [sys.executable, *COMMANDS[door], str(damaged), "--max-model-len", "256"]
    environment = engine_environment()
    del environment["VLLM_CPU_KVCACHE_SPACE"]  # what is free is divided, by this door too
    ended = subprocess.run(
        [*command, "--enforce-eager", "--port", str(free_port())],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    lines = ended.stdout.splitlines()
    assert ended.returncode == 1
    assert "Traceback" not in ended.stdout
    # vLLM 0.33 calls it an error that a CPU has no Triton kernels.
    told = [line if "Triton" not in line else "" for line in lines]
    said = [number for number, line in enumerate(told) if "ERROR" in line]
    assert CAUSE in lines[said[0]], "the worker, with the file and line where it was found"
    assert len(lines) - said[0] < 30
    assert lines[-1].startswith("sipipe: ")
    if door == "sipipe":
        assert CAUSE in lines[-1]


@pytest.mark.slow
def test_the_library_raises(damaged, tmp_path):
    log = tmp_path / "log"
    with pytest.raises(pytest.fail.Exception), Engine(damaged, log=log, **shared(2)) as engine:
        engine.run([])
    said = log.read_text()
    assert said.count("Traceback") == 1, "the user's own"
    assert f"the engine cannot start: {CAUSE}" in said
