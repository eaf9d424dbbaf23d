"""Stages on vLLM's second runner, the one for GPUs, give stock vLLM's tokens.

On the CPU build: everything is there but streams, graphs and the device. Where vLLM's sampler draws,
it has NumPy twins of its kernels (:mod:`.sampler_twins`).
"""

import os
import re
from functools import partial
from pathlib import Path

import psutil
import pytest
from benchmarks.make_model.checkpoint import make_model
from tests.engine import test_features as features
from tests.engine import test_parity as parity
from tests.engine import tiny_models
from tests.engine.engines import (
    SHARED_OUT,
    Engine,
    assert_stock,
    greedy,
    log_of,
    model,
    prompts,
    run_engine,
    same_tokens,
    shared,
    stock_results,
    tokens,
)
from tests.engine.servers import wait_until
from tests.engine.setup.test_memory_budget import mapped

pytestmark = pytest.mark.engine

TRITON = os.environ.get("SIPIPE_TRITON", "")
INTERPRETED = Path(__file__).with_name("interpreted")

DRAWS = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""An engine whose CPU draws as a GPU does (engine_run.py)."""
TWINS = {"env": DRAWS, "worker_extension_cls": "sampler_twins.Twins"}


SHARED = {"samplers": 2, "cpu_sampling": "on", "vocabulary": "shared"}


def slow(part):
    """Settings of an engine in which what is measured at its start is known."""
    env = DRAWS | {"SLOW_PART": part}
    return {"env": env, "worker_extension_cls": "slow_twins.Twins"}


def run(path, batches, *, stages=2, sipipe=None, **engine):
    """The output projection is shared out where samplers draw all rows."""
    sipipe = {**SHARED, **(sipipe or {})}
    samplers_alone = sipipe["cpu_sampling"] == "on"
    settings = {**({} if samplers_alone else TWINS), "sipipe": sipipe, **engine}
    settings["pipeline_parallel_size"] = stages
    found = run_engine(path, batches, **settings)
    shares = stages > 1 and samplers_alone
    assert (SHARED_OUT in log_of(path, **settings)) is shares
    return found


def in_both_places(params):
    """Every other request asks for what samplers alone do, and gets the same tokens by it."""
    return [p | {"logprobs": 1} if i % 2 else p for i, p in enumerate(params)]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_preemption_and_prefix_caching_equal_stock(models, stages):
    """A seed gives the same tokens beside others, in another order, preempted or not, wherever they
    are drawn; the device's random numbers are not the samplers'."""
    path, batches, small = model(models), features.crowding(), features.SMALL_CACHE
    asked = [{**batch, "params": in_both_places(batch["params"])} for batch in batches[:2]]
    said = run(
        path, [*asked, batches[2]], sipipe={"cpu_sampling": "per_row"}, stages=stages, **small
    )
    assert_stock(said[:1], path, batches[:1])
    assert tokens(said[2]) == tokens(said[1])[8:0:-2]
    for one, other in zip(said[1][::2], said[1][1::2], strict=True):
        assert tokens([one]) != tokens([other])


@pytest.mark.slow
@pytest.mark.parametrize("drawing", ["on", "off"])
def test_stages_that_pad_differently_equal_stock(models, drawing):
    """CUDA graphs pad batches, each stage as its own graphs want it; real rows alone travel, on
    either path. Before that vLLM warms its kernels up, as it does on GPUs."""
    path, batches = model(models), parity.mixed_batches()
    settings = {"cpu_sampling": drawing}
    padded = {"worker_extension_cls": "padded_twins.Twins"}
    assert_stock(run(path, batches, stages=3, sipipe=settings, **padded), path, batches)


def with_both_places(batches):
    return [{**batch, "params": in_both_places(batch["params"])} for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "stages", "ranks"),
    [
        *(("whole", *degrees) for degrees in ((2, 1), (1, 1), (1, 2))),
        *(("copy", *degrees) for degrees in ((2, 1), (1, 1), (1, 2))),
        *(("device", *degrees) for degrees in ((2, 1), (2, 2))),
    ],
)
def test_who_draws_is_measured(models, part, stages, ranks):
    """All ways are there until then. Logits come late to the host here, and vLLM's sampler is late
    with all, or only one of the two."""
    path, batches = model(models), parity.mixed_batches()
    chosen, samplers = {
        "whole": ("each row has its place", 2),
        "copy": ("vLLM's sampler draws on the last stage's device.", 0),
        "device": ("CPU samplers draw.", 2),
    }[part]
    degrees = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
    with Engine(path, sipipe={"samplers": 2}, **degrees, **slow(part)) as engine:
        found = engine.run(with_both_places(batches) if samplers else batches)
        said = engine.log.read_text()
        assert f"cpu_sampling auto: {chosen}" in said
        # Those that are not needed were asked to end.
        wait_until(lambda: len(engine.find(r"sipipe\.sampler.* sampler\d")) == samplers)
    assert_stock(found, path, batches)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 1])
def test_tokens_that_a_request_names_are_scored_in_its_prompt(models, stages):
    """``prompt_logprob_token_ids``, which vLLM has with its second runner only: what
    ``prompt_logprobs`` says of the same tokens. A prompt takes several iterations."""
    path, asked = model(models), prompts(4, longest=300, seed=21)
    short = {"temperature": 0.0, "max_tokens": 3}
    [likely] = run(
        path, [{"prompts": asked, "params": [short | {"prompt_logprobs": 3}] * 4}], stages=stages
    )
    rows = [[list(map(int, at)) for at in one["prompt_logprobs"][1:]] for one in likely]
    most = max(len(at) for of in rows for at in of)
    named = [[at + [-1] * (most - len(at)) for at in of] for of in rows]
    params = [short | ({"prompt_logprob_token_ids": ids} if ids else {}) for ids in named]
    [scored] = run(path, [{"prompts": asked, "params": params}], stages=stages)
    assert tokens(scored) == tokens(likely)
    for one, other, of in zip(likely, scored, rows, strict=True):
        for at, ids, scores in zip(
            one["prompt_logprobs"][1:], of, other.get("named", []), strict=True
        ):
            expected = [at[str(token)][0] for token in ids]
            assert scores[: len(ids)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_compiled_stages_with_vllms_first_sampler_equal_stock(models, stages):
    """On a CPU without Triton: vLLM 0.33 would warm kernels up that are not there."""
    path, batches = model(models), parity.mixed_batches()
    settings = shared(stages, cpu_sampling="off") | {"enforce_eager": False}
    assert_stock(run_engine(path, batches, **settings), path, batches)


def compiled(path, cache, stages):
    """An engine that keeps what it compiles in ``cache``. Its workers import vLLM themselves, as those
    of a user's engine do, and not as a fork of this process, whose layers have objects for names."""
    env = {"VLLM_CACHE_ROOT": str(cache), "SIPIPE_TESTS_START_ANEW": "1"}
    return Engine(path, env=env, **shared(stages) | {"enforce_eager": False})


