"""What happens when something dies or is wrong: one clear line, nothing lost, nothing left."""

import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file
from tests.asleep import restless
from tests.engine.engines import (
    SHARED_OUT,
    Engine,
    assert_stock,
    gone,
    greedy,
    in_shared_memory,
    in_shared_memory_of,
    kill,
    model,
    prompts,
    tokens,
)
from tests.engine.servers import wait_until

pytestmark = pytest.mark.engine

TWO_STAGES = {"pipeline_parallel_size": 2}


# The engine's token 999 has no embedding: nobody else is to draw it.
WITHOUT = {"logit_bias": {"999": -100.0}}


@pytest.fixture(scope="module")
def broken(models):
    """The tiny Llama with NaN for the embedding of token 999."""
    path, broken = model(models), models / "llama-nan"
    shutil.copytree(path, broken)
    weights = load_file(path / "model.safetensors")
    table = np.array(weights["model.embed_tokens.weight"])
    table[999] = np.nan
    weights["model.embed_tokens.weight"] = table
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    return broken


@pytest.fixture(scope="module")
def engine(broken, tmp_path_factory):
    """An engine with two samplers, for tests that leave it running; the last one ends it."""
    log = tmp_path_factory.mktemp("killed") / "log"
    poisoned = str(Path(__file__).parents[1] / "sampler" / "poisoned")
    env = {"PYTHONPATH": os.pathsep.join([poisoned, os.environ.get("PYTHONPATH", "")])}
    blocks = {"num_gpu_blocks_override": 64}  # few: each is soon somebody else's
    with Engine(broken, sipipe={"samplers": 2}, log=log, env=env, **TWO_STAGES, **blocks) as engine:
        yield engine


@pytest.mark.ci
def test_logits_without_a_distribution_fail_their_own_request_only(models, engine):
    """A prompt with the token whose embedding is NaN, a request whose every token is ruled out, by
    itself or by its grammar, fail and say why; the others go on."""
    good = [[token for token in p if token != 999] or [5] for p in prompts(6)]
    params = greedy(6)
    stops = {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}
    grammar = {"allowed_token_ids": [7], "structured_outputs": {"choice": ["yes", "no"]}}
    bad = [params[0], params[0] | stops, params[0] | grammar]
    bad = [one | {"prompt_logprobs": 1} for one in bad]  # there are, and the scheduler takes none
    batch = {
        "prompts": [*good[:3], [7, 999, *range(3, 200)], [7, 8], [8, 7], *good[3:]],
        "params": [*params[:3], *bad, *params[3:]],
    }
    said = engine.run([batch])[0]
    fails = [request["outputs"][0] for request in said[3:6]]
    assert [one["finish_reason"] for one in fails] == ["error"] * 3
    nothing = "no token is left to sample: every logit is -inf or masked"
    assert [one["stop_reason"] for one in fails] == [
        "the model's logits hold NaN", nothing, nothing,
    ]  # fmt: skip
    fine = {"prompts": good, "params": params}
    assert_stock([said[:3] + said[6:]], model(models), [fine])
    # Every block is had again, also by requests shorter than what had held NaN.
    short = {"prompts": [[5, 6]] * 70, "params": [params[0] | {"max_tokens": 2}] * 70}
    for one in engine.run([short])[0]:
        assert one["outputs"][0]["finish_reason"] == "length", one


@pytest.mark.ci
def test_a_request_that_ends_its_samplers_fails_alone(engine):
    """It is planted: the third death is enough, and all that the samplers owed is drawn."""
    params = {"temperature": 0.9, "ignore_eos": True, "max_tokens": 60} | WITHOUT
    batch = {
        "prompts": prompts(9, vocab=999),
        "params": [{**params, "seed": seed} for seed in (1, 2, 3, 4, 666, 5, 6, 7, 8)],
    }
    said = engine.run([batch])[0]
    [failed] = said.pop(4)["outputs"]
    assert failed["finish_reason"] == "error"
    assert re.search(
        r"ended every sampler that drew for it \(exit code -11\)", failed["stop_reason"]
    )
    del batch["prompts"][4], batch["params"][4]
    assert tokens(said) == tokens(engine.run([batch])[0])


@pytest.mark.ci
def test_a_killed_sampler_is_replaced_and_no_token_changes(engine):
    kill_samplers(engine)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["last", "shared"])
