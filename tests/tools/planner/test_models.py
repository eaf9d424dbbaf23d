"""Model facts: our count against the publishers', and what a config.json without fields says."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tools.planner.planned import config

from sipipe.engine.layers.hf_config import facts_from_config
from sipipe.errors import ConfigError, UnsupportedError
from sipipe.tools.planner.models import builtin_models, load_model
from sipipe.tools.planner.placement import kv_bytes, kv_bytes_per_token, place

# Billions of parameters, all of them and those that one token meets, as the sources state them.
PUBLISHED = {
    "llama-3.1-8b": (8.03, None),
    "llama-3.1-70b": (70.6, None),
    "llama-3.1-405b": (405.9, None),
    "qwen2.5-0.5b": (0.494, None),
    "qwen2.5-7b": (7.62, None),
    "qwen2.5-72b": (72.7, None),
    "qwen3-0.6b": (0.6, None),
    "qwen3-1.7b": (1.72, None),
    "qwen3-4b": (4.02, None),
    "qwen3-8b": (8.19, None),
    "qwen3-14b": (14.8, None),
    "qwen3-32b": (32.8, None),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235.0, 22.0),
    "mixtral-8x7b": (46.7, 12.9),
    "deepseek-v2.5": (236.0, 21.0),
    "deepseek-v3": (671.0, 37.0),
}


@pytest.mark.parametrize("name", builtin_models())
def test_parameters_agree_with_the_publisher(name):
    facts, (parameters, active) = load_model(name), PUBLISHED[name]
    assert facts.parameters / 1e9 == pytest.approx(parameters, rel=0.01)
    if active is not None:
        assert facts.active_parameters / 1e9 == pytest.approx(active, rel=0.03)
    assert builtin_models()[name]["source"]


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    # 2 x layers x KV heads x head dimension x 2 bytes; (512 + 64) x layers x 2 for MLA
    [("llama-3.1-8b", 128), ("llama-3.1-70b", 320), ("mixtral-8x7b", 128), ("deepseek-v3", 68.625)],
)
def test_kv_bytes_per_token(name, kilobytes):
    assert kv_bytes_per_token(load_model(name)) == kilobytes * 1024


def test_kv_cache_shards_by_head_and_the_latent_of_mla_not_at_all():
    def shards(model, t):
        facts = load_model(model)
        (stage,) = place(facts.layers, 1, t, 16).stages
        return kv_bytes_per_token(facts) / kv_bytes(facts, stage, facts.activation_bytes)

    assert [shards("llama-3.1-70b", t) for t in (1, 4, 8, 16)] == [1, 4, 8, 8]
    assert [shards("deepseek-v3", t) for t in (1, 8, 16)] == [1, 1, 1]


def test_experts_touched_between_the_chosen_and_all():
    moe = load_model("deepseek-v3").moe
    assert moe.touched(1) == pytest.approx(moe.chosen)
    assert moe.touched(100_000) == pytest.approx(moe.experts)
    assert 100 < moe.touched(20) < 160


def test_a_directory_a_file_and_a_repository_name_are_the_same_model(tmp_path):
    fields = dict(builtin_models()["qwen2.5-0.5b"]["config"])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    wanted = load_model("qwen2.5-0.5b").parameters
    for model in (str(tmp_path), str(tmp_path / "config.json"), "Qwen/Qwen2.5-0.5B-Instruct"):
        assert load_model(model).parameters == wanted


def test_missing_fields_are_all_named(tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "vocab_size": 10}')
    with pytest.raises(ConfigError) as caught:
        load_model(str(tmp_path))
    for field in ("hidden_size", "num_attention_heads", "intermediate_size"):
        assert field in str(caught.value)
    assert "\n" not in str(caught.value)


BASE = config(layers=2, vocabulary=100, hidden=64, heads=4, intermediate=128)


def quantized(method, **more):
    return {"quantization_config": {"quant_method": method, **more}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers must be a whole number from 1 to 10,000"),
        ({"hidden_size": 10**400}, "hidden_size must be a whole number from 1 to"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_local_experts": 4}, "num_experts_per_tok"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"kv_lora_rank": 8}, "qk_rope_head_dim"),
        (quantized("new"), "--weight-bits"),
    ],
)
def test_bad_fields_are_named(change, named):
    with pytest.raises(ConfigError, match=named):
        facts_from_config(BASE | change, name="m")


@pytest.mark.parametrize(
    "change",
    [{"layer_types": ["linear_attention"]}, {"mamba_d_state": 16}, {"is_encoder_decoder": True}],
)
def test_architectures_that_the_model_does_not_describe_are_refused(change):
    with pytest.raises(UnsupportedError, match="does not know"):
        facts_from_config(BASE | change, name="m")


@pytest.mark.parametrize(
    ("change", "width", "bits"),
    [
        ({}, 2.0, 16),
        ({"torch_dtype": "float32"}, 4.0, 16),
        (quantized("fp8"), 1.0, 8),
        (quantized("gptq", bits=8), 1.0, 16),
        (quantized("awq", bits=4, group_size=128), 4.125 / 8, 16),
        (quantized("mxfp4"), 4.25 / 8, 16),
        (quantized("modelopt", quant_algo="NVFP4"), 4.5 / 8, 4),
        (quantized("modelopt", quant_algo="FP8"), 1.0, 8),
    ],
)
def test_width_of_weights_and_of_products(change, width, bits):
    """Only checkpoints for narrow units compute in them; others are widened."""
    facts = facts_from_config(BASE | change, name="m")
    assert (facts.weight_bytes, facts.arithmetic_bits) == (width, bits)


FIELDS = sorted(
    {key for entry in builtin_models().values() for key in entry["config"]}
    | {"head_dim", "n_shared_experts", "shared_expert_intermediate_size", "layer_types", "dtype"}
    # Of layers that have to be on one stage.
    | {"num_kv_shared_layers", "index_topk", "index_topk_freq", "index_skip_topk_offset"}
    | {"index_topk_pattern", "vision_config"}
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(2**30, 2**70),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.sampled_from(["quant_method", "bits", "group_size"]), st.integers(-1, 9)),
    st.text("FS", max_size=4),
    st.fixed_dictionaries({"deepstack_visual_indexes": st.one_of(st.booleans(), st.just([1, 2]))}),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(builtin_models())), st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_config_is_read_or_refused_in_one_line(name, changes):
    facts, message = None, ""
    try:
        facts = facts_from_config(builtin_models()[name]["config"] | changes, name="m")
    except (ConfigError, UnsupportedError) as error:
        message = str(error)
    assert "\n" not in message
    assert (facts is None) == bool(message)
    if facts is not None:
        assert 0 < facts.active_parameters <= facts.parameters


def test_nested_text_config_and_unreadable_files(tmp_path):
    nested = {"model_type": "some_vl", "text_config": BASE}
    assert facts_from_config(nested, name="m").layers == 2
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(ConfigError, match="not JSON"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("model", ["~nobody-of-that-name/model", "x" * 300])
def test_a_name_that_no_file_can_have_is_one_line(model):
    with pytest.raises(ConfigError, match=r"^MODEL: [^\n]+$"):
        load_model(model)