def launched_natively(cache):
    """Whether compiled code makes the calls of a pass that was compiled into ``cache``."""
    sources = [file.read_text() for file in cache.glob("**/*.cpp")]
    return any("inductor_entry_impl" in source for source in sources)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe", "falcon_h1", "gemma2"])
def test_one_stage_of_other_kinds_that_compiled_code_launches_equals_stock(
    models, tmp_path, family
):
    """Experts, recurrent layers, and two kinds of attention."""
    path, batches = checkpoint(models, family), parity.mixed_batches()
    with compiled(path, tmp_path, 1) as engine:
        assert_stock(engine.run(batches), path, batches)
    assert launched_natively(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_compiled_stages_equal_stock(models, tmp_path, stages):
    """By torch.compile, as stages are by default; another engine loads what the first compiled, by
    one short pass a stage where the first's began anew. One stage's launching is compiled, too."""
    path, batches = model(models), parity.mixed_batches()
    for loaded in (0, stages):
        with compiled(path, tmp_path, stages) as engine:
            assert_stock(engine.run(batches), path, batches)
            log = engine.log.read_text()
        assert log.count("Directly load AOT compilation") == loaded
        # One to load it, with the launching and without, and one to compile it.
        tries = loaded or {1: 3, 2: 4}[stages]
        assert log.count("Warming up model for the compilation") == tries
        assert launched_natively(tmp_path) == (stages == 1)


def mapped_channels(engine):
    """Bytes of the channels' memory that any process of an engine maps, by its name."""
    sizes = {}
    for process in [psutil.Process(engine.process.pid), *engine.descendants()]:
        for file, size in mapped(process.pid).items():
            sizes[file] = max(sizes.get(file, 0), size)
    return sizes


@pytest.mark.slow
def test_a_running_engine_maps_what_its_budget_says(models):
    """And no more once prompts have crossed in pieces."""
    long = [{"prompts": prompts(8, longest=900, seed=17), "params": greedy(8)}]
    settings = SHARED | {"microbatches": {"prefill_spread": 1}}  # nothing that is measured
    degrees = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "pipeline_parallel_size": 3}
    with Engine(model(models, vocab=40_000), sipipe=settings, **degrees) as engine:
        engine.run(long)
        first = mapped_channels(engine)
        engine.run([*long, *long])
        sizes = mapped_channels(engine)
        said = re.search(r"shared memory: ([\d,.]+) MiB \((.*?)\)", engine.log.read_text())
    assert sizes == first
    budget = dict(part.rsplit(" ", 1) for part in said[2].split(", "))
    whole = {"bic-i": "iterations", "bic-l": "logits", "link": "hidden states"}
    found = dict.fromkeys([*whole.values(), "the rest"], 0)
    for (name, _), size in sizes.items():
        found[whole.get(name.removeprefix("sipipe-"), "the rest")] += size / 2**20
    print(said[0], found)
    for what in whole.values():
        assert found[what] == pytest.approx(float(budget.pop(what).replace(",", "")), abs=0.06)
    assert found["the rest"] == pytest.approx(sum(map(float, budget.values())), abs=0.12)


