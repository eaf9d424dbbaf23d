"""Features that SiPipe refuses at start-up, and those for which vLLM's own sampler has to draw.

Tokens are drawn by the CPU samplers or, for the options below, by vLLM's sampler on the last stage. It
is chosen once, at start-up, and logged. docs/compatibility.md is the user's view of the tables below.
"""

from importlib.metadata import entry_points

import msgspec
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.utils.import_utils import resolve_obj_by_qualname

from sipipe.config import SiPipeConfig
from sipipe.cores import MOST_PLANNED, alone, this_machine
from sipipe.engine.setup.derived import settings_of
from sipipe.engine.setup.draft_head import head_of
from sipipe.engine.setup.speculative_config import check_speculation
from sipipe.errors import ConfigError, UnsupportedError
from sipipe.kv_files import settings as kv_files

STOCK_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "sipipe.worker.hooks.vllm_workers.CPUStageWorker",
    "vllm.v1.worker.gpu_worker.Worker": "sipipe.worker.hooks.vllm_workers.GPUStageWorker",
}
"""SiPipe's worker classes, by the class of vLLM's that ``parallel_config`` names."""

UNCUT = {
    "Granite4VisionForConditionalGeneration": (
        "a later stage of vLLM's model waits for images' features that the one before does not send"
    ),
}
"""Models that vLLM cuts into stages which fail at a request, by architecture, with the cause."""

OTHERWISE = "leave it out, or use stock vLLM (vllm serve)"
"""Remedy for the options of :func:`check_features` that have none of their own."""


