"""What vLLM's engine can do keeps working: each against stock vLLM, or against its own promise."""

import json
import math
import random
from itertools import chain

import numpy as np
import pytest
from tests.engine.engines import (
    Engine,
    assert_stock,
    crowded,
    greedy,
    model,
    prompts,
    run_engine,
    run_stock,
    same_tokens,
    shared,
    stock_results,
    tokens,
)
from tokenizers import Tokenizer

pytestmark = pytest.mark.engine

REASONING = "reasoning_start_str", "reasoning_end_str"
THINKING = "{", "}"  # a token each: with more in a prompt stock loses count
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def deterministic():
    """One greedy request per feature, so that stock's tokens are the oracle."""
    base = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return [
        base,
        base | {"logprobs": 5},
        base | {"logprobs": 0},
        base | {"logprobs": -1, "max_tokens": 2},
        base | {"prompt_logprobs": 3},
        base | {"prompt_logprobs": 0, "logprobs": 2},
        base | PENALTIES,
        base | PENALTIES | {"logprobs": 3, "max_tokens": 30},
        base | {"logit_bias": {"17": 4.0, "18": -100.0}},
        base | {"allowed_token_ids": [10, 11, 12, 13]},
        base | {"bad_words": ["a", "the"]},
        base | {"min_tokens": 10, "ignore_eos": False, "stop_token_ids": list(range(3, 900))},
        base | {"ignore_eos": False, "stop": ["a", "e", "o"]},
        base | {"top_k": 1, "temperature": 1.0},
        base | {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False, "max_tokens": 40},
        base | {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False},
        base | {"structured_outputs": {"regex": "[a-c]{3}x"}, "ignore_eos": False},
    ]


@pytest.fixture(
    scope="module", params=[2, pytest.param(1, marks=pytest.mark.slow)], ids="pp{}".format
)
def both(request, models):
    """The same requests through stock vLLM and through SiPipe, long prompts among them."""
    path = model(models)
    params = deterministic()
    batches = [
        {"prompts": prompts(len(params), longest=40), "params": params},
        {"prompts": prompts(len(params), longest=200, seed=5), "params": params},
    ]
    # Alone: stock spoils the logprobs of other requests in its batch (docs/compatibility.md).
    chosen = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "logprobs": 3}
    chosen["logprob_token_ids"] = [5, 6, 7]
    batches.append({"prompts": prompts(2), "params": [chosen] * 2})
    return run_engine(path, batches, **shared(request.param)), path, batches


@pytest.mark.parametrize("index", range(len(deterministic())))
def test_greedy_features_equal_stock(both, index):
    said, path, batches = both

    def same(found, stock):
        same_answers(*([[batch[index]] for batch in side[:2]] for side in (found, stock)))

    assert_stock(said, path, batches, same, max_logprobs=-1)


def test_logprobs_of_chosen_tokens_equal_stock(both):
    said, path, batches = both

    def same(found, stock):
        same_answers(found[2:], stock[2:])

    assert_stock(said, path, batches, same, max_logprobs=-1)


def same_answers(found, stock):
    """All that is said of each request; results that have long been kept have no reason of a stop."""
    for ours, theirs in zip(chain(*found), chain(*stock), strict=True):
        for a, b in zip(ours["outputs"], theirs["outputs"], strict=True):
            for what in b.keys() - {"logprobs"}:
                assert a[what] == b[what]
            same_logprobs(a["logprobs"], b["logprobs"])
        same_logprobs(ours["prompt_logprobs"], theirs["prompt_logprobs"])


