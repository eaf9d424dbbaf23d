"""Models that need more on later stages than hidden states, against transformers' own tokens."""

import pytest
from tests.engine import tiny_models
from tests.engine.engines import greedy, prompts, run_engine, shared, tokens

pytestmark = [pytest.mark.engine, pytest.mark.ci]


@pytest.fixture(scope="module")
def gemma4(models):
    path = models / "gemma4"
    if not path.exists():
        tiny_models.make_gemma4(path)
    return path


def of_transformers(path, asked: list[list[int]], params: list[dict]) -> list[list[int]]:
    """Greedy tokens of transformers, a prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answers = []
    for prompt, param in zip(asked, params, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(param["max_tokens"]):
            with torch.inference_mode():
                following = made(input_ids=ids, use_cache=False).logits[0, -1].argmax()
            ids = torch.cat([ids, following.view(1, 1)], dim=1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("layers", [(8,), (4, 4), (2, 2, 4), (1, 1, 2, 4)])
def test_gemma4s_embeddings_of_each_layer_reach_every_stage(gemma4, layers):
    asked = prompts(6, longest=100, seed=4)
    params = greedy(6, shortest=4, longest=12)
    batch = {"prompts": asked, "params": params}
    found = run_engine(gemma4, [batch], **shared(len(layers), layers=list(layers)))
    assert tokens(found[0]) == of_transformers(gemma4, asked, params)