def check_features(vllm_config: VllmConfig) -> None:
    """Refuse what stages without a common process group cannot serve. Raises UnsupportedError or
    ConfigError: one line that names the option."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    if parallel.worker_cls not in {*STOCK_WORKERS, *STOCK_WORKERS.values()}:
        raise ConfigError(
            f"--worker-cls {parallel.worker_cls}: SiPipe brings its own worker class; leave the "
            "option out (this platform may not be supported)"
        )
    hosts = settings_of(vllm_config).hosts
    replicas = parallel.data_parallel_size > 1
    refused = {
        # vLLM has them wait for each other at every step.
        "--data-parallel-size of a mixture of experts: start a server for each and a load balancer": (
            replicas and model.is_moe
        ),
        "--data-parallel-size on several hosts or by Ray: start a server on each and a load balancer": (
            parallel.data_parallel_size_local < parallel.data_parallel_size
            or parallel.data_parallel_backend == "ray"
            or parallel.placement_group is not None
            or hosts.count > 1
        )
        and replicas,
        f"--data-parallel-size above {MOST_PLANNED}": parallel.data_parallel_size > MOST_PLANNED,
        "--prefill-context-parallel-size above 1": parallel.prefill_context_parallel_size > 1,
        "--decode-context-parallel-size above 1": parallel.decode_context_parallel_size > 1,
        "--nnodes above 1 here: sipipe serve takes it": parallel.nnodes > 1,
        "--ec-transfer-config (encoder cache connectors): leave it out, the first stage encodes": (
            vllm_config.ec_transfer_config is not None
        ),
        "--mm-encoder-only (an encoder without its model)": vllm_config.is_mm_encoder_only,
        "--enable-eplb (expert load balancing)": parallel.enable_eplb,
        "--enable-elastic-ep": parallel.enable_elastic_ep,
        '--numa-bind: leave it out, workers are placed by "cores" in the sipipe config': (
            parallel.numa_bind
        ),
        "--prefill-schedule-interval": vllm_config.scheduler_config.prefill_schedule_interval > 1,
        # vLLM's front end ends at the first request: it asks how many tokens that has drawn.
        "--stream-interval above 1 for a model that pools: leave it out, nothing is streamed": (
            vllm_config.scheduler_config.stream_interval > 1 and model.runner_type == "pooling"
        ),
        "--kv-offloading-size on CPUs: leave it out, it moves blocks from GPUs": (
            current_platform.is_cpu()
            and vllm_config.cache_config.kv_offloading_size is not None
            and vllm_config.cache_config.kv_offloading_backend == "native"
        ),
        "--load-format ipc_cache": vllm_config.load_config.load_format == "ipc_cache",
        # Its workers share a lock that only vLLM's own executor hands them.
        "--mm-processor-cache-type shm: take lru, its default": (
            model.multimodal_config is not None
            and model.multimodal_config.mm_processor_cache_type == "shm"
        ),
        "VLLM_USE_V2_MODEL_RUNNER=0 (vLLM's first model runner): unset it": (
            envs.VLLM_USE_V2_MODEL_RUNNER is not None and not envs.VLLM_USE_V2_MODEL_RUNNER
        ),
    }
    for option, is_used in refused.items():
        if is_used:
            remedy = "" if ": " in option else f": {OTHERWISE}"
            raise UnsupportedError(f"SiPipe does not support {option}{remedy}")
    check_cuttable(vllm_config)
    check_speculation(vllm_config)
    kv_files.check(vllm_config.kv_transfer_config)


def check_cuttable(vllm_config: VllmConfig) -> None:
    """Refuse several stages of a model whose stages fail at a request. Raises UnsupportedError: it
    names the model."""
    name = vllm_config.model_config.architecture
    if vllm_config.parallel_config.pipeline_parallel_size > 1 and name in UNCUT:
        raise UnsupportedError(f"{name}: {UNCUT[name]}: serve it with --pipeline-parallel-size 1")


def schedules_ahead(vllm_config: VllmConfig, requested: bool | None) -> int:
    """Number of microbatches, 0 or 1, that are scheduled before the tokens that they need have come.

    ``requested`` is vLLM's ``--async-scheduling``; None: as many as pay. Raises UnsupportedError: it is
    asked for with an option that it does not go with. ConfigError: a wrong ``--scheduler-cls``."""
    config = settings_of(vllm_config)
    scheduler = vllm_config.scheduler_config.scheduler_cls
    if scheduler is not None:
        _check_scheduler(scheduler)
    against = {
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
        "--enable-return-routed-experts": vllm_config.aux_output_config.enabled,
        "pooling models": vllm_config.model_config.runner_type == "pooling",
        "diffusion models": vllm_config.model_config.is_diffusion,
        '"inflight" of 1': (
            vllm_config.max_concurrent_batches == 1
            and not (_feeds_itself(vllm_config, config) and head_of(vllm_config) is None)
        ),
        "a scheduler that is not SiPipe's": config.scheduler != "pipeline" or scheduler is not None,
    }
    for reason, holds in against.items():
        if holds and requested:
            raise UnsupportedError(
                f"--async-scheduling: not with {reason}: leave one of the two out"
            )
        if holds:
            return 0
    if requested is not None:
        return int(requested)
    # Where one worker shares two cores with the engine, the threads of its products wait for one another
    # while the engine computes beside them, and it does not pay to schedule ahead.
    workers = vllm_config.parallel_config.world_size
    shares_cores = current_platform.is_cpu() and alone(this_machine(), workers)
    return 0 if shares_cores else 1


def _feeds_itself(vllm_config: VllmConfig, config: SiPipeConfig) -> bool:
    """True if tokens are drawn where they are embedded. They stay there, and an iteration of all
    sequences is launched behind the last one, as by vLLM's own asynchronous scheduling: one
    microbatch in flight is then enough to be ahead."""
    one_stage = vllm_config.parallel_config.pipeline_parallel_size == 1
    return one_stage and bool(_needs_vllms_sampler(vllm_config, config))


def _check_scheduler(name: str | type) -> None:
    """Refuse a ``--scheduler-cls`` that is not there, or that counts tokens before they have come: an
    engine that is not ahead would compute with them. Raises ConfigError."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    try:
        scheduler = resolve_obj_by_qualname(name) if isinstance(name, str) else name
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"--scheduler-cls {name}: {error}") from None
    if not isinstance(scheduler, type):
        raise ConfigError(f"--scheduler-cls {name}: it is no class")
    if issubclass(scheduler, AsyncScheduler):
        raise ConfigError(
            f"--scheduler-cls {name}: it schedules ahead, which is for SiPipe's engine to decide: "
            "leave it out"
        )