def same_logprobs(ours, theirs):
    assert (ours is None) == (theirs is None)
    for a, b in zip(ours or (), theirs or (), strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert len(a) == len(b)
        for token, (value, rank) in b.items():
            if math.isfinite(value):  # torch names any of the others
                assert a[token] == [pytest.approx(value, abs=1e-3), pytest.approx(rank, rel=1e-3)]


@pytest.mark.slow
def test_the_engines_seed_decides_unseeded_requests(models):
    """Two starts, the same requests in the same order: the same tokens, of any two requests others."""
    params = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    batches = [
        {"prompts": [prompts(1)[0]] * 6, "params": [{**params, "n": 1 + i % 2} for i in range(6)]},
        {"prompts": prompts(6), "params": [params] * 6},
    ]
    drawn = []
    for seed in (5, 5, 6):
        with Engine(model(models), seed=seed, **shared(2)) as engine:
            drawn.append([one["outputs"] for batch in engine.run(batches) for one in batch])
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))
    alike = [sequence["token_ids"] for one in drawn[0][:6] for sequence in one]
    assert len({tuple(ids) for ids in alike}) == 9


@pytest.mark.slow
def test_every_logprob_of_a_large_batch(models):
    """70 requests, 151,936 tokens: 85 MB from the sampler in one iteration."""
    plain = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
    asked = plain | {"logprobs": -1, "flat_logprobs": True}
    batches = [{"prompts": prompts(70, longest=1), "params": [p] * 70} for p in (asked, plain)]
    settings = {"samplers": 1, "inflight": 1}
    path = model(models, size="bench")
    with Engine(path, sipipe=settings, max_logprobs=-1, max_num_seqs=80) as engine:
        every, none = engine.run(batches)
    assert tokens(every) == tokens(none)
    # The drawn token, then all of the vocabulary.
    assert [one["outputs"][0]["logprobs"] for one in every] == [[151_937]] * 70


SMALL_CACHE = {"block_size": 32, "num_gpu_blocks_override": 24, "enable_prefix_caching": True}


def crowding():
    """Requests for which 24 blocks are too few, greedy, then with a seed, each prompt twice; then
    some of these again, alone and in another order."""
    beginning = prompts(1, longest=60, seed=9)[0] * 2
    many = [beginning[:70] + p for p in prompts(20, longest=20, seed=11)]
    seeded = {"temperature": 1.5, "seed": 2**63 + 5, "max_tokens": 30, "ignore_eos": True}
    return [
        {"prompts": many, "params": greedy(20, shortest=30, longest=60)},
        {"prompts": [many[i - i % 2] for i in range(20)], "params": [seeded] * 20},
        {"prompts": many[8:0:-2], "params": [seeded] * 4},
    ]


def thinking(path):
    """Requests with thinking budgets, the last two behind their thoughts or without any, and the
    settings of their engine."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    begin, end = (tokenizer.encode(text, add_special_tokens=False).ids for text in THINKING)
    base = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    batch = {
        "prompts": [[*ids, *begin] for ids in prompts(6)] + [[*begin, 5, 6, *end]] + prompts(1),
        "params": [base | {"thinking_token_budget": n} for n in (0, 1, 2, 5, 9, 99, 2, 2)],
    }
    return batch, {"reasoning_config": dict(zip(REASONING, THINKING, strict=True))}


@pytest.mark.slow
def test_thinking_budgets_equal_stock(models):
    path = model(models)
    batch, engine = thinking(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    end = tokenizer.encode(THINKING[1], add_special_tokens=False).ids
    found = run_engine(path, [batch], **shared(2), **engine)
    same_tokens(found, run_stock(path, [batch], **engine))
    drawn = tokens(found[0])
    for budget, ids in zip((0, 1, 2, 5, 9), drawn, strict=False):
        assert ids[budget : budget + len(end)] == end


@pytest.mark.ci
def test_preemption_prefix_caching_and_several_sequences_per_request(models):
    """Growing sequences are preempted and resumed; a seed's tokens are the same all the same."""
    path, batches = model(models, "qwen2"), crowding()
    several = {"prompts": batches[2]["prompts"], "params": [{"n": 3, "max_tokens": 8}] * 4}
    preempted = {"metrics": "vllm:num_preemptions"}
    *said, counted = run_engine(path, [*batches, several, preempted], **crowded())
    assert sum(counted.values())
    assert any(request["cached"] for request in said[2])
    assert_stock(said[:1], path, batches[:1])
    assert tokens(said[1])[::2] == tokens(said[1])[1::2]
    assert tokens(said[2]) == tokens(said[1])[8:0:-2]
    assert all(len(request["outputs"]) == 3 for request in said[3])


