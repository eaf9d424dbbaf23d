"""First starts of model families that nobody has verified: one is right in stages, one is not."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from tests.engine.engines import Engine, assert_stock, engine_environment, greedy, model, prompts
from tests.engine.engines import shared as settings
from tests.engine.self_test import stand_ins
from tests.ipc.link.conftest import free_port

from sipipe import private

pytestmark = [pytest.mark.engine, pytest.mark.ci]

PATIENT = {"start_timeout": 1200}
"""The process with all layers has a quarter of it, also where the machine has other work."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    return stand_ins.install(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def environment(packages, tmp_path_factory):
    """Environment of processes that know the families, and keep nothing where others look."""
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    cache = tmp_path_factory.mktemp("cache")
    kernels = private.cache_base() / "kernels"
    if kernels.is_dir():  # which take a minute to compile
        shutil.copytree(kernels, cache / "sipipe" / "kernels")
    return {"PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)}


def checkpoint(models, architecture):
    path = models / architecture
    return path if path.exists() else stand_ins.make(path, model(models), architecture)


def test_a_right_family_is_compared_once(models, environment, tmp_path):
    path = checkpoint(models, stand_ins.RIGHT)
    batch = {"prompts": prompts(6, seed=3), "params": greedy(6)}
    logs = []
    for start in range(2):
        log = tmp_path / f"log{start}"
        with Engine(path, env=environment, log=log, **settings(2, **PATIENT)) as engine:
            found = engine.run([batch])
            # What the self-test asked is nothing to who comes after it.
            assert_stock(found, model(models), [batch])
        logs.append(log.read_text())
    assert f"Self-test of {stand_ins.RIGHT}: 2 stages answer as one stage does" in logs[0]
    assert f"Self-test of {stand_ins.RIGHT}: it has passed at an earlier start" in logs[1]


def test_scores_that_depend_on_batch_and_ranks_are_no_fault_of_stages(
    models, environment, tmp_path
):
    """As those of vLLM's MLA on CPUs do."""
    path = checkpoint(models, stand_ins.BATCHED)
    log = tmp_path / "log"
    asked = settings(2, 2, vocabulary="last", **PATIENT)
    with Engine(path, env=environment, log=log, **asked) as engine:
        engine.run([{"prompts": prompts(2, seed=3), "params": greedy(2)}])
    assert f"Self-test of {stand_ins.BATCHED}: 2 stages answer as one stage does" in log.read_text()


COMMANDS = {
    "sipipe": ["-m", "sipipe", "serve", "--pp", "2"],
    "vllm": [
        *("-m", "vllm.entrypoints.cli.main", "serve", "-pp", "2"),
        *("--distributed-executor-backend", "sipipe.Executor"),
    ],
}

STATUS = {"sipipe": 2, "vllm": 1}
"""Exit status of a start that another try does not mend; vLLM's command has one for all."""


@pytest.mark.parametrize("door", ["sipipe", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_family_that_is_wrong_in_stages_does_not_start(models, environment, door):
    path = checkpoint(models, stand_ins.WRONG)
    command = [sys.executable, *COMMANDS[door], str(path), "--max-model-len", "256"]
    command += ["--additional-config", json.dumps({"sipipe": PATIENT})]
    ended = subprocess.run(
        [*command, "--enforce-eager", "--port", str(free_port())],
        env=engine_environment() | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert ended.returncode == STATUS[door], ended.stdout[-5000:]
    assert "Traceback" not in ended.stdout
    last = ended.stdout.splitlines()[-1]
    assert f"{stand_ins.WRONG}: with 2 stages its answers are not those of one stage" in last
    assert "serve it with --pipeline-parallel-size 1" in last


@pytest.mark.slow
def test_the_library_raises_and_the_setting_is_obeyed(models, environment, tmp_path):
    path = checkpoint(models, stand_ins.WRONG)
    log = tmp_path / "log"
    with (
        pytest.raises(pytest.fail.Exception),
        Engine(path, env=environment, log=log, **settings(2, **PATIENT)) as engine,
    ):
        engine.run([])
    assert "the engine cannot start: ForgetfulForCausalLM: with 2 stages" in log.read_text()
    with Engine(path, env=environment, log=log, **settings(2, self_test="off")) as engine:
        engine.run([])
    assert "elf-test" not in log.read_text()