def check_stages(vllm_config: VllmConfig, option: str) -> None:
    """Refuse more stages than layers; ``option`` is the one that the user has for stages. Raises
    ConfigError."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    if stages > layers:
        raise ConfigError(f"{option} {stages}: the model has {layers} layers, a stage needs one")


def why_not_samplers(vllm_config: VllmConfig, config: SiPipeConfig) -> str:
    """Reason for which vLLM's sampler has to draw, from the configuration alone; empty if SiPipe's
    samplers can. Raises ConfigError: the ``cpu_sampling`` that was asked for cannot be had."""
    setting = config.cpu_sampling
    reason = _needs_vllms_sampler(vllm_config, config)
    if vllm_config.speculative_config is not None:
        _check_verified(vllm_config, config, reason)
    if reason and setting in ("on", "per_row"):
        raise ConfigError(
            f'sipipe config: "cpu_sampling" is "{setting}", but {reason}; set it to "auto"'
        )
    if not reason and setting == "per_row" and not device_may_draw():
        raise ConfigError(
            'sipipe config: "cpu_sampling" is "per_row", which is for devices that draw tokens '
            'themselves (GPUs), and this one does not: set it to "auto"'
        )
    return reason


def why_samplers_verify(vllm_config: VllmConfig) -> str:
    """Reason for which vLLM's sampler cannot verify drafts, as a clause for messages; empty where it can,
    with a draft head that proposes in the same pass."""
    if head_of(vllm_config) is None:
        return "they propose them"
    if not device_may_draw():
        return "the last stage's device has no kernels to draw with (a GPU has)"
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        return "--enable-batch-sharded-sampling shares vLLM's sampler out"
    return ""


def _check_verified(vllm_config: VllmConfig, config: SiPipeConfig, reason: str) -> None:
    """Refuse drafts that nobody verifies. Raises ConfigError.

    Args:
        reason: Reason for which vLLM's sampler has to draw; empty where samplers can.
    """
    setting = config.cpu_sampling
    if setting == "off" and not _needs_vllms_sampler(
        vllm_config, msgspec.structs.replace(config, cpu_sampling="auto")
    ):
        why = why_samplers_verify(vllm_config)
        if why:
            raise ConfigError(
                'sipipe config: "cpu_sampling" is "off", but the samplers have to verify drafts '
                f'(--speculative-config): {why}; set it to "auto"'
            )
        return
    if reason or setting == "per_row":
        raise ConfigError(
            "--speculative-config: SiPipe's samplers verify drafts, but "
            f"{reason or 'per_row has the device draw'}: leave one of the two out"
        )


def installed_processors() -> list[str]:
    """Names of the logits processors that packages bring, which vLLM takes without being asked."""
    return sorted(entry.name for entry in entry_points(group="vllm.logits_processors"))


def device_may_draw() -> bool:
    """True if the last stage's device can draw beside CPU samplers. It then has the kernels of the
    sampler of vLLM's second runner, which a CPU has only with Triton."""
    return HAS_TRITON or not current_platform.is_cpu()


def check_kernels(vllm_config: VllmConfig) -> None:
    """Refuse options that need the kernels of vLLM's sampler where the device has none. Raises
    UnsupportedError: it names the option."""
    if device_may_draw():
        return
    model = vllm_config.model_config
    refused = {
        "--watermark-config (watermarks)": vllm_config.watermark_config is not None,
        "--return-sampling-mask": model.return_sampling_mask,
        "diffusion models": model.is_diffusion,
        "--enable-trace-replay": model.enable_trace_replay,
    }
    for option, is_used in refused.items():
        if is_used:
            raise UnsupportedError(
                f"{option}: vLLM's sampler needs Triton for it, which this CPU build has not: leave it out"
            )


def _needs_vllms_sampler(vllm_config: VllmConfig, config: SiPipeConfig) -> str:
    """The first option that only vLLM's sampler serves, as a clause for messages; empty if none is."""
    model = vllm_config.model_config
    if model.runner_type == "pooling":
        return "pooling models have no tokens to sample"
    if config.cpu_sampling == "off":
        return 'the sipipe config says "cpu_sampling": "off"'
    if model.logits_processors:
        return "custom logits processors (--logits-processors) run in vLLM's own sampler"
    processors = installed_processors()
    if processors:
        return f"installed logits processors ({', '.join(processors)}) run in vLLM's own sampler"
    if model.return_sampling_mask:
        return "sampling masks (--return-sampling-mask) come from vLLM's own sampler"
    if vllm_config.watermark_config is not None:
        return "watermarks (--watermark-config) are put in by vLLM's own sampler"
    if model.enable_prompt_embeds:
        return "prompt embeddings (--enable-prompt-embeds) are taken by vLLM's own sampler alone"
    if vllm_config.aux_output_config.enabled:
        return "routed experts (--enable-return-routed-experts) come with vLLM's sampler's output"
    if vllm_config.observability_config.cudagraph_metrics and not current_platform.is_cpu():
        return "figures of CUDA graphs (--cudagraph-metrics) come with vLLM's sampler's output"
    if model.enable_trace_replay:
        return "replayed traces (--enable-trace-replay) are told to vLLM's own sampler"
    if model.is_diffusion:
        return "diffusion models draw with a sampler of their own"
    return ""