@pytest.mark.ci
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_what_survives_a_storm_of_aborts_equals_stock(models, count):
    path, rng = model(models, "qwen2"), random.Random(count)
    params = [asked | {"detokenize": False} for asked in greedy(count, longest=40)]
    batch = {"prompts": prompts(count, longest=150, seed=21), "params": params}
    aborts = [rng.randint(1, count) if rng.random() < 0.6 else -1 for _ in range(count)]
    found = run_engine(path, [{**batch, "aborts": aborts}, batch], **crowded())

    def survivors_same(found, stock):
        for said in found:
            for ours, theirs in zip(said, stock[0], strict=True):
                assert ours is None or tokens([ours]) == tokens([theirs])

    assert_stock(found, path, [batch], survivors_same)
    assert count // 8 < found[0].count(None) <= count - aborts.count(-1)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "tp"), [("qwen2", 1), pytest.param("llama", 2, marks=pytest.mark.slow)]
)
def test_lora_adapters_equal_stock(models, family, tp):
    """All with the adapter, then none. A mixture has no oracle on the CPU engine: stock vLLM 0.32
    applies the adapter to every sequence of a batch there (docs/compatibility.md)."""
    path = model(models, family)
    config = json.loads((path / "config.json").read_text())
    adapter = make_adapter(models / f"adapter-{family}", config)
    plain = {"prompts": prompts(6, seed=3), "params": greedy(6)}
    batches = [{**plain, "lora": [["a", 1, str(adapter)]] * 6}, {**plain, "lora": [None] * 6}]
    # Stock's own tokens with an adapter change with the degree, so it has the same.
    engine = {"enable_lora": True, "max_lora_rank": 8, "tensor_parallel_size": tp}
    ours = crowded() if tp == 1 else shared(2, tp) | engine
    said = run_engine(path, batches, **ours)
    assert_stock(said, path, batches, **engine)
    with_it, without = stock_results(path, batches, **engine)
    assert tokens(with_it) != tokens(without), "the adapter must make a difference"


@pytest.mark.ci
def test_prompts_are_scored_with_adapters_as_by_stock(models):
    """Several prompts in a pass, of other numbers of tokens than rows that sample; stock vLLM, whose
    CPU worker ends at that, has each alone."""
    path = model(models)
    config = json.loads((path / "config.json").read_text())
    adapter = make_adapter(models / "adapter-llama", config)
    base = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    params = [base | {"prompt_logprobs": 3, "logprobs": 1}, base, base | {"prompt_logprobs": 0}] * 4
    plain = {"prompts": prompts(12, seed=7, longest=90), "params": params}
    batches = [{**plain, "lora": [["a", 1, str(adapter)]] * 12}, {**plain, "lora": [None] * 12}]
    engine = {"enable_lora": True, "max_lora_rank": 8}
    said = run_engine(path, batches, **shared(2), **engine)
    assert_stock(said, path, batches, same_answers, **engine, max_num_seqs=1)


def make_adapter(directory, config):
    """A random LoRA adapter of rank 8 on the query projections, in PEFT's format."""
    from safetensors.numpy import save_file

    directory.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    hidden, rank = config["hidden_size"], 8
    out = config["num_attention_heads"] * config["head_dim"]
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = rng.normal(size=(rank, hidden)).astype(np.float32)
        weights[f"{name}.lora_B.weight"] = rng.normal(size=(out, rank)).astype(np.float32)
    save_file(weights, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]}
    told |= {"bias": "none", "task_type": "CAUSAL_LM"}
    (directory / "adapter_config.json").write_text(json.dumps(told))
    return directory
