"""A checkpoint in 8 bits: what its numbers say of the model's, and what is refused."""

import json

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from benchmarks.make_model.checkpoint import make_model
from benchmarks.make_model.int8 import QUANTIZATION, STEPS, make_int8, perplexities, rounded
from hypothesis import given
from hypothesis import strategies as st

from sipipe.errors import ConfigError

NUMBERS = st.floats(-1e6, 1e6, width=32).filter(lambda number: abs(number) > 1e-6)


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_row_is_off_by_half_a_step_at_most(rows):
    values = torch.tensor(rows)
    steps, scale = rounded(values)
    assert steps.dtype == torch.int8
    assert steps.abs().amax(dim=-1).tolist() == [STEPS] * len(rows)
    off = (steps * scale - values).abs()
    assert (off <= scale * 0.501).all()


def test_layers_are_in_8_bits_and_the_rest_is_as_it_was(tmp_path):
    from safetensors.torch import load_file

    model, eight = tmp_path / "model", tmp_path / "int8"
    make_model("llama", model)
    make_int8(model, eight)
    before, after = load_file(model / "model.safetensors"), load_file(eight / "model.safetensors")
    for name, weight in before.items():
        if name.endswith("_proj.weight"):
            restored = after[name].float() * after[f"{name}_scale"]
            assert (restored - weight.float()).abs().max() <= after[f"{name}_scale"].max() * 0.501
        else:
            assert torch.equal(after[name], weight)
    assert json.loads((eight / "config.json").read_text())["quantization_config"] == QUANTIZATION
    assert (eight / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    exact, rough = perplexities(model, "The pipeline has several stages. " * 8)
    assert rough == pytest.approx(exact, rel=0.1)
    assert rough != exact


def test_what_it_cannot_write_is_refused(tmp_path):
    model = tmp_path / "model"
    make_model("llama", model)
    with pytest.raises(ConfigError, match=r"is there already"):
        make_int8(model, model)
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"is no llama with a model\.safetensors"):
        make_int8(model, tmp_path / "int8")
