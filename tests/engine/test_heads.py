"""Draft heads change no token, and are right as often as in stock vLLM, wherever the stages are cut."""

import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from benchmarks.make_model import eagle
from benchmarks.speculation import asked
from tests.engine import heads
from tests.engine.engines import (
    Engine,
    greedy,
    prompts,
    run_engine,
    same_tokens,
    take_engine,
    tokens,
    with_comparable_texts,
    words,
)
from tests.engine.servers import VLLM, Server, complete, metric
from tests.engine.test_features import thinking
from tests.engine.test_second_runner import DRAWS, INTERPRETED, TRITON
from tests.engine.test_speculation import batches, kinds, repeating, run, with_and_without
from transformers import AutoTokenizer

pytestmark = pytest.mark.engine

SAMPLERS = {"sipipe": {"samplers": 2}}
ON_DEVICE = {
    "sipipe": {"cpu_sampling": "off"},
    "env": DRAWS,
    "worker_extension_cls": "drafting_twins.Twins",
}
"""An engine whose last stage's device draws, verifies and proposes in one step: with vLLM's runner, and
twins of its kernels."""
UNTWINNED = {"logit_bias", "bad_words", "min_tokens"}
"""Parameters whose kernels have no twin."""
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
RIGHT = "vllm:spec_decode_num_accepted_tokens_per_pos"
"""Drafts that were right, by their position."""
VERIFIED = "vllm:spec_decode_num_drafts"
"""Times that a request had drafts, which is how many there were of the first position."""
OFFERED = "vllm:spec_decode_num_draft_tokens"
CACHED = "cached"
"""Tokens of a prompt that the prefix cache had. With a head they are a block fewer: vLLM computes the
last block of a hit again, since the head reads the target's hidden states, which no cache has."""


def head(models, kind):
    """The target's checkpoint and the ``--speculative-config`` of a head."""
    if kind == "mtp":
        return heads.mimo(models), {"method": "mtp", "num_speculative_tokens": 2}
    layers = 8 if kind.endswith("of eight layers") else heads.LAYERS
    made = {
        "draft_model": lambda: heads.draft_model(models),
        "eagle of eight layers": lambda: heads.eagle(models),
        "eagle3 of eight layers": lambda: heads.eagle3(models, layers=8),
        "eagle": lambda: heads.eagle(models),
        "eagle3": lambda: heads.eagle3(models),
        "eagle3 of few tokens": lambda: heads.eagle3(models, draft_vocab=300),
        "eagle3 of the last layer": lambda: heads.eagle3(models, taps=False),
    }[kind]()
    method = kind.partition(" ")[0]
    drafts = {"method": method, "model": str(made), "num_speculative_tokens": 3}
    return heads.target(models, layers=layers), drafts


def is_as_often_right(counted, by_stock):
    """Say if first drafts were right as often as stock's, but for what so few of them vary by. Of later
    ones stock makes more, and they are right less often."""
    first, by_stock_first = (each[RIGHT][0] for each in (counted, by_stock))
    likely = counted[VERIFIED] * by_stock_first / by_stock[VERIFIED]
    return first >= 0.9 * likely - 2 * math.sqrt(likely)


