"""With the output projection shared out, logits are those of the unshared one, bit for bit.

Of whole vocabularies, by vLLM's ``logprobs_mode="raw_logits"``, in float32. A request that is alone
has the same rows in every product; of several at once the engine may put others together, and then
the layers' and the projection's kernels may take a row in another block.
"""

import pytest
from tests.engine.engines import (
    SHARED_OUT,
    assert_stock,
    log_of,
    model,
    prompts,
    run_engine,
    same_tokens,
    shared,
)
from tests.engine.test_second_runner import checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GREEDY = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, "logprobs": -1}
ALONE = [{"prompts": [prompt], "params": [GREEDY]} for prompt in prompts(4, longest=30)]
TOGETHER = {"prompts": prompts(12, seed=3), "params": [GREEDY] * 12}
RAW = {"logprobs_mode": "raw_logits"}


def run(path, pp, tp, vocabulary):
    settings = shared(pp, tp, vocabulary=vocabulary) | RAW
    found = run_engine(path, [*ALONE, TOGETHER], **settings)
    assert (SHARED_OUT in log_of(path, **settings)) is (vocabulary == "shared")
    return found


def logits(said):
    """Of each position: those of all tokens, in their order."""
    return [
        [at[str(token)][0] for token in range(1000)]
        for request in said
        for at in request["outputs"][0]["logprobs"]
    ]


def assert_same(found, expected):
    same_tokens(found, expected)
    for said, other in zip(found[:-1], expected[:-1], strict=True):
        assert logits(said) == logits(other)
    for at, other in zip(logits(found[-1]), logits(expected[-1]), strict=True):
        assert at == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_degrees_give_the_unshared_logits(models, pp, tp):
    path = model(models)
    assert_same(run(path, pp, tp, "shared"), run(path, pp, tp, "last"))


@pytest.mark.parametrize(("family", "tp"), [("granite", 1), ("granite", 2), ("gemma2", 1)])
def test_a_tied_embedding_scaled_or_capped_gives_the_unshared_logits(models, family, tp):
    """The last stage's copy of the embedding is shared out, and the tokens are stock vLLM's."""
    path = checkpoint(models, family)
    found = run(path, 2, tp, "shared")
    assert_same(found, run(path, 2, tp, "last"))
    every = [value for said in found for at in logits(said) for value in at]
    assert (max(map(abs, every)) < 3.0) is (family == "gemma2")

    assert_stock(found, path, [*ALONE, TOGETHER], max_logprobs=-1)


def test_logits_that_vllm_gathers_stay_on_the_last_stage(models):
    """Gemma 2 has no head but its embedding, of which ranks do not keep their columns apart."""
    path = checkpoint(models, "gemma2")
    settings = shared(2, 2) | RAW
    found = run_engine(path, [*ALONE, TOGETHER], **settings)
    why = "vLLM gathers the model's logits over its tensor-parallel ranks"
    assert f"Output projection on the last stage: {why}" in log_of(path, **settings)
    assert_stock(found, path, [*ALONE, TOGETHER], max_logprobs=-1)
