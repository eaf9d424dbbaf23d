"""Speculative decoding changes no token: drafts verified against the same engine without them."""

import random

import pytest
from tests.engine.engines import Engine, model

pytestmark = pytest.mark.engine

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 2}
SPECULATIVE["prompt_lookup_max"] = 4
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}


def repeating(count, seed=0):
    """Prompts in which phrases come again."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        phrases = [[rng.randrange(3, 900) for _ in range(rng.randint(3, 7))] for _ in range(3)]
        found.append([token for _ in range(8) for token in rng.choice(phrases)])
    return found


def kinds(length=40):
    """What requests ask for; a tiny model's greedy tokens go round in circles, which drafts find."""
    base = {"temperature": 0.0, "max_tokens": length, "ignore_eos": True}
    warm = base | {"temperature": 0.4, "seed": 7}
    return [
        base,
        base | {"logprobs": 3},
        base | PENALTIES,
        base | PENALTIES | {"logprobs": 2, "prompt_logprobs": 1},
        base | {"logit_bias": {"17": 4.0, "18": -100.0}},
        base | {"bad_words": ["a", "the", "e a"]},
        base | {"min_tokens": 30, "ignore_eos": False, "stop_token_ids": list(range(3, 500))},
        base | {"ignore_eos": False, "stop": ["a", "e", "o"]},
        base | {"structured_outputs": {"regex": "(ab|cd){6,9}x"}, "ignore_eos": False},
        base | {"max_tokens": 2},
        warm,
        warm | {"top_p": 0.9, "logprobs": 1},
        warm | {"top_k": 20} | PENALTIES,
        warm | {"min_p": 0.1},
        warm | {"temperature": 0.05},
        base | {"n": 2, "temperature": 0.3, "seed": 3},
    ]


def batches():
    return [{"prompts": repeating(len(kinds())), "params": kinds()}] + [
        {"prompts": repeating(1, seed=i + 1), "params": [kinds()[i]]} for i in (0, 2, 11)
    ]


@pytest.mark.parametrize("pp", [2, 1])
def test_drafts_change_no_token(models, pp):
    path = model(models)
    asked = batches()
    plain = Engine(path, sipipe={"samplers": 2}, pipeline_parallel_size=pp)
    expected = plain.run(asked)
    plain.close()
    engine = Engine(
        path,
        sipipe={"samplers": 2},
        pipeline_parallel_size=pp,
        speculative_config=SPECULATIVE,
    )
    found = engine.run(asked)
    engine.close()
    assert found == expected