def long_greedy():
    """Greedy requests of prompts that are cut into chunks, for stock and for us."""
    asked = greedy(12, shortest=20, longest=60)
    return [{"prompts": prompts(12, longest=300), "params": asked}]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "pp"),
    [
        ("eagle", 2),
        ("eagle3", 4),
        ("mtp", 2),
        pytest.param("eagle", 1, marks=pytest.mark.slow),
        pytest.param("eagle3", 2, marks=pytest.mark.slow),
        pytest.param("eagle3 of few tokens", 2, marks=pytest.mark.slow),
        ("eagle3 of the last layer", 2),
        pytest.param("mtp", 1, marks=pytest.mark.slow),
        ("draft_model", 2),
        pytest.param("draft_model", 1, marks=pytest.mark.slow),
        pytest.param("draft_model", 4, marks=pytest.mark.slow),
        pytest.param("eagle of eight layers", 8, marks=pytest.mark.slow),
        pytest.param("eagle3 of eight layers", 8, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_stocks_and_drafts_as_often_right(models, kind, pp):
    """Drafts as often right as in stock, where target and head are in one process, say that taps,
    positions and the head's KV cache are right, which no token shows. Of so small a model few drafts
    are worth it: those of the first positions, which are right more often than the later ones."""
    path, drafts = head(models, kind)
    plain = run_engine(path, long_greedy())
    stock, by_stock = run(path, long_greedy(), speculative_config=drafts)
    assert stock == plain
    settings = {**SAMPLERS, "pipeline_parallel_size": pp}
    found, counted = run(path, long_greedy(), speculative_config=drafts, **settings)
    said, expected = (with_comparable_texts(it, path, long_greedy()) for it in (found, plain))
    assert said == expected
    assert 0 < counted[OFFERED] <= by_stock[OFFERED], (counted, by_stock)
    assert is_as_often_right(counted, by_stock), (counted, by_stock)


def with_images(count):
    """Prompts of which three in four have an image before them, some of them the same."""
    texts = prompts(count, longest=60)
    seeing = [{"tokens": p, "image": i // 2} for i, p in enumerate(texts[: count * 3 // 4])]
    return [*seeing, *texts[len(seeing) :]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pp", "settings"),
    [
        ("eagle", 2, SAMPLERS),
        ("eagle", 1, SAMPLERS),
        ("draft_model", 2, SAMPLERS),
        ("eagle", 2, ON_DEVICE),
        ("eagle", 1, ON_DEVICE),
    ],
    ids=["eagle", "eagle at one stage", "draft model", "eagle off", "eagle at one stage, off"],
)
def test_a_head_of_a_model_that_sees(models, kind, pp, settings):
    """It reads the tokens that stand for an image, which is all that vLLM's own heads of later stages
    have. Their number may be none of its vocabulary; and penalties count what is in the prompt."""
    _, drafts = head(models, kind)
    path = heads.blip2(models)
    sees = {"limit_mm_per_prompt": {"image": 1}}
    asked = [{"prompts": with_images(12), "params": greedy(12, shortest=20, longest=60)}]
    plain, by_stock = run(path, asked, speculative_config=drafts, **sees)
    stages = {**settings, **sees, "pipeline_parallel_size": pp}
    found, counted = run(path, asked, speculative_config=drafts, **stages)
    same_tokens(found, plain)
    assert is_as_often_right(counted, by_stock), (counted, by_stock)
    params = twinned()[0]["params"]
    every = [{"prompts": with_images(len(params)), "params": params}]
    with_and_without(path, every, drafts, **stages)


@pytest.mark.slow
def test_a_trained_head_is_taken_as_it_was_trained(models):
    """Drafts about as often right as those of the head in training say that vLLM computes what was
    trained: with a norm more or less, or the two inputs in another order, hardly one would be."""
    path = heads.target(models)
    directory = models / "trained-head"
    right = eagle.make_head(path, directory, texts=64, tokens=24, rounds=12)
    questions = [[{"role": "user", "content": asked("chat", number)}] for number in range(12)]
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template(questions, add_generation_prompt=True)["input_ids"]
    chats = [{"prompts": ids, "params": greedy(12, shortest=16, longest=24)}]
    drafts = {"method": "eagle", "model": str(directory), "num_speculative_tokens": 1}
    plain = run_engine(path, chats)
    settings = {**SAMPLERS, "pipeline_parallel_size": 2}
    found, counted = run(path, chats, speculative_config=drafts, **settings)
    said, expected = (with_comparable_texts(it, path, chats) for it in (found, plain))
    assert said == expected
    assert counted[ACCEPTED] > right / 2 * counted[OFFERED] > 0, (counted, right)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "pp"),
    [
        ("eagle", 2),
        pytest.param("eagle3", 4, marks=pytest.mark.slow),
        pytest.param("mtp", 2, marks=pytest.mark.slow),
        pytest.param("draft_model", 2, marks=pytest.mark.slow),
        pytest.param("eagle", 1, marks=pytest.mark.slow),
    ],
)
def test_a_head_changes_no_token(models, kind, pp):
    """Also not with seeds, penalties, log-probabilities, grammars, and text that a grammar forces."""
    path, drafts = head(models, kind)
    with_and_without(path, batches(), drafts, **SAMPLERS, pipeline_parallel_size=pp)


@pytest.mark.ci
@pytest.mark.parametrize(
    "kind",
    [
        "eagle",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle3", "mtp", "draft_model")),
    ],
)
def test_nor_where_stages_have_other_layers_than_vllms_cut(models, kind):
    """The head is of one stage, and the cut is none of its layers'."""
    path, drafts = head(models, kind)
    settings = {"sipipe": {**SAMPLERS["sipipe"], "layers": [3, 1]}}
    with_and_without(path, batches(), drafts, **settings, pipeline_parallel_size=2)


def twinned():
    """Requests of all kinds whose parameters' kernels have twins, together and alone."""
    asked = [params for params in kinds() if not UNTWINNED & params.keys()]
    together = {"prompts": repeating(len(asked)), "params": asked}
    alone = [
        {"prompts": repeating(1, seed=i + 1), "params": [asked[i]]} for i in (0, 2, len(asked) - 3)
    ]
    return [together, *alone]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "pp"),
    [
        ("eagle", 2),
        pytest.param("eagle", 1, marks=pytest.mark.slow),
        pytest.param("eagle3", 4, marks=pytest.mark.slow),
        pytest.param("mtp", 2, marks=pytest.mark.slow),
        pytest.param("draft_model", 2, marks=pytest.mark.slow),
    ],
)
def test_a_head_changes_no_token_where_vllms_sampler_draws(models, kind, pp):
    """Also not with seeds: a draft is right if that sampler draws it."""
    path, drafts = head(models, kind)
    with_and_without(path, twinned(), drafts, **ON_DEVICE, pipeline_parallel_size=pp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pp"), [("eagle", 2), ("eagle3", 4), ("mtp", 2), ("draft_model", 2)]
)
def test_drafts_are_as_often_right_where_vllms_sampler_draws(models, kind, pp):
    path, drafts = head(models, kind)
    plain = run_engine(path, long_greedy())
    _, by_stock = run(path, long_greedy(), speculative_config=drafts)
    settings = {**ON_DEVICE, "pipeline_parallel_size": pp}
    found, counted = run(path, long_greedy(), speculative_config=drafts, **settings)
    assert tokens(found[0]) == tokens(plain[0])
    assert is_as_often_right(counted, by_stock), (counted, by_stock)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "chosen"),
    [
        ("copy", "vLLM's sampler draws on the last stage's device."),
        ("device", "CPU samplers draw."),
    ],
)
def test_who_verifies_drafts_is_measured(models, part, chosen):
    """Logits come late to the host, or vLLM's sampler is late."""
    path, drafts = head(models, "eagle")
    settings = {
        **ON_DEVICE,
        **SAMPLERS,
        "env": DRAWS | {"SLOW_PART": part},
        "pipeline_parallel_size": 2,
        "disable_log_stats": False,
    }
    counters = {"metrics": ACCEPTED}
    with Engine(path, speculative_config=drafts, **settings) as engine:
        *found, counted = engine.run([*long_greedy(), counters])
        [line] = re.findall("cpu_sampling auto: .*", engine.log.read_text())
    assert line.startswith(f"cpu_sampling auto: {chosen}")
    assert "the draft head" in line
    assert tokens(found[0]) == tokens(run_engine(path, long_greedy())[0])
    assert counted[ACCEPTED] > 0


