"""Which layers the stages get: SiPipe's cut, vLLM's, or the user's; no engine is started."""

import copy
import os
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_model.checkpoint import make_model

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.choose import VARIABLE, choose_layers, describe_layers
from sipipe.engine.layers.cut import fill, kv_lost
from sipipe.engine.layers.decoder import decoder_of
from sipipe.engine.layers.vocabulary import (
    Vocabulary,
    choose_vocabulary,
    columns,
    measured_vocabulary,
)
from sipipe.engine.start import arguments, plugin
from sipipe.errors import ConfigError
from sipipe.worker.hooks.world import cut_model


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory):
    """Two stages, eight layers under a vocabulary of 151,936; only the config is read."""
    if not arguments.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    directory = make_model("llama", tmp_path_factory.mktemp("models") / "llama", size="bench")
    args = arguments.parse_engine_args([str(directory), "-pp", "2", "--max-model-len", "256"], {})
    return plugin.engine_config(arguments.AsyncEngineArgs.from_cli_args(args))


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def choose(engine_config, by_cost=True, **settings):
    config = SiPipeConfig.from_dict(settings)
    return choose_layers(engine_config, config, decoder_of(engine_config), by_cost=by_cost)


def test_the_last_stage_gets_fewer_for_its_projection(engine_config):
    assert choose(engine_config, kv_loss=0.5) == (7, 1)
    assert choose(engine_config, layers="auto", kv_loss=0.3) == (5, 3)


def test_no_more_of_the_cache_goes_than_was_said(engine_config):
    def described(cut, by_cost=True, **settings):
        config = SiPipeConfig.from_dict(settings)
        decoder = decoder_of(engine_config)
        return describe_layers(engine_config, config, decoder, cut, by_cost=by_cost)

    assert choose(engine_config) == (4, 4)
    said = described((4, 4))
    assert said.startswith("Layers of the stages: 4, 4 (7, 1 would be 1.")
    assert 'cost 43% of the KV cache\'s tokens, more than "kv_loss" 0.1 allows' in said
    assert described((7, 1), kv_loss=0.5) == (
        "Layers of the stages: 7, 1 (evenly cut: 4, 4; costs 43% of the KV cache's tokens)"
    )
    assert "costs 20% of the KV cache's tokens" in described((5, 3), layers=[5, 3])
    assert described((4, 4), by_cost=False) == ""
    assert described((4, 4), layers="even") == ""
    with pytest.raises(ConfigError, match='"kv_loss" must be a number from 0 to below 1, not 1'):
        SiPipeConfig.from_dict({"kv_loss": 1})


def test_vllms_cut_where_it_was_asked_for_or_its_own_path_is_taken(engine_config):
    assert choose(engine_config, layers="even") == (4, 4)
    assert choose(engine_config, by_cost=False) == (4, 4)


def test_the_users_cut(engine_config, monkeypatch):
    assert choose(engine_config, layers=[7, 1]) == (7, 1)
    assert choose(engine_config, by_cost=False, layers=[7, 1]) == (7, 1)
    monkeypatch.setenv(VARIABLE, "5,3")
    assert choose(engine_config) == (5, 3)


def test_weights_have_the_width_that_they_are_served_in(engine_config):
    assert decoder_of(engine_config).facts.weight_bytes == 2, (
        "vLLM serves a float32 file in bfloat16"
    )
    made = copy.copy(engine_config)
    made.model_config = copy.copy(engine_config.model_config)
    made.model_config.dtype = torch.float32
    assert decoder_of(made).facts.weight_bytes == 4


def test_a_stage_without_layers_costs_no_cache(engine_config):
    assert kv_lost(decoder_of(engine_config).facts, (0, 8), 1, 80e9) > 0
    assert kv_lost(decoder_of(engine_config).facts, (8, 0), 1, 80e9) > 0


@pytest.mark.parametrize("layers", [[8], [4, 3], [2, 2, 4]])
def test_a_cut_that_does_not_fit_is_refused_by_name(engine_config, layers):
    with pytest.raises(ConfigError, match='"layers" must have one number for each of the 2 stages'):
        choose(engine_config, layers=layers)


def test_two_cuts_are_one_too_many(engine_config, monkeypatch):
    monkeypatch.setenv(VARIABLE, "4,4")
    with pytest.raises(ConfigError, match=f'"layers" and {VARIABLE} both'):
        choose(engine_config, layers=[4, 4])
    monkeypatch.setenv(VARIABLE, "4,3")
    with pytest.raises(ConfigError, match=VARIABLE):
        choose(engine_config)