def checkpoint(models, family):
    """One of :mod:`.tiny_models`, written once."""
    path = models / family
    if not path.exists():
        make = getattr(tiny_models, f"make_{family}", partial(make_model, family))
        make(path)
    return path


SEES = {"limit_mm_per_prompt": {"image": 1}}

ways = pytest.mark.parametrize(
    ("stages", "more"),
    [(2, {}), (1, {}), (4, {}), (2, {"tensor_parallel_size": 2}), (2, {"enforce_eager": False})],
    ids=["2", "1", "4", "2 of 2 ranks", "2 compiled"],
)


def with_images(family):
    """Some images come twice. Isaac's are of two shapes, and lie within the prompts."""
    texts = prompts(12, longest=40)
    seeing = [{"tokens": p, "image": i // 2} for i, p in enumerate(texts[:8])]
    if family == "isaac":
        for i, p in enumerate(seeing):
            p["tokens"] = [*p["tokens"][: i + 1], tiny_models.VOCABULARY, *p["tokens"][i + 1 :]]
            p["size"] = [28, 28 + 28 * (i // 2 % 2)]
    return [
        {"prompts": [*seeing, *texts[8:]], "params": greedy(12)},
        {"prompts": [p | {"image": p["image"] + 9} for p in seeing], "params": greedy(8)},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["blip2", "isaac"])
@ways
def test_a_model_that_sees_equals_stock(models, stages, more, family):
    """The encoder runs on the first stage, once for an image. Isaac has M-RoPE: every stage keeps
    positions in three dimensions."""
    path = checkpoint(models, family)
    batches = with_images(family)
    settings = {"cpu_sampling": "per_row"}
    found = run(path, with_both_places(batches), stages=stages, sipipe=settings, **SEES, **more)
    stock = stock_results(path, batches, **SEES)
    same_tokens(found, stock)
    assert tokens(stock[0])[:8] != tokens(stock[1]), "an image must make a difference"


@pytest.mark.slow
@ways
def test_a_model_with_recurrent_layers_equals_stock(models, stages, more):
    """Mamba's states lie beside attention's blocks, and end with their requests. Of two ranks each
    writes its columns of the samplers' rows, and gathers those of the device's."""
    path, batches = checkpoint(models, "falcon_h1"), parity.mixed_batches()
    settings = {"cpu_sampling": "per_row"}
    found = run(path, with_both_places(batches), stages=stages, sipipe=settings, **more)
    assert_stock(found, path, batches)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 1])
def test_recurrent_states_of_cached_prefixes_equal_stock(models, stages):
    """Which lie in blocks, and come along to the next one. Stock has no cache here."""
    path = checkpoint(models, "falcon_h1")
    shared = prompts(1, longest=60, seed=9)[0] * 9
    many = [shared[:300] + p for p in prompts(8, longest=60, seed=11)]
    batches = [{"prompts": many, "params": greedy(8, shortest=90, longest=140)}] * 2
    settings = {"pipeline_parallel_size": stages, "enable_prefix_caching": True}
    found = run_engine(path, batches, sipipe={"samplers": 2}, **settings)
    assert any(request["cached"] for request in found[1])
    assert_stock(found, path, batches)


@pytest.mark.slow
@pytest.mark.skipif(not TRITON, reason="SIPIPE_TRITON names no directory with an unpacked Triton")
@pytest.mark.parametrize("stages", [1, 2])
def test_the_kernels_themselves_interpreted_equal_stock(models, stages):
    """vLLM's own kernels, in Triton's interpreter: what ours may have got wrong.

    pip download --no-deps triton && unzip -q triton-*.whl -d DIR; SIPIPE_TRITON=DIR pytest ...
    """
    path, batches = model(models), parity.mixed_batches()
    paths = [str(INTERPRETED), TRITON, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = DRAWS | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    found = run(path, batches, stages=stages, env=env, worker_extension_cls="")
    assert_stock(found, path, batches)
