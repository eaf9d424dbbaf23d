"""Speculative decoding changes no token: drafts verified against the same engine without them."""

import json
import random
from importlib.util import find_spec

import pytest
from tests.engine.engines import crowded, greedy, model, prompts, run_engine, take_engine
from tests.engine.test_features import SCHEMA, make_adapter
from tests.engine.test_second_runner import SEES, checkpoint, with_images

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
        base | {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False, "max_tokens": 80},
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


ALIKE = ["北", "京", "上", "海", "市", "ä", "å", "æ", "à", "ß", "ü", "🌶", "🌷", "🍕", "a", "b", " "]
"""Letters of one to four bytes, many of which begin with the same byte."""


def grammars(count):
    """Grammars over letters that share bytes: choices and regexes, those of public reports first."""
    rng = random.Random(11)

    def text():
        return "".join(rng.choice(ALIKE) for _ in range(rng.randint(1, 12)))

    found = [
        {"choice": ["北京市", "上海市"]},
        {"choice": ["上海市", "上京"]},
        {"regex": "Grüße 🌶 aus Köln"},
        {"choice": ["ab " * 2000, "ab " * 2000 + "x"]},
    ]
    while len(found) < count:
        texts = [text() for _ in range(rng.randint(1, 4))]
        repeated = f"{rng.choice(ALIKE)}{{2,5}}"
        found += [
            {"choice": sorted(set(texts))},
            {"regex": f"{texts[0]}({'|'.join(texts)}){repeated}"},
        ]
    return found[:count]


def run(path, asked, **engine):
    """What came, and how many drafts were verified and drawn, by the engine's metrics."""
    counters = {"metrics": "vllm:spec_decode_num_"}
    engine["disable_log_stats"] = False
    *found, counted = run_engine(path, [*asked, counters], **engine)
    return found, counted


def with_and_without(path, asked, drafts=SPECULATIVE, *, apart_from=(), **engine):
    """Fail unless drafts were verified and accepted, and requests are equal to those without drafts in
    all but the fields ``apart_from``."""
    expected, _ = run(path, asked, **engine)
    found, counted = run(path, asked, speculative_config=drafts, **engine)
    assert counted["vllm:spec_decode_num_accepted_tokens"] > 0, counted
    assert counted["vllm:spec_decode_num_draft_tokens"] > 0
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            differing = {name for name in mine if mine[name] != theirs[name]} - {*apart_from}
            assert not differing, (mine, theirs)


@pytest.mark.ci
@pytest.mark.parametrize("pp", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_drafts_change_no_token(models, pp):
    with_and_without(model(models), batches(), sipipe={"samplers": 2}, pipeline_parallel_size=pp)


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_drafts_change_no_token_of_any_grammar(models, backend):
    """Also where what is forced begins or ends inside a character, or is long."""
    base = {"temperature": 0.0, "max_tokens": 40}
    asked = [base | {"structured_outputs": grammar} for grammar in grammars(40)]
    asked += [params | {"temperature": 0.9, "seed": 5} for params in asked[::3]]
    batches = [{"prompts": repeating(len(asked)), "params": asked}]
    settings = {"sipipe": {"samplers": 2}, "pipeline_parallel_size": 2}
    settings["structured_outputs_config"] = {"backend": backend}
    with_and_without(model(models), batches, **settings)


@pytest.mark.skipif(find_spec("arctic_inference") is None, reason="Arctic Inference")
def test_suffix_trees_change_no_token_either(models):
    settings = {"sipipe": {"samplers": 2}, "pipeline_parallel_size": 2}
    with_and_without(model(models), batches(), {"method": "suffix"}, **settings)


@pytest.mark.ci
def test_a_killed_sampler_loses_drafts_and_no_token(models):
    path, asked = model(models), batches() * 3
    settings = {"sipipe": {"samplers": 2}, "pipeline_parallel_size": 2}
    expected = run(path, batches(), **settings)[0] * 3
    drafting = settings | {"speculative_config": SPECULATIVE, "disable_log_stats": False}
    with take_engine(path, **drafting) as engine:
        engine.submit(asked)
        engine.wait_until_generating()
        for number in (1, 2):
            engine.find(r"sipipe\.sampler.* sampler\d")[0].kill()
            engine.wait_for(r"sampler\d died \(exit code -9\)", times=number)
        assert engine.result() == expected


@pytest.mark.slow
def test_nor_where_requests_are_preempted_share_blocks_and_have_adapters(models):
    path = model(models)
    config = json.loads((path / "config.json").read_text())
    adapter = ["a", 1, str(make_adapter(models / "adapter-drafts", config))]
    plain = {"prompts": repeating(8) + prompts(3), "params": greedy(11, shortest=40, longest=80)}
    asked = [plain, plain | {"lora": [adapter] * 11}]
    with_and_without(path, asked, **crowded(), max_num_seqs=16)


@pytest.mark.slow
def test_nor_of_a_model_that_sees(models):
    """What stands for an image lies behind the vocabulary, and positions have three dimensions."""
    batches = with_images("isaac")
    for batch in batches:
        batch["params"] = [kinds()[i % 2 * 3] for i in range(len(batch["prompts"]))]
    settings = {"sipipe": {"samplers": 2}, "pipeline_parallel_size": 2}
    # Drafts gain nothing here, and an engine that may schedule ahead would not wait for them.
    settings["async_scheduling"] = False
    with_and_without(checkpoint(models, "isaac"), batches, **settings, **SEES)