def test_a_killed_sampler_finds_the_columns_of_every_rank(models, vocabulary):
    """Each rank writes its own, of the last stage or of both; the vocabulary is no multiple of 64,
    so they are uneven."""
    options = {"tensor_parallel_size": 2, **TWO_STAGES}
    settings = {"samplers": 2, "vocabulary": vocabulary}
    with Engine(model(models), sipipe=settings, **options) as engine:
        kill_samplers(engine)
        assert (SHARED_OUT in engine.log.read_text()) is (vocabulary == "shared")


def kill_samplers(engine):
    seeded = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "ignore_eos": True}
    seeded |= WITHOUT
    batch = {
        "prompts": prompts(24, vocab=999),
        "params": [{**seeded, "seed": i, "max_tokens": 150} for i in range(24)],
    }
    undisturbed = engine.run([batch])
    engine.submit([batch])
    engine.wait_until_generating()
    died = r"sampler\d died \(exit code -9\)"
    before = len(re.findall(died, engine.log.read_text()))
    for death in (1, 2):
        engine.find(r"sipipe\.sampler.* sampler\d")[0].kill()
        engine.wait_for(died, times=before + death)
    disturbed = engine.result()
    assert tokens(disturbed[0]) == tokens(undisturbed[0])


@pytest.mark.ci
def test_a_stopped_sampler_is_replaced_and_no_token_changes(engine):
    params = greedy(1, shortest=200, longest=200)[0] | WITHOUT
    batch = {"prompts": prompts(2, vocab=999), "params": [params] * 2}
    undisturbed = engine.run([batch])
    engine.submit([batch])
    engine.wait_until_generating()
    stopped = engine.find(r"sipipe\.sampler.* sampler\d")[0]
    stopped.suspend()
    assert tokens(engine.result()[0]) == tokens(undisturbed[0])
    assert gone([stopped])
    assert re.search(r"sampler\d .*has done nothing for .* it is killed", engine.log.read_text())


@pytest.mark.ci
def test_an_idle_engine_sleeps(engine):
    engine.run([{"prompts": prompts(4, vocab=999), "params": [greedy(1)[0] | WITHOUT] * 4}])
    everybody = engine.find(r"Worker_PP|EngineCore|sipipe\.sampler.* sampler\d")
    assert len(everybody) >= 4
    with ThreadPoolExecutor() as looks:
        found = [*looks.map(restless, [process.pid for process in everybody])]
    # Torch's own thread looks every 10 ms.
    assert not [said for of in found for said in of if not said.startswith("gloo_tcp_loop")]


def test_a_killed_worker_ends_the_engine_with_its_name(engine):
    params = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True} | WITHOUT
    engine.submit([{"prompts": prompts(8, vocab=999), "params": [params] * 8}])
    engine.wait_until_generating()
    everybody = engine.descendants()
    worker = engine.find("Worker_PP1")
    assert worker, [p.cmdline() for p in everybody]
    worker[0].kill()
    engine.wait_for(r"stage worker stage1\.0 \(pid \d+\) died, exit code -9", seconds=20)
    engine.process.wait(60)
    assert gone(everybody)


@pytest.mark.parametrize("who", ["front end", pytest.param("both", marks=pytest.mark.slow)])
def test_an_engine_killed_while_it_starts_leaves_nothing(models, who):
    with Engine(model(models), sipipe={"samplers": 2}, **TWO_STAGES) as engine:
        wait_until(lambda: len(engine.find("Worker_PP")) >= 2, 120)
        everybody, core = engine.descendants(), engine.find("EngineCore")
        assert core, everybody
        mapped = in_shared_memory_of(everybody)  # perhaps none
        if who == "both":
            core[0].send_signal(signal.SIGKILL)
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait(20)
        mapped |= in_shared_memory_of(everybody)
        assert gone(everybody)
        wait_until(lambda: not mapped & in_shared_memory(), 5)


def test_what_a_test_kills_leaves_nothing():
    """Nor does the one that would tidy up behind it, where that is killed too."""
    code = "from multiprocessing import shared_memory as it; held = it.SharedMemory(None, True, 9)"
    code += "; print(held.name, flush=True); input()"
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **ends) as process:
        name = process.stdout.readline().strip()
        parent = psutil.Process(process.pid)
        everybody = [*parent.children(), parent]
        assert in_shared_memory_of(everybody) == {name}
        kill(everybody)
    assert name not in in_shared_memory()
