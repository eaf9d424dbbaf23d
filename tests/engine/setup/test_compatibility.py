"""Which options are refused, and which have vLLM's sampler draw; no engine is started."""

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from vllm.model_executor.models.registry import ModelRegistry

from sipipe.config import SiPipeConfig
from sipipe.cores import Core
from sipipe.engine.setup import compatibility as compat
from sipipe.errors import ConfigError, UnsupportedError

REPLICAS = {"parallel_config__data_parallel_size": 2}
POOLING = {"model_config__runner_type": "pooling"}
HOSTS = {"count": 2, "address": "x"}
IN_SHM = SimpleNamespace(mm_processor_cache_type="shm")


def drafts(method="ngram", *, by_size=False):
    """A ``--speculative-config``."""
    return SimpleNamespace(
        method=method,
        uses_dynamic_speculative_decoding=lambda: by_size,
        rejection_sample_method="standard",
    )


def draft_model(*, images=False, states=False):
    """The parts of a draft model's configuration that are looked at."""
    return SimpleNamespace(is_multimodal_model=images, has_inner_state=states)


def head(*, modules=1, gemma4=False, ranks=1, **changes):
    """A ``--speculative-config`` of a head, as vLLM fills it in."""
    fields = {
        "draft_sample_method": "greedy",
        "enable_adaptive_verification": False,
        "parallel_drafting": False,
        "use_heterogeneous_vocab": False,
        "draft_model_config": draft_model(),
    }
    fields |= vars(drafts("mtp")) | changes
    return SimpleNamespace(
        **fields,
        uses_draft_model=lambda: fields["method"] == "draft_model",
        use_multi_module_mtp=lambda: modules > 1,
        use_gemma4_mtp=lambda: gemma4,
        draft_parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )


