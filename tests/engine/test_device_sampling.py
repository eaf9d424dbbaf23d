"""vLLM's sampler on SiPipe's stages gives stock vLLM's tokens, p + 1 microbatches in flight.

On the CPU build it is vLLM's PyTorch sampler; its Triton one is in test_second_runner.py.
"""

import os
from pathlib import Path

import pytest
from tests.engine import test_features as features
from tests.engine.engines import (
    Engine,
    assert_stock,
    greedy,
    model,
    prompts,
    run_engine,
    shared,
    tokens,
)

pytestmark = pytest.mark.engine

SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01}
SEEDED |= {"ignore_eos": True, "logprobs": 2}


def seeded(count):
    """Parameters of requests that draw, of mixed lengths: stock's generators draw the same."""
    mixed = [SEEDED, SEEDED | features.PENALTIES, {"temperature": 1.3, "ignore_eos": True}]
    return [mixed[i % 3] | {"seed": 2**63 + i, "max_tokens": 5 + 3 * i % 17} for i in range(count)]


def off(stages, ranks=1, **settings):
    return shared(stages, ranks, cpu_sampling="off") | {"max_logprobs": -1} | settings


def one_slot():
    """One stage with one microbatch, launched behind the last one while that one's tokens are on the
    device only."""
    settings = shared(1, cpu_sampling="off", inflight=1, vocabulary="last")
    return settings | {"max_logprobs": -1, "async_scheduling": True}


@pytest.mark.ci
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(off(2), id="2"),
        pytest.param(off(1), id="1", marks=pytest.mark.slow),
        pytest.param(one_slot(), id="one-slot"),
    ],
)
def test_vllms_features_and_seeds_equal_stock(models, settings):
    """Every parameter, in batches that change, with prompts in chunks. Seeded ones are not:
    stock dies of those."""
    path, params = model(models), features.deterministic()
    batches = [
        {"prompts": prompts(len(params), longest=40), "params": params},
        {"prompts": prompts(len(params), longest=200, seed=5), "params": params},
        {"prompts": prompts(20, longest=5, seed=6), "params": seeded(20)},
    ]
    said = run_engine(path, batches, **settings)
    assert_stock(said, path, batches, features.same_answers, max_logprobs=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(off(2), id="2-1"),
        pytest.param(off(2, 2), id="2-2"),
        pytest.param(off(1), id="1-1"),
        pytest.param(one_slot(), id="one-slot"),
    ],
)
def test_preemption_and_chunks_of_seeded_prompts(models, settings):
    path, batches = model(models, "qwen2"), features.crowding()
    long = prompts(4, longest=300, seed=3)
    params = [SEEDED | {"seed": 7, "max_tokens": 6}] * 4
    chunked = {"prompts": long, "params": params}
    settings = settings | features.SMALL_CACHE
    said = run_engine(path, [*batches, chunked], **settings)
    assert_stock(said[:1], path, batches[:1])
    assert tokens(said[1])[::2] == tokens(said[1])[1::2]
    assert tokens(said[2]) == tokens(said[1])[8:0:-2]
    whole = settings | {"max_num_batched_tokens": 1024}
    assert tokens(said[3]) == tokens(run_engine(path, [chunked], **whole)[0])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("stages", "installed"),
    [
        (2, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_custom_logits_processors_equal_stock(models, tmp_path, stages, installed):
    """Named by an option, or brought by a package, of which nobody says anything."""
    path = model(models)
    params = greedy(12, shortest=8, longest=20)
    for one, multiple in zip(params, [3, 5, 0] * 4, strict=True):
        one |= {"extra_args": {"multiple": multiple}} if multiple else {}
    batches = [{"prompts": prompts(12, longest=200, seed=8), "params": params}]
    custom = {"logits_processors": ["only_some:OnlySome"]}
    settings = shared(stages, 1) | custom
    if installed:
        package = tmp_path / "somebodys-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
        only_some = "[vllm.logits_processors]\nonly_some = only_some:OnlySome\n"
        (package / "entry_points.txt").write_text(only_some)
        paths = [str(tmp_path), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        settings = shared(stages, 1) | {"env": {"PYTHONPATH": os.pathsep.join(paths)}}
    with Engine(path, **settings) as engine:
        said = engine.run(batches)
        log = engine.log.read_text()
    kind = "installed" if installed else "custom"
    assert f"vLLM's sampler draws on the last stage: {kind} logits processors" in log
    assert f"{stages + 1} microbatches in flight" in log
    assert_stock(said, path, batches, **custom)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 1])
def test_prompt_embeddings_equal_stock(models, stages):
    path, embeds = model(models), {"enable_prompt_embeds": True}
    asked = [{"embeddings": [length, 128], "seed": length} for length in (3, 40, 150)]
    batches = [{"prompts": [*asked, *prompts(3)], "params": greedy(6)}]
    said = run_engine(path, batches, **shared(stages), **embeds)
    assert_stock(said, path, batches, **embeds)


@pytest.mark.slow
def test_routed_experts_come_with_stocks_tokens(models):
    """At one stage, as vLLM has them; stock's CPU build has not: the experts have no oracle here."""
    path = model(models, "qwen3-moe")
    batches = [{"prompts": prompts(6, longest=100), "params": greedy(6)}]
    settings = {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    said = run_engine(path, batches, **shared(1), **settings)
    for request in said[0]:
        experts = request["outputs"][0].pop("routed_experts")
        assert all(0 <= one < 8 for token in experts for layer in token for one in layer)
    assert_stock(said, path, batches)
