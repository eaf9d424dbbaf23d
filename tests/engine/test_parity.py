"""Greedy tokens through SiPipe are stock vLLM's at one stage, token for token, in float32."""

import pytest
from tests.engine.engines import (
    SHARED_OUT,
    assert_stock,
    crowded,
    greedy,
    log_of,
    model,
    prompts,
    run_engine,
    shared,
    tokens,
)

from sipipe.messages.measured import MIXES

pytestmark = pytest.mark.engine

FAMILIES = ("llama", "qwen2", "mixtral", "qwen3-moe", "deepseek-v3")
ALONE = {"deepseek-v3"}
"""Families whose tokens depend on the batch in stock vLLM's CPU kernels, and on the tensor-parallel
degree: one request at a time, against stock vLLM of the same degree. Their engines compare themselves
with one stage as they start (:mod:`sipipe.engine.self_test`), which has to be as careful."""


def mixed_batches():
    """Short and long prompts (several prefill chunks of 128), sequences that join and leave."""
    many = prompts(24, longest=60) + prompts(4, longest=300, seed=7)
    return [
        {"prompts": many, "params": greedy(len(many))},
        {"prompts": prompts(3, longest=400, seed=3), "params": greedy(3, longest=40)},
    ]


def single_requests():
    """One request at a time: short and long prompts."""
    return [
        {"prompts": [prompt], "params": greedy(1, shortest=20, longest=20)}
        for prompt in prompts(6) + prompts(2, longest=300, seed=7)
    ]


def check(models, family, pp, tp, *, last=False, **options):
    """``last``: the projection is on the last stage, though the settings ask to share it out."""
    path = model(models, family)
    batches, stock = mixed_batches(), {}
    if family in ALONE:
        batches, stock = single_requests(), {"tensor_parallel_size": tp}
        options = shared(pp, tp, self_test="always") | options
    settings = shared(pp, tp) | options
    found = run_engine(path, batches, **settings)
    assert_stock(found, path, batches, **stock)
    assert (SHARED_OUT in log_of(path, **settings)) is (pp > 1 and not last)


@pytest.mark.ci
def test_a_small_cache_and_uneven_stages_equal_stock(models):
    check(models, "qwen2", 2, 1, last=True, **crowded())


@pytest.mark.parametrize("pp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_stages_equal_stock(models, pp):
    check(models, "llama", pp, 1)


def test_seeded_requests_draw_the_same_with_one_stage_and_two(models):
    """After the test above, whose engines answer. Two samplers draw for two stages, one for one."""
    path, asked = model(models, "llama"), prompts(12, seed=5)
    params = [MIXES["all"] | {"seed": i, "max_tokens": 12 + i} for i in range(len(asked))]
    together = {"prompts": asked, "params": params}
    alone = {"prompts": asked[:1], "params": params[:1]}
    one, by_itself = map(tokens, run_engine(path, [together, alone], **shared(1)))
    assert by_itself == one[:1]
    assert [one] == [tokens(said) for said in run_engine(path, [together], **shared(2))]


@pytest.mark.ci
def test_vllms_sampler_equals_stock(models):
    """vLLM's own sampler in SiPipe's stages, eager: stock crashes here. Its scheduler
    fills the microbatch with prompts, whose hidden states cross in two pieces."""
    long = {"max_num_batched_tokens": 1024}
    check(models, "llama", 2, 1, last=True, **shared(2, cpu_sampling="off"), **long)


@pytest.mark.slow
def test_long_prompts_in_pieces_equal_stock(models):
    at_once = shared(4, microbatches={"prefill_spread": 1})
    check(models, "llama", 4, 1, **at_once, max_num_batched_tokens=1024)


@pytest.mark.ci
def test_a_mixture_in_two_stages_of_two_ranks_equals_stock(models):
    check(models, "qwen3-moe", 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 2), (4, 2)])
def test_more_degrees_equal_stock(models, pp, tp):
    check(models, "llama", pp, tp)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES[1:])
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2)])
def test_every_family_equals_stock(models, family, pp, tp):
    check(models, family, pp, tp)