def vllm_config(**changes):
    """The parts of a VllmConfig that the choice looks at, all plain; ``a__b`` sets ``a.b``."""
    parts = {
        "load_config": {"load_format": "auto"},
        "parallel_config": {
            "worker_cls": next(iter(compat.STOCK_WORKERS)),
            "pipeline_parallel_size": 2,
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "data_parallel_size_local": 2,
            "data_parallel_backend": "mp",
            "placement_group": None,
            "world_size": 2,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "nnodes": 1,
            "enable_eplb": False,
            "enable_elastic_ep": False,
            "numa_bind": False,
        },
        "model_config": {
            "runner_type": "generate",
            "architecture": "LlamaForCausalLM",
            "is_moe": False,
            "multimodal_config": None,
            "logits_processors": None,
            "is_multimodal_model": False,
            "is_encoder_decoder": False,
            "is_hybrid": False,
            "is_attention_free": False,
            "return_sampling_mask": False,
            "enable_prompt_embeds": False,
            "is_diffusion": False,
            "enable_trace_replay": False,
            "has_inner_state": False,
            "rswa_window": None,
        },
        "cache_config": {
            "kv_sharing_fast_prefill": False,
            "kv_offloading_size": None,
            "kv_offloading_backend": "native",
        },
        "observability_config": {"cudagraph_metrics": False},
        "aux_output_config": {"enabled": False},
        "scheduler_config": {
            "async_scheduling": False,
            "scheduler_cls": None,
            "prefill_schedule_interval": 1,
            "stream_interval": 1,
        },
    }
    names = ("speculative_config", "kv_transfer_config", "ec_transfer_config", "watermark_config")
    flat = dict.fromkeys((*names, "additional_config", "is_mm_encoder_only", "lora_config"))
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            flat[name] = value
    return SimpleNamespace(
        **{name: SimpleNamespace(**values) for name, values in parts.items()}, **flat
    )


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"speculative_config": drafts("medusa")}, '--speculative-config.*method "medusa"'),
        *(
            (
                {"speculative_config": head(**asked), **changes},
                f'--speculative-config.*method "mtp" with {reason}',
            )
            for asked, changes, reason in (
                ({"modules": 2}, {}, "several MTP modules"),
                ({"gemma4": True}, {}, "Gemma 4's"),
                ({}, {"lora_config": object()}, "--enable-lora"),
                ({"draft_sample_method": "probabilistic"}, {}, ".*probabilistic"),
                ({"ranks": 2}, {}, '"draft_tensor_parallel_size" 2'),
                ({"enable_adaptive_verification": True}, {}, ".*enable_adaptive_verification"),
                ({"parallel_drafting": True}, {}, ".*parallel_drafting"),
            )
        ),
        *(
            (
                {"speculative_config": head(method="draft_model", **asked)},
                f'--speculative-config.*method "draft_model" with {reason}',
            )
            for asked, reason in (
                ({"draft_model_config": draft_model(images=True)}, "a multi-modal draft model"),
                ({"draft_model_config": draft_model(states=True)}, "a draft model with recurrent"),
                ({"use_heterogeneous_vocab": True}, ".*use_heterogeneous_vocab"),
            )
        ),
        ({"speculative_config": drafts(by_size=True)}, "--speculative-config.*per_batch_size"),
        *(
            ({"speculative_config": drafts(), name: value}, f"--speculative-config.*{reason}")
            for name, value, reason in (
                ("model_config__has_inner_state", True, "recurrent"),
                ("model_config__is_encoder_decoder", True, "encoder-decoder"),
                ("cache_config__kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
                ("kv_transfer_config", object(), "--kv-transfer-config"),
            )
        ),
        *(
            (REPLICAS | changes, f"--data-parallel-size.*{reason}")
            for changes, reason in (
                ({"model_config__is_moe": True}, "experts: start a server for each"),
                (
                    {"parallel_config__data_parallel_size": 4},
                    " on several .*: start a server on each",
                ),
                ({"parallel_config__data_parallel_backend": "ray"}, "by Ray: start a server"),
                ({"parallel_config__placement_group": object()}, "by Ray: start a server"),
                ({"additional_config": {"sipipe": {"hosts": HOSTS}}}, ": start a server on each"),
            )
        ),
        (
            dict.fromkeys(
                (
                    "parallel_config__data_parallel_size",
                    "parallel_config__data_parallel_size_local",
                ),
                10**9,
            ),
            "--data-parallel-size above 10000",
        ),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"parallel_config__nnodes": 2}, "--nnodes.*: sipipe serve takes it"),
        ({"parallel_config__enable_eplb": True}, "--enable-eplb"),
        ({"parallel_config__enable_elastic_ep": True}, "--enable-elastic-ep"),
        ({"ec_transfer_config": object()}, "--ec-transfer-config.*: leave it out, the first"),
        ({"load_config__load_format": "ipc_cache"}, "--load-format ipc_cache"),
        ({"cache_config__kv_offloading_size": 1.0}, "--kv-offloading-size on CPUs: leave it out"),
        ({"is_mm_encoder_only": True}, "--mm-encoder-only"),
        ({"parallel_config__numa_bind": True}, "--numa-bind.*: leave.*cores"),
        ({"model_config__multimodal_config": IN_SHM}, "--mm-processor-cache-type shm"),
        (POOLING | {"scheduler_config__stream_interval": 8}, "--stream-interval.*: leave it out"),
    ],
)
def test_what_stages_cannot_serve_is_refused_by_its_option(changes, option):
    with pytest.raises(UnsupportedError, match=option) as error:
        compat.check_features(vllm_config(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", compat.UNCUT)
def test_models_whose_stages_fail_at_a_request_are_refused_by_name(name):
    assert name in ModelRegistry.models, "vLLM has another name for it now"
    changes = {"model_config__architecture": name}
    with pytest.raises(UnsupportedError, match=f"^{name}: .*--pipeline-parallel-size 1$"):
        compat.check_features(vllm_config(**changes))
    compat.check_features(vllm_config(**changes, parallel_config__pipeline_parallel_size=1))


def test_vllms_first_runner_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(UnsupportedError, match=r"VLLM_USE_V2_MODEL_RUNNER=0.*: unset it"):
        compat.check_features(vllm_config())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    compat.check_features(vllm_config())


def test_a_plain_engine_and_replicas_on_one_host_are_taken():
    compat.check_features(vllm_config())
    compat.check_features(vllm_config(**REPLICAS))
    compat.check_features(vllm_config(**POOLING))
    compat.check_features(vllm_config(scheduler_config__stream_interval=8))
    assert not compat.why_not_samplers(vllm_config(), SiPipeConfig())


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"model_config__logits_processors": ["x"]}, {}),
        ({}, {"cpu_sampling": "off"}),
        ({}, {"cpu_sampling": "per_row"}),
    ],
)
def test_drafts_are_for_samplers_to_verify(changes, settings):
    config = vllm_config(speculative_config=drafts(), **changes)
    compat.check_features(config)
    with pytest.raises(ConfigError, match="--speculative-config"):
        compat.why_not_samplers(config, SiPipeConfig(**settings))