def test_a_worker_tells_vllm_the_cut(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that what the call sets is undone
    monkeypatch.delenv(VARIABLE)
    cut_model((6, 2))
    assert os.environ[VARIABLE] == "6,2"


# ---- who multiplies by the output projection -----------------------------------------------------


def vocabulary(engine_config, cut=(7, 1), **settings):
    config = SiPipeConfig.from_dict(settings)
    decoder = decoder_of(engine_config)
    chosen, layers = choose_vocabulary(engine_config, config, decoder, cut)
    return chosen.parts, layers, str(chosen)


def test_the_projection_is_shared_out_where_that_is_quicker(engine_config):
    parts, layers, said = vocabulary(engine_config)
    assert (parts, layers) == ((0.5, 0.5), (4, 4))
    assert "50%, 50% of its columns" in said
    assert "1.06 x as quick with layers (4, 4) as unshared with (7, 1)" in said


def test_a_shorter_stage_takes_more_columns(engine_config):
    (first, second), layers, _ = vocabulary(engine_config, (5, 3), layers=[5, 3])
    assert layers == (5, 3)
    assert first + second == pytest.approx(1)
    assert 0.1 < first < second


def test_a_cut_by_vllms_variable_is_shared_beside(engine_config, monkeypatch):
    monkeypatch.setenv(VARIABLE, "5,3")
    (first, second), layers, _ = vocabulary(engine_config, choose(engine_config))
    assert layers == (5, 3)
    assert 0.1 < first < second


def test_the_last_stage_keeps_it_where_it_was_asked_to_or_alone(engine_config):
    assert vocabulary(engine_config, vocabulary="last") == ((), (7, 1), "")
    assert vocabulary(engine_config, (8,)) == ((), (8,), "")


def test_weights_that_an_extension_may_change_are_on_the_last_stage(engine_config, monkeypatch):
    monkeypatch.setattr(engine_config.parallel_config, "worker_extension_cls", "a.B")
    parts, _, said = vocabulary(engine_config)
    assert parts == ()
    assert "--worker-extension-cls" in said
    assert vocabulary(engine_config, vocabulary="shared")[0] == (0.5, 0.5)


def test_auto_shares_only_what_is_worth_it(engine_config, monkeypatch):
    monkeypatch.setattr("sipipe.engine.layers.vocabulary.WORTH_SHARING", 1.5)
    parts, layers, said = vocabulary(engine_config)
    assert (parts, layers) == ((), (7, 1))
    gain = re.fullmatch(
        r"Output projection on the last stage: sharing it out over the stages would gain "
        r"only (\d+)% of speed",
        said,
    )
    assert 5 < int(gain[1]) < 50
    assert vocabulary(engine_config, vocabulary="shared")[0] == (0.5, 0.5)


def test_what_was_measured_decides(engine_config):
    expected = Vocabulary((0.5, 0.5), "expected to make it quicker", work=(1, 1))
    auto, asked = SiPipeConfig(), SiPipeConfig(vocabulary="shared")
    found = measured_vocabulary(expected, auto, [5.5e-3, 6e-3], 20e-3)
    assert found.parts == pytest.approx((0.5125, 0.4875)), "as quick as the other, nearly"
    assert str(found).startswith("Output projection shared out over the stages: 51%, 49%")
    assert (
        "expected to make it quicker; measured: layers 5.5, 6.0 ms, all of the projection 20.0, "
        "20.0 ms, the slowest stage 1.65 x as quick"
    ) in str(found)
    little = [30e-3, 30e-3], 1e-3
    assert measured_vocabulary(expected, asked, *little).parts == pytest.approx((0.5, 0.5))
    kept = measured_vocabulary(expected, auto, *little)
    assert kept.parts == ()
    assert str(kept).startswith("Output projection on the last stage: expected")
    assert measured_vocabulary(expected, auto, [40e-3, 4e-3], 20e-3).parts == ()
    assert measured_vocabulary(expected, asked, [40e-3, 4e-3], 20e-3).parts == (0.0, 1.0)


def test_a_faster_device_takes_more_columns():
    """Stage 0 does the same work in half of the time: it is done with all of the projection in 10
    ms, and both with their parts of it after 32 / 3 ms."""
    expected = Vocabulary((0.5, 0.5), work=(3, 3))
    found = measured_vocabulary(expected, SiPipeConfig(), [3e-3, 6e-3], 20e-3)
    assert found.parts == pytest.approx((23 / 30, 7 / 30))
    assert "all of the projection 10.0, 20.0 ms, the slowest stage 2.44 x as quick" in str(found)
    assert measured_vocabulary(expected, SiPipeConfig(), [6e-3, 3e-3], 20e-3).parts[0] < 0.3
    twice = Vocabulary((0.5, 0.5), work=(6, 3))
    assert measured_vocabulary(twice, SiPipeConfig(), [6e-3, 3e-3], 20e-3).parts == pytest.approx(
        (0.425, 0.575)
    )


def test_no_gpu_but_the_last_gets_more_columns_than_it_has_memory_for():
    expected = Vocabulary((0.4, 0.4, 0.2), work=(1, 1, 1))
    free = measured_vocabulary(expected, SiPipeConfig(), [3e-3, 6e-3, 6e-3], 20e-3)
    kept = measured_vocabulary(expected, SiPipeConfig(), [3e-3, 6e-3, 6e-3], 20e-3, reserved=True)
    assert free.parts[0] > 0.6
    assert kept.parts == pytest.approx((0.4, free.parts[1], 0.6 - free.parts[1]))
    assert sum(kept.parts) == pytest.approx(1)
    slowest = 6 + 20 * kept.parts[2]
    assert f"the slowest stage {26 / slowest:.2f} x as quick" in str(kept)


@given(st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0)), min_size=1, max_size=8))
def test_columns_even_the_stages_whatever_their_speeds(stages):
    times, projections = zip(*stages, strict=True)
    parts, slowest = fill(times, projections)
    assert sum(parts) == pytest.approx(1)
    level = max(own + part * all_ for (own, all_), part in zip(stages, parts, strict=True) if part)
    assert slowest == pytest.approx(max(level, *times, 0))
    for own, all_, part in zip(times, projections, parts, strict=True):
        if part:
            assert own + part * all_ == pytest.approx(level)
        else:
            assert own >= level * (1 - 1e-9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lora_config": object()}, "--enable-lora"),
        ({"quant_config": SimpleNamespace(lm_head_quantized=True)}, "quantized"),
        ({"model_config": {"enable_sleep_mode": True}}, "--enable-sleep-mode"),
        ({"weight_transfer_config": object()}, "--weight-transfer-config"),
        ({"hosts": {"count": 2}}, "several hosts"),
        ({"second": True}, '"cpu_sampling" is "auto"'),
        ({"second": True, "cpu_sampling": "per_row"}, '"cpu_sampling" is "per_row"'),
    ],
)
def test_what_cannot_be_shared_is_said(engine_config, monkeypatch, change, reason):
    module = "sipipe.engine.layers.vocabulary"
    settings = {key: value for key, value in change.items() if key in ("hosts", "cpu_sampling")}
    monkeypatch.setattr(f"{module}.device_may_draw", lambda: "second" in change)
    for name in {"lora_config", "quant_config", "weight_transfer_config"} & change.keys():
        monkeypatch.setattr(engine_config, name, change[name])
    for name, value in change.get("model_config", {}).items():
        monkeypatch.setattr(engine_config.model_config, name, value)
    parts, layers, said = vocabulary(engine_config, vocabulary="shared", **settings)
    assert (parts, layers) == ((), (7, 1))
    assert reason in said


