"""Which options are refused, and which take vLLM's own path; no engine is started."""

from types import SimpleNamespace

import pytest

from sipipe.config import SiPipeConfig
from sipipe.engine import compatibility as compat
from sipipe.errors import ConfigError, UnsupportedError


def vllm_config(**changes):
    """The parts of a VllmConfig that the choice looks at, all plain; ``a__b`` sets ``a.b``."""
    parts = {
        "parallel_config": {
            "data_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "nnodes": 1,
            "enable_eplb": False,
            "enable_elastic_ep": False,
        },
        "model_config": {
            "runner_type": "generate",
            "logits_processors": None,
            "is_multimodal_model": False,
            "is_encoder_decoder": False,
            "is_hybrid": False,
            "is_attention_free": False,
            "return_sampling_mask": False,
            "enable_prompt_embeds": False,
            "is_diffusion": False,
        },
        "aux_output_config": {"enabled": False},
        "scheduler_config": {"async_scheduling": False},
    }
    names = ("speculative_config", "kv_transfer_config", "ec_transfer_config", "watermark_config")
    flat = dict.fromkeys(names)
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            flat[name] = value
    return SimpleNamespace(
        additional_config=None,
        **{name: SimpleNamespace(**values) for name, values in parts.items()},
        **flat,
    )


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"speculative_config": object()}, "--speculative-config"),
        ({"parallel_config__data_parallel_size": 2}, "--data-parallel-size"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"parallel_config__nnodes": 2}, "--nnodes"),
        ({"parallel_config__enable_eplb": True}, "--enable-eplb"),
        ({"parallel_config__enable_elastic_ep": True}, "--enable-elastic-ep"),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"ec_transfer_config": object()}, "--ec-transfer-config"),
    ],
)
def test_what_stages_cannot_serve_is_refused_by_its_option(changes, option):
    with pytest.raises(UnsupportedError, match=option) as error:
        compat.check_features(vllm_config(**changes))
    assert "\n" not in str(error.value)


def test_a_plain_engine_is_taken():
    compat.check_features(vllm_config())
    assert not compat.why_not_sipipe(vllm_config(), SiPipeConfig())


@pytest.fixture
def on_gpu(monkeypatch):
    """A platform that is not the CPU one; returns what sets vLLM's choice of a runner."""
    monkeypatch.setattr(compat, "current_platform", SimpleNamespace(is_cpu=lambda: False))

    def choose(second):
        monkeypatch.setattr(compat, "uses_second_runner", lambda _: second)

    return choose


@pytest.mark.parametrize("special", ["is_multimodal_model", "is_hybrid", "is_attention_free"])
def test_the_second_runner_takes_them_and_the_first_is_vllms_path(monkeypatch, special):
    config = vllm_config(**{f"model_config__{special}": True})
    assert not compat.why_not_sipipe(config, SiPipeConfig())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "second runner" in compat.why_not_sipipe(config, SiPipeConfig())


@pytest.mark.parametrize("special", ["is_multimodal_model", "is_hybrid", "is_attention_free"])
def test_gpu_stages_stand_on_vllms_second_runner(on_gpu, special):
    on_gpu(second=True)
    assert not compat.why_not_sipipe(vllm_config(), SiPipeConfig(cpu_sampling="on"))
    # The runner is vLLM's own, and so are encoders and recurrent states.
    assert not compat.why_not_sipipe(
        vllm_config(**{f"model_config__{special}": True}), SiPipeConfig()
    )


def test_vllms_first_runner_on_a_gpu_takes_vllms_path(on_gpu):
    on_gpu(second=False)
    assert "second runner" in compat.why_not_sipipe(vllm_config(), SiPipeConfig())
    with pytest.raises(ConfigError, match=r'"cpu_sampling" is "on", but .*second runner'):
        compat.why_not_sipipe(vllm_config(), SiPipeConfig(cpu_sampling="on"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"watermark_config": object()}, "watermark"),
        ({"model_config__is_diffusion": True}, "diffusion"),
        ({"aux_output_config__enabled": True}, "routed experts"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_what_the_second_runner_samples_itself_takes_vllms_path(on_gpu, changes, reason):
    on_gpu(second=True)
    assert reason in compat.why_not_sipipe(vllm_config(**changes), SiPipeConfig())


def test_which_runner_is_vllms_choice_but_on_cpus(monkeypatch):
    """There it is the second, unless another was asked for, or vLLM's sampler is needed."""
    asked, config = [], vllm_config()
    second = property(lambda config: asked.append(config) or True)
    monkeypatch.setattr(
        compat, "VllmConfig", type("VllmConfig", (), {"use_v2_model_runner": second})
    )
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert compat.uses_second_runner(config)
    assert not compat.uses_second_runner(vllm_config(model_config__runner_type="pooling"))
    for said in ("0", "1"):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", said)
        assert compat.uses_second_runner(config) is (said == "1")
    assert not asked
    monkeypatch.setattr(compat, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert compat.uses_second_runner(config)
    assert asked == [config]


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({"watermark_config": object()}, {}, "--watermark-config.*needs Triton on CPUs"),
        ({}, {"cpu_sampling": "off"}, '"cpu_sampling": "off".*VLLM_USE_V2_MODEL_RUNNER=1'),
    ],
)
def test_a_second_runner_that_would_have_to_draw_on_a_cpu_is_refused(
    monkeypatch, changes, settings, reason
):
    config = vllm_config(**changes)
    config.additional_config = {"sipipe": settings}
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert compat.uses_second_runner(config)
    with pytest.raises(ConfigError, match=reason) as error:
        compat.check_second_runner(config)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(compat, "HAS_TRITON", True)
    compat.check_second_runner(config)


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({"model_config__runner_type": "pooling"}, {}, "pooling"),
        ({"model_config__logits_processors": ["a.B"]}, {}, "--logits-processors"),
        ({"model_config__is_encoder_decoder": True}, {}, "encoder-decoder"),
        ({"model_config__return_sampling_mask": True}, {}, "--return-sampling-mask"),
        ({"model_config__enable_prompt_embeds": True}, {}, "--enable-prompt-embeds"),
        ({"scheduler_config__async_scheduling": True}, {}, "asynchronous"),
        ({}, {"cpu_sampling": "off"}, '"cpu_sampling"'),
    ],
)
def test_what_samplers_cannot_serve_takes_vllms_path(changes, settings, reason):
    found = compat.why_not_sipipe(vllm_config(**changes), SiPipeConfig.from_dict(settings))
    assert reason in found


@pytest.mark.parametrize("asked", ["on", "per_row"])
def test_insisting_on_sipipes_path_is_an_error_where_it_cannot_be_had(asked):
    config = vllm_config(model_config__runner_type="pooling")
    with pytest.raises(ConfigError, match=f'"cpu_sampling" is "{asked}", but pooling'):
        compat.why_not_sipipe(config, SiPipeConfig(cpu_sampling=asked))


def test_a_choice_per_row_is_for_devices_that_draw(monkeypatch):
    settings = SiPipeConfig(cpu_sampling="per_row")
    with pytest.raises(ConfigError, match=r'"cpu_sampling" is "per_row".*set it to "auto"'):
        compat.why_not_sipipe(vllm_config(), settings)
    monkeypatch.setattr(compat, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(compat, "uses_second_runner", lambda _: True)
    assert not compat.why_not_sipipe(vllm_config(), settings)
