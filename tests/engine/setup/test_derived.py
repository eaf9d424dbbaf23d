"""Settings and model facts are worked out once for each configuration, whoever asks."""

import copy
import pickle
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_model.checkpoint import make_model

from sipipe.config import SiPipeConfig
from sipipe.engine.layers import decoder as decoders
from sipipe.engine.layers.decoder import decoder_of
from sipipe.engine.setup.decide import decide
from sipipe.engine.setup.derived import settings_of
from sipipe.engine.start import arguments, plugin
from sipipe.errors import ConfigError


def configuration(**settings):
    """The parts of a ``PipelineVllmConfig`` that settings are read from."""
    return SimpleNamespace(additional_config={"sipipe": settings}, derived={})


@pytest.fixture
def parsed(monkeypatch):
    """Settings that have been parsed, in their order."""
    sources = []
    parse = SiPipeConfig.from_additional_config

    def counted(source):
        sources.append(source)
        return parse(source)

    monkeypatch.setattr(SiPipeConfig, "from_additional_config", counted)
    return sources


def test_settings_are_parsed_once_and_go_with_the_configuration(parsed):
    config = configuration(inflight=3)
    assert settings_of(config) is settings_of(config)
    assert settings_of(copy.copy(config)) is settings_of(config)
    assert settings_of(pickle.loads(pickle.dumps(config))) == SiPipeConfig(inflight=3)
    assert len(parsed) == 1


def test_stock_vllms_configuration_has_settings_too():
    config = SimpleNamespace(additional_config={"sipipe": {"inflight": 3}})
    assert settings_of(config) == settings_of(config) == SiPipeConfig(inflight=3)


def test_settings_that_were_replaced_are_parsed_anew():
    config = configuration(inflight=3)
    assert settings_of(config).inflight == 3
    other = copy.copy(config)
    other.additional_config = {"sipipe": {"inflight": 5}}
    assert settings_of(other).inflight == 5
    assert settings_of(config).inflight == 3


def test_wrong_settings_are_refused_each_time():
    config = configuration(inflight=0)
    for _ in range(2):
        with pytest.raises(ConfigError, match='"inflight"'):
            settings_of(config)


def test_a_setup_is_decided_by_one_reading_of_the_configuration(tmp_path, monkeypatch, parsed):
    if not arguments.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    model = make_model("llama", tmp_path / "llama")
    args = arguments.parse_engine_args([str(model), "-pp", "2", "--max-model-len", "256"], {})
    engine_args = arguments.AsyncEngineArgs.from_cli_args(args)
    facts_read = []
    read_facts = decoders.facts_from_config

    def counted(fields, **names):
        facts_read.append(names)
        return read_facts(fields, **names)

    monkeypatch.setattr(decoders, "facts_from_config", counted)
    parsed.clear()
    vllm_config = plugin.engine_config(engine_args)
    setup = decide(vllm_config)
    # What the engine's process and its scheduler get.
    received = pickle.loads(pickle.dumps(vllm_config))
    received_setup = decide(received)
    assert received.max_concurrent_batches == setup.slots + vllm_config.ahead
    assert decoder_of(received) == setup.decoder == received_setup.decoder
    # The plugin checks what the user gave before there is a configuration.
    assert len(parsed) == 2
    assert len(facts_read) == 1