@pytest.mark.slow
@pytest.mark.skipif(not TRITON, reason="SIPIPE_TRITON names no directory with an unpacked Triton")
def test_vllms_own_kernels_interpreted_verify_and_propose(models):
    """As ``test_second_runner.py`` has it: what our twins may have got wrong. It takes minutes."""
    path, drafts = head(models, "eagle")
    paths = [str(INTERPRETED), TRITON, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = DRAWS | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    settings = {**ON_DEVICE, "env": env, "worker_extension_cls": "", "pipeline_parallel_size": 2}
    short = greedy(3, shortest=8, longest=12)
    warm = {"temperature": 0.4, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    asked = [*short, warm, warm | {"repetition_penalty": 1.2}]
    batch = {"prompts": prompts(len(asked), longest=60), "params": asked}
    with_and_without(path, [batch], drafts, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("place", [SAMPLERS, ON_DEVICE], ids=["samplers", "device"])
@pytest.mark.parametrize("kind", ["eagle", "mtp", "draft_model"])
def test_nor_where_requests_are_preempted_and_share_blocks(models, kind, place):
    """The number of cached tokens is another with a head (:data:`CACHED`)."""
    path, drafts = head(models, kind)
    plain = {"prompts": repeating(8) + prompts(3), "params": greedy(11, shortest=40, longest=80)}
    small = {"block_size": 32, "num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    settings = {**place, "pipeline_parallel_size": 2, "max_num_seqs": 16, **small}
    with_and_without(path, [plain, plain], drafts, apart_from=[CACHED], **settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "mtp", "draft_model"])
def test_as_many_tokens_are_cached_as_in_stock(models, kind):
    """Of prompts that come a second time, in a cache that has room for all."""
    path, drafts = head(models, kind)
    roomy = {"block_size": 32, "enable_prefix_caching": True, "speculative_config": drafts}
    twice = long_greedy() * 2
    stock, _ = run(path, twice, **roomy)
    said, _ = run(path, twice, **SAMPLERS, pipeline_parallel_size=2, **roomy)
    expected = [[request[CACHED] for request in batch] for batch in stock]
    assert [[request[CACHED] for request in batch] for batch in said] == expected
    assert any(expected[1])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        pytest.param("eagle", SAMPLERS, id="eagle, samplers"),
        pytest.param("eagle", ON_DEVICE, id="eagle, device", marks=pytest.mark.slow),
        pytest.param("eagle3", SAMPLERS, id="eagle3, samplers", marks=pytest.mark.slow),
        pytest.param("mtp", SAMPLERS, id="mtp, samplers", marks=pytest.mark.slow),
        pytest.param("draft_model", SAMPLERS, id="draft_model, samplers", marks=pytest.mark.slow),
    ],
)
def test_nor_with_several_ranks_a_stage(models, kind, place):
    """Whose device threads hear of drafts and iterations each in its own time."""
    path, drafts = head(models, kind)
    ranks = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    with_and_without(path, long_greedy() * 2, drafts, **place, **ranks)


@pytest.mark.slow
def test_nor_where_a_sampler_is_killed(models):
    path, drafts = head(models, "eagle")
    settings = {**SAMPLERS, "pipeline_parallel_size": 2}
    expected = run(path, batches(), **settings)[0] * 3
    drafting = settings | {"speculative_config": drafts, "disable_log_stats": False}
    with take_engine(path, **drafting) as engine:
        engine.submit(batches() * 3)
        engine.wait_until_generating()
        engine.find(r"sipipe\.sampler.* sampler\d")[0].kill()
        engine.wait_for(r"sampler\d died \(exit code -9\)")
        assert engine.result() == expected


@pytest.mark.slow
@pytest.mark.parametrize("place", [SAMPLERS, ON_DEVICE], ids=["samplers", "device"])
@pytest.mark.parametrize("kind", ["eagle", "draft_model"])
def test_nor_where_others_are_aborted(models, kind, place):
    """What they leave behind is another's: the head may not write there any more."""
    path, drafts = head(models, kind)
    settings = {**place, "pipeline_parallel_size": 2}
    small = {"block_size": 32, "num_gpu_blocks_override": 40}
    asked = greedy(30, shortest=40, longest=60)
    ends = [i % 3 * (3 + i // 3) or -1 for i in range(30)]
    aborted = {"aborts": ends, "prompts": prompts(30, longest=90), "params": asked}
    plain = {"prompts": repeating(4), "params": kinds()[:4]}
    (expected,) = run_engine(path, [plain], **settings, **small)
    drafting = {**settings, **small, "speculative_config": drafts}
    found = run_engine(path, [aborted, plain, aborted, plain], **drafting)
    assert found[1] == found[3] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_nor_with_thinking_budgets(models, kind):
    """Whose end is forced amid drafts."""
    path, drafts = head(models, kind)
    batch, engine = thinking(path)
    with_and_without(path, [batch] * 2, drafts, **SAMPLERS, pipeline_parallel_size=2, **engine)


def compiled(directory, **settings):
    """Settings of an engine whose models are compiled, as they are by default, and kept in ``directory``."""
    # Workers import vLLM themselves, as those of a user's engine do.
    environment = {"VLLM_CACHE_ROOT": str(directory), "SIPIPE_TESTS_START_ANEW": "1"}
    return {**SAMPLERS, "enforce_eager": False, "env": environment, **settings}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "pp", "tp"),
    [("eagle", 2, 1), ("eagle3", 2, 1), ("mtp", 1, 1), ("eagle", 2, 2), ("draft_model", 2, 1)],
)
def test_nor_where_stage_and_head_are_compiled(models, tmp_path, kind, pp, tp):
    """The second engine loads what the first compiled, each rank its own: drafts are as often right."""
    path, drafts = head(models, kind)
    places = {"pipeline_parallel_size": pp, "tensor_parallel_size": tp}
    settings = compiled(tmp_path, speculative_config=drafts, **places)
    expected = tokens(run_engine(path, long_greedy())[0])
    counts = []
    for _ in range(2):
        found, counted = run(path, long_greedy(), **settings)
        assert tokens(found[0]) == expected
        assert counted[ACCEPTED] > 0
        counts.append(counted)
    first, second = counts
    assert is_as_often_right(second, first), counts


@pytest.mark.slow
def test_an_engine_loads_no_model_that_was_compiled_for_another_head(models, tmp_path):
    """One that an EAGLE-3 head reads gives hidden states of several layers, and others do not."""
    path, tapping = head(models, "eagle3")
    _, other = head(models, "eagle")
    expected = tokens(run_engine(path, long_greedy())[0])
    for drafts in (other, tapping, None):
        settings = compiled(tmp_path, speculative_config=drafts, pipeline_parallel_size=2)
        assert tokens(run_engine(path, long_greedy(), **settings)[0]) == expected


SERVED = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "enable_prefix_caching": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "door", "replicas", "draws"),
    [
        ("eagle", "sipipe", 1, "samplers"),
        ("eagle", "vllm", 1, "samplers"),
        ("eagle", "sipipe", 2, "samplers"),
        ("eagle", "sipipe", 1, "device"),
        ("eagle", "vllm", 1, "device"),
        ("eagle", "sipipe", 2, "device"),
        ("draft_model", "sipipe", 1, "samplers"),
        ("draft_model", "vllm", 1, "samplers"),
    ],
)
def test_nor_where_they_are_served(models, tmp_path, kind, door, replicas, draws):
    path, drafts = head(models, kind)
    asked = long_greedy()
    expected = tokens(run_engine(path, asked)[0])
    options = [*words(SERVED), "--speculative-config", json.dumps(drafts)]
    more = {}
    if door == "vllm":
        options += ["--distributed-executor-backend", "sipipe.Executor"]
        more = {"module": VLLM, "forked": True}
    if draws == "device":
        options += ["--worker-extension-cls", ON_DEVICE["worker_extension_cls"]]
        options += ["--additional-config", json.dumps({"sipipe": ON_DEVICE["sipipe"]})]
        more |= {"forked": True, "more": ON_DEVICE["env"]}
    if replicas > 1:
        options += ["--data-parallel-size", str(replicas)]
    with Server(path, tmp_path / "log", *options, **more) as server:

        def ask(prompt, params):
            return complete(server.address, prompt, {**params, "logprobs": 1})[0]

        with ThreadPoolExecutor(16) as clients:
            drawn = list(clients.map(ask, asked[0]["prompts"], asked[0]["params"]))
        assert drawn == expected
        assert metric(server.address, f"{ACCEPTED}_total") > 0