def test_drafts_of_a_head_are_verified_where_vllms_sampler_draws(request):
    config = vllm_config(
        speculative_config=head(), parallel_config__enable_batch_sharded_sampling=None
    )
    off = SiPipeConfig(cpu_sampling="off")
    with pytest.raises(ConfigError, match=r'"cpu_sampling" is "off".*no kernels.*set it to "auto"'):
        compat.why_not_samplers(config, off)
    assert not compat.why_not_samplers(config, SiPipeConfig())
    request.getfixturevalue("with_kernels")
    assert '"off"' in compat.why_not_samplers(config, off)
    assert not compat.why_not_samplers(config, SiPipeConfig())
    config.parallel_config.enable_batch_sharded_sampling = True
    with pytest.raises(ConfigError, match="--enable-batch-sharded-sampling"):
        compat.why_not_samplers(config, off)
    for changes in ({"model_config__logits_processors": ["x"]}, {"watermark_config": object()}):
        config = vllm_config(speculative_config=head(), **changes)
        for settings in (off, SiPipeConfig()):
            with pytest.raises(ConfigError, match="leave one of the two out"):
                compat.why_not_samplers(config, settings)
    config = vllm_config(speculative_config=drafts())
    with pytest.raises(ConfigError, match="they propose them"):
        compat.why_not_samplers(config, off)


@pytest.fixture
def with_kernels(monkeypatch):
    """A device that has the kernels of vLLM's sampler."""
    monkeypatch.setattr(compat, "current_platform", SimpleNamespace(is_cpu=lambda: False))


@pytest.mark.parametrize(
    "special", ["is_multimodal_model", "is_hybrid", "is_attention_free", "is_encoder_decoder"]
)
def test_samplers_draw_for_every_kind_of_model(special):
    config = vllm_config(**{f"model_config__{special}": True})
    assert not compat.why_not_samplers(config, SiPipeConfig(cpu_sampling="on"))


BY_KERNELS = [
    ({"watermark_config": object()}, "--watermark-config"),
    ({"model_config__return_sampling_mask": True}, "--return-sampling-mask"),
    ({"model_config__is_diffusion": True}, "diffusion"),
    ({"model_config__enable_trace_replay": True}, "--enable-trace-replay"),
]


@pytest.mark.parametrize(("changes", "option"), BY_KERNELS)
def test_what_only_kernels_do_is_refused_without_them(request, changes, option):
    with pytest.raises(UnsupportedError, match=f"{option}.*Triton") as error:
        compat.check_kernels(vllm_config(**changes))
    assert "\n" not in str(error.value)
    request.getfixturevalue("with_kernels")
    compat.check_kernels(vllm_config(**changes))


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({"model_config__runner_type": "pooling"}, {}, "pooling"),
        ({"model_config__logits_processors": ["a.B"]}, {}, "--logits-processors"),
        ({"model_config__enable_prompt_embeds": True}, {}, "--enable-prompt-embeds"),
        *((changes, {}, option) for changes, option in BY_KERNELS),
        ({"aux_output_config__enabled": True}, {}, "routed experts"),
        ({}, {"cpu_sampling": "off"}, '"cpu_sampling"'),
    ],
)
def test_what_samplers_cannot_serve_is_vllms_samplers(changes, settings, reason):
    config = SiPipeConfig.from_dict(settings)
    assert reason in compat.why_not_samplers(vllm_config(**changes), config)


def test_installed_logits_processors_are_vllms_samplers(monkeypatch):
    config = vllm_config()
    assert compat.why_not_samplers(config, SiPipeConfig()) == ""
    installed = {"vllm.logits_processors": [EntryPoint("safety", "a:B", "vllm.logits_processors")]}
    monkeypatch.setattr(compat, "entry_points", lambda group: installed[group])
    assert "installed logits processors (safety)" in compat.why_not_samplers(config, SiPipeConfig())


@pytest.mark.parametrize("cpu", [False, True])
def test_figures_of_graphs_are_vllms_samplers_where_there_are_graphs(monkeypatch, cpu):
    monkeypatch.setattr(compat.current_platform, "is_cpu", lambda: cpu)
    config = vllm_config(observability_config__cudagraph_metrics=True)
    assert ("--cudagraph-metrics" in compat.why_not_samplers(config, SiPipeConfig())) is not cpu


