"""Families of models and odd shapes, with features drawn at random, against stock vLLM's tokens.

Two uneven stages or more with a small KV cache: requests share blocks and are preempted.
"""

import os
import random
from itertools import islice
from typing import NamedTuple

import pytest
from tests.engine import tiny_models
from tests.engine.engines import Engine, assert_stock, model, prompts, run_engine, shared, tokens
from tests.engine.test_features import PENALTIES, SCHEMA, same_answers

pytestmark = pytest.mark.engine


class Family(NamedTuple):
    kind: str
    """transformers' ``model_type``."""
    vocabulary: int
    layers: tuple[int, ...]
    """Of the stages."""
    shape: dict
    alone: bool = False
    """Stock vLLM's tokens depend on the batch: one request at a time."""


HALF = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
THREE = {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1}
UNTIED = {"tie_word_embeddings": False}
SOFT = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}
WINDOWS = ["sliding_attention", "full_attention"] * 2
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

QUICK = {
    "gpt2": Family("gpt2", 50_257, (1, 3), {"resid_pdrop": 0.0}),
    "gemma3": Family("gemma3_text", 4_099, (3, 1), SOFT | {"layer_types": WINDOWS}),
}
SLOW = {
    "qwen2": Family("qwen2", 15_193, (3, 1), UNTIED),
    "qwen3": Family("qwen3", 15_193, (2, 1, 1), HALF | {"head_dim": 64}),
    "smollm2": Family("llama", 49_157, (1, 2, 1, 1), THREE | {"num_hidden_layers": 5}),
    "gemma": Family("gemma", 4_099, (1, 3), HALF | {"head_dim": 64}),
    "gemma2": Family("gemma2", 25_601, (1, 3), SOFT | {"final_logit_softcapping": 9.0}),
    "gptj-head-bias": Family("gptj", 10_081, (3, 1), {"rotary_dim": 16} | UNTIED),
    "phi-head-bias": Family("phi", 10_081, (3, 1), {"partial_rotary_factor": 0.5} | UNTIED),
    "phi3": Family("phi3", 4_099, (1, 3), {"sliding_window": 64} | UNTIED),
    "olmo2": Family("olmo2", 10_081, (1, 3), UNTIED),
    "olmoe": Family("olmoe", 4_099, (1, 3), {"num_experts": 4, "num_experts_per_tok": 2} | UNTIED),
    "cohere": Family("cohere", 4_099, (3, 1), {"logit_scale": 0.25}),
    "bloom": Family("bloom", 4_099, (3, 1), {}),
    "opt": Family("opt", 50_257, (1, 3), {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    "stablelm": Family("stablelm", 4_099, (3, 1), UNTIED),
    "starcoder2": Family("starcoder2", 49_157, (1, 3), {"sliding_window": 64}),
    "gpt-neox": Family("gpt_neox", 4_099, (1, 3), {"num_key_value_heads": 4} | UNTIED),
    "glm4": Family("glm4", 4_099, (1, 3), {"head_dim": 32} | UNTIED),
    "deepseek-v2": Family("deepseek_v2", 4_099, (3, 1), LATENT | UNTIED, alone=True),
}
FAMILIES = QUICK | SLOW

SMALL = {
    "block_size": 32,
    "num_gpu_blocks_override": 24,  # a longest request takes half of them; with windows, nearly all
    "max_model_len": 352,
    "enable_prefix_caching": True,
}


def drawn(rng: random.Random, vocabulary: int) -> dict:
    """Greedy parameters of a request: a few features, by chance."""
    asked = {"temperature": 0.0, "max_tokens": rng.randint(2, 24), "ignore_eos": True}
    some = [rng.randrange(3, vocabulary) for _ in range(6)]
    ends = {"ignore_eos": False, "max_tokens": 32}
    features = [
        {"logprobs": rng.randint(0, 3)},
        PENALTIES,
        {"repetition_penalty": rng.uniform(0.7, 1.6)},
        {"logit_bias": {str(token): rng.uniform(-5, 20) for token in some}},
    ]
    # Of these, one: two together may leave no token.
    masks = [
        {"bad_words": ["a", "the", " of"]},
        {"allowed_token_ids": some},
        {"top_k": 1, "temperature": 1.0},
        ends | {"min_tokens": rng.randint(0, 12), "stop_token_ids": list(range(3, vocabulary, 5))},
        ends | {"stop": ["a", "e", "or"], "include_stop_str_in_output": rng.random() < 0.5},
        ends | {"structured_outputs": {"json": SCHEMA}},
        ends | {"structured_outputs": {"choice": ["yes", "no", "maybe so"]}},
        ends | {"structured_outputs": {"regex": "[a-c]{3}x"}},
    ]
    for feature in features:
        if rng.random() < 0.25:
            asked |= feature
    if rng.random() < 0.1:  # the largest part of what is kept
        asked |= {"prompt_logprobs": rng.randint(0, 1)}
    if rng.random() < 0.7:
        asked |= rng.choice(masks)
    return asked


def batches_of(family: Family) -> list[dict]:
    """Some short prompts, a prompt of several chunks; then half of them again, out of the cache."""
    rng = random.Random(f"{family.kind} {family.vocabulary}")
    asked = prompts(16, vocab=family.vocabulary, seed=rng.random())
    asked += prompts(2, vocab=family.vocabulary, longest=300, seed=rng.random())
    params = [drawn(rng, family.vocabulary) for _ in asked]
    again = [prompt + prompt[:5] for prompt in asked[::2]]
    every = [(asked, params), (again, [drawn(rng, family.vocabulary) for _ in again])]
    if family.alone:
        every = [([p], [q]) for some in every for p, q in zip(*some, strict=True)]
    return [{"prompts": p, "params": q} for p, q in every]


@pytest.mark.ci
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_a_family_equals_stock(models, name):
    family, path = FAMILIES[name], models / f"family-{name}"
    if not path.exists():
        tiny_models.make_causal(path, family.kind, family.vocabulary, **family.shape)
    batches = batches_of(family)
    found = run_engine(path, batches, **shared(len(family.layers), layers=family.layers) | SMALL)
    assert_stock(found, path, batches, same_answers)


@pytest.mark.slow
def test_seeds_draw_the_same_after_a_restart_and_with_any_stages(models):
    path = model(models, "qwen2")
    asked = {"temperature": 1.2, "top_p": 0.95, "max_tokens": 16, "ignore_eos": True} | PENALTIES
    batch = {
        "prompts": prompts(24, longest=200, seed=8),
        "params": [asked | {"seed": 2**i} for i in range(24)],
    }
    said = []
    for stages in (2, 1, 4):
        with Engine(path, **shared(stages) | SMALL) as engine:
            said.append(tokens(*engine.run([batch])))
    assert len({tuple(ids) for ids in said[0]}) == 24
    assert said == said[:1] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "seed", "why"), [(1, 1, "CPU Generator does not use offset"), (2, None, "KeyError")]
)
def test_seeded_chunked_prompts_and_eager_stages_end_stocks_engine_only(models, stages, seed, why):
    path, cores = model(models, "qwen2"), map(str, sorted(os.sched_getaffinity(0)))
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(islice(cores, stages))}
    params = {"temperature": 1.0 if seed else 0.0, "seed": seed, "max_tokens": 4}
    batch = {"prompts": prompts(4, longest=400, seed=3), "params": [params] * 4}
    with Engine(path, env=bound, pipeline_parallel_size=stages) as engine:
        engine.submit([batch])
        engine.wait_for(why)
    assert all(tokens(run_engine(path, [batch], **shared(stages))[0]))