def test_devices_that_may_draw_share_where_samplers_draw_all_rows(engine_config, monkeypatch):
    monkeypatch.setattr("sipipe.engine.layers.vocabulary.device_may_draw", lambda: True)
    for asked in ("auto", "shared"):
        parts, layers, _ = vocabulary(engine_config, vocabulary=asked, cpu_sampling="on")
        assert (parts, layers) == ((0.5, 0.5), (4, 4))


@given(
    ranks=st.integers(1, 4),
    vocab=st.integers(1, 5000),
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
)
def test_columns_of_all_writers_cover_the_vocabulary(ranks, vocab, weights):
    shard = -(-vocab // ranks)
    own = [(min(r * shard, vocab), min((r + 1) * shard, vocab)) for r in range(ranks)]
    parts = [weight / sum(weights) for weight in weights]
    bounds = columns(own, parts)
    assert len(bounds) == ranks * len(parts) + 1
    assert (bounds[0], bounds[-1]) == (0, vocab)
    for rank, (start, stop) in enumerate(own):
        mine = bounds[rank * len(parts) : (rank + 1) * len(parts) + 1]
        assert (mine[0], mine[-1]) == (start, stop), "of one rank's rows"
        for (first, last), part in zip(pairwise(mine), parts, strict=True):
            assert abs(last - first - part * (stop - start)) <= 64