@pytest.mark.parametrize("asked", ["on", "per_row"])
def test_insisting_on_samplers_is_an_error_where_they_cannot_be_had(asked):
    config = vllm_config(model_config__runner_type="pooling")
    with pytest.raises(ConfigError, match=f'"cpu_sampling" is "{asked}", but pooling'):
        compat.why_not_samplers(config, SiPipeConfig(cpu_sampling=asked))


def test_a_choice_per_row_is_for_devices_that_draw(request):
    settings = SiPipeConfig(cpu_sampling="per_row")
    with pytest.raises(ConfigError, match=r'"cpu_sampling" is "per_row".*set it to "auto"'):
        compat.why_not_samplers(vllm_config(), settings)
    request.getfixturevalue("with_kernels")
    assert not compat.why_not_samplers(vllm_config(), settings)


ONE_SLOT = {
    "parallel_config__pipeline_parallel_size": 1,
    "additional_config": {"sipipe": {"cpu_sampling": "off", "inflight": 1}},
}
"""One stage that feeds itself the tokens that it draws."""
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"speculative_config": drafts()}, ""),
        ({"speculative_config": head()}, ""),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"aux_output_config__enabled": True}, "--enable-return-routed-experts"),
        ({"model_config__runner_type": "pooling"}, "pooling"),
        ({"model_config__is_diffusion": True}, "diffusion"),
        ({"max_concurrent_batches": 1}, '"inflight" of 1'),
        ({"max_concurrent_batches": 1, **ONE_SLOT}, ""),
        (
            {"max_concurrent_batches": 1, **ONE_SLOT, "speculative_config": head()},
            '"inflight" of 1',
        ),
        (
            {"max_concurrent_batches": 1, **ONE_SLOT, "additional_config": None},
            '"inflight" of 1',
        ),
        (
            {
                "max_concurrent_batches": 1,
                **ONE_SLOT,
                "parallel_config__pipeline_parallel_size": 2,
            },
            '"inflight" of 1',
        ),
        ({"scheduler_config__scheduler_cls": SCHEDULER}, "scheduler"),
        ({"additional_config": {"sipipe": {"scheduler": "vllm"}}}, "scheduler"),
    ],
)
def test_what_waits_for_tokens_is_not_scheduled_ahead_of_them(changes, reason):
    config = vllm_config(**{"max_concurrent_batches": 3, **changes})
    assert compat.schedules_ahead(config, None) == (not reason)
    assert compat.schedules_ahead(config, False) == 0
    if not reason:
        assert compat.schedules_ahead(config, True) == 1
        return
    with pytest.raises(UnsupportedError, match=f"--async-scheduling: not with.*{reason}"):
        compat.schedules_ahead(config, True)


@pytest.mark.parametrize(
    ("cpu", "workers", "cores", "ahead"),
    [(True, 1, 2, 0), (True, 1, 4, 1), (True, 2, 2, 1), (False, 1, 2, 1)],
)
def test_beside_an_only_worker_nothing_is_scheduled_ahead_unless_asked(
    monkeypatch, cpu, workers, cores, ahead
):
    """Its threads are on all cores, and wait for one another."""
    monkeypatch.setattr(compat.current_platform, "is_cpu", lambda: cpu)
    monkeypatch.setattr(compat, "this_machine", lambda: [Core((cpu,)) for cpu in range(cores)])
    config = vllm_config(max_concurrent_batches=2, parallel_config__world_size=workers)
    assert [compat.schedules_ahead(config, asked) for asked in (None, True)] == [ahead, 1]


@pytest.mark.parametrize(
    ("named", "refusal"),
    [
        ("vllm.v1.core.sched.async_scheduler.AsyncScheduler", "it schedules ahead"),
        ("sipipe.engine.scheduling.scheduler.AsyncPipelineScheduler", "it schedules ahead"),
        ("vllm.v1.core.sched.scheduler.NoSuch", "NoSuch"),
        ("nosuch.Scheduler", "No module named 'nosuch'"),
        ("NoSuch", "not enough values"),
        ("json.dumps", "no class"),
    ],
)
def test_a_scheduler_that_is_not_there_or_counts_tokens_before_they_come_is_refused(named, refusal):
    config = vllm_config(max_concurrent_batches=3, scheduler_config__scheduler_cls=named)
    with pytest.raises(ConfigError, match=f"--scheduler-cls {named}: .*{refusal}"):
        compat.schedules_ahead(config, None)
