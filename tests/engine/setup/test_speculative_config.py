"""Settings of speculative decoding that the user leaves out, and those that are refused."""

from types import SimpleNamespace

import pytest

from sipipe.engine.setup import speculative_config
from sipipe.engine.setup.speculative_config import LENGTHS, fill_in
from sipipe.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize(
    ("asked", "lookup"),
    [({}, (2, 4)), ({"prompt_lookup_max": 3}, (None, 3)), ({"prompt_lookup_min": 5}, (5, None))],
)
def test_what_is_not_said_is_filled_in(asked, lookup):
    settings = filled({"method": "ngram", **asked})
    assert settings["num_speculative_tokens"] == 16
    assert (settings.get("prompt_lookup_min"), settings.get("prompt_lookup_max")) == lookup


def filled(config=None, method=None, model=None, tokens=None):
    args = SimpleNamespace(speculative_config=config, spec_method=method, spec_model=model)
    args.spec_tokens = tokens
    fill_in(args)
    return args.speculative_config


@pytest.mark.parametrize("config", [[1], "ngram", 5, True, 0, []])
def test_what_is_no_object_is_refused(config):
    with pytest.raises(ConfigError, match="--speculative-config must be an object such as"):
        filled(config)


def test_what_is_said_stays():
    assert filled() is None
    config = filled({"method": "ngram", "num-speculative-tokens": 3})
    assert config["num_speculative_tokens"] == 3
    assert filled(method="ngram")["num_speculative_tokens"] == 16
    assert "num_speculative_tokens" not in filled(method="ngram", tokens=4), "vLLM has the option"
    assert filled({"num_speculative_tokens": 2}) == {"num_speculative_tokens": 2} | LENGTHS


@pytest.mark.parametrize("method", ["dflash", "dspark", "medusa", "ngram_gpu"])
def test_other_methods_are_refused_before_their_model_is_looked_for(method):
    for words in ({"config": {"method": method, "model": "nobody/nothing"}}, {"method": method}):
        with pytest.raises(UnsupportedError, match=f'^--speculative-config: .*"{method}"') as error:
            filled(**words)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "method", ["eagle", "eagle3", "mtp", "deepseek_mtp", "mimo_mtp", "draft_model"]
)
def test_heads_are_said_as_vllm_spells_them(method):
    config = {"method": method, "model": "a/head", "num_speculative_tokens": 3}
    assert filled(dict(config)) == config


def test_what_a_model_is_vllm_says():
    assert filled({"model": "a/head", "num_speculative_tokens": 3}) == {
        "model": "a/head",
        "num_speculative_tokens": 3,
    }


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(speculative_config, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match="pip install arctic-inference"):
        filled({"method": "suffix"})
