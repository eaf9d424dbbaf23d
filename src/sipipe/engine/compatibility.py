"""What SiPipe refuses at start-up, and who draws tokens otherwise.

Three kinds of path serve a request:

* ``sipipe``: vLLM's second model runner on every stage, with SiPipe's preparation in the place of its
  own; tokens drawn by the CPU samplers.
* ``device``: the same stages, tokens drawn by vLLM's sampler on the last one.
* ``vllm``: vLLM's unmodified model runner on every stage, called step by step. Stages are still
  SiPipe's: worlds of their own, channels and transfers between them.

The choice is made once, at start-up, and logged with its reason. docs/compatibility.md is the
user's view of the tables below.
"""

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from sipipe.config import SiPipeConfig
from sipipe.errors import ConfigError, UnsupportedError
from sipipe.messages.boots import Path

STOCK_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "sipipe.worker.vllm_workers.CPUStageWorker",
    "vllm.v1.worker.gpu_worker.Worker": "sipipe.worker.vllm_workers.GPUStageWorker",
}
"""Which of our classes stands for which of vLLM's, by the name in ``parallel_config``."""


def check_features(vllm_config: VllmConfig) -> None:
    """Refuse what stages without a common process group cannot serve.

    Raises:
        UnsupportedError: one line that names the option.
    """
    parallel = vllm_config.parallel_config
    refused = {
        "--speculative-config (speculative decoding)": vllm_config.speculative_config is not None,
        "--data-parallel-size above 1": parallel.data_parallel_size > 1,
        "--prefill-context-parallel-size above 1": parallel.prefill_context_parallel_size > 1,
        "--decode-context-parallel-size above 1": parallel.decode_context_parallel_size > 1,
        "--nnodes above 1 here (sipipe serve takes it)": parallel.nnodes > 1,
        "--kv-transfer-config (KV connectors)": vllm_config.kv_transfer_config is not None,
        "--ec-transfer-config (encoder cache connectors)": (
            vllm_config.ec_transfer_config is not None
        ),
        "--enable-eplb (expert load balancing)": parallel.enable_eplb,
        "--enable-elastic-ep": parallel.enable_elastic_ep,
    }
    for option, asked in refused.items():
        if asked:
            raise UnsupportedError(
                f"SiPipe does not support {option}: leave it out, or use "
                "--distributed-executor-backend mp"
            )


def check_stages(vllm_config: VllmConfig) -> None:
    """Refuse more stages than layers.

    Raises:
        ConfigError: one line that names the option.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    if stages > layers:
        raise ConfigError(f"--pp {stages}: the model has {layers} layers, a stage needs one")


def choose_path(vllm_config: VllmConfig, config: SiPipeConfig) -> tuple[Path, str]:
    """The path of this engine, from the configuration alone, and why it is not SiPipe's samplers
    that draw.

    Raises:
        ConfigError: a ``cpu_sampling`` was asked for and cannot be had.
    """
    path: Path = "sipipe"
    if reason := _vllms_own(vllm_config):
        path = "vllm"
    elif not uses_second_runner(vllm_config):
        path, reason = (
            "vllm",
            (
                "SiPipe's stages stand on vLLM's second runner, and vLLM takes its first one here (see "
                "VLLM_USE_V2_MODEL_RUNNER)"
            ),
        )
    elif reason := _vllms_sampler(vllm_config, config):
        path = "device"
    asked = config.cpu_sampling
    if reason and asked in ("on", "per_row"):
        raise ConfigError(
            f'sipipe config: "cpu_sampling" is "{asked}", but {reason}; set it to "auto"'
        )
    if not reason and asked == "per_row" and not device_may_draw(vllm_config):
        raise ConfigError(
            'sipipe config: "cpu_sampling" is "per_row", which is for devices that draw tokens '
            'themselves (GPUs), and this one does not: set it to "auto"'
        )
    return path, reason


def uses_second_runner(vllm_config: VllmConfig) -> bool:
    """Whether the stages stand on vLLM's second model runner.

    vLLM's choice, but on CPUs, where vLLM does not take it for want of Triton: SiPipe has the
    kernels that its own path needs (:mod:`sipipe.worker.cpu_kernels`). ``VLLM_USE_V2_MODEL_RUNNER``
    counts there as well.
    """
    if not current_platform.is_cpu():
        return bool(VllmConfig.use_v2_model_runner.__get__(vllm_config))
    if envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        return bool(envs.VLLM_USE_V2_MODEL_RUNNER)
    return not _vllms_own(vllm_config)


def device_may_draw(vllm_config: VllmConfig) -> bool:
    """Whether the last stage's device has the kernels of vLLM's second runner's sampler, which a CPU
    has only with Triton: it can draw beside CPU samplers."""
    return (HAS_TRITON or not current_platform.is_cpu()) and uses_second_runner(vllm_config)


def check_second_runner(vllm_config: VllmConfig) -> None:
    """Refuse a second runner that lacks the kernels which an option asks for.

    Raises:
        ConfigError: one line that names the option.
    """
    reason = _vllms_own(vllm_config)
    if vllm_config.model_config.return_sampling_mask:
        reason = "sampling masks (--return-sampling-mask) come from vLLM's own sampler"
    if vllm_config.watermark_config is not None:
        reason = "watermarks (--watermark-config) are put in by vLLM's own sampler"
    if reason and current_platform.is_cpu() and not HAS_TRITON:
        raise ConfigError(
            f"{reason}, and that of its second model runner needs Triton on CPUs: leave the option "
            "out, or VLLM_USE_V2_MODEL_RUNNER=1 where that is set"
        )


def _vllms_sampler(vllm_config: VllmConfig, config: SiPipeConfig) -> str:
    """Why vLLM's own sampler has to draw; empty: it need not."""
    model = vllm_config.model_config
    if config.cpu_sampling == "off":
        return 'the sipipe config says "cpu_sampling": "off"'
    if model.logits_processors:
        return "custom logits processors (--logits-processors) run in vLLM's own sampler"
    if model.return_sampling_mask:
        return "sampling masks (--return-sampling-mask) come from vLLM's own sampler"
    if vllm_config.watermark_config is not None:
        return "watermarks (--watermark-config) are put in by vLLM's own sampler"
    if model.enable_prompt_embeds:
        return "prompt embeddings (--enable-prompt-embeds) are taken by vLLM's own sampler alone"
    if vllm_config.aux_output_config.enabled:
        return (
            "routed experts (--enable-return-routed-experts) come with vLLM's own sampler's output"
        )
    return ""


def _vllms_own(vllm_config: VllmConfig) -> str:
    """Why vLLM's own steps are needed, whoever draws; empty: they are not."""
    model = vllm_config.model_config
    if model.runner_type == "pooling":
        return "pooling models have no tokens to sample"
    if model.is_encoder_decoder:
        return "encoder-decoder models need vLLM's cross-attention path"
    if getattr(vllm_config.scheduler_config, "async_scheduling", False):
        return "asynchronous scheduling keeps sampled tokens on the device"
    if model.is_diffusion:
        return "diffusion models draw with a sampler of their own"
    return ""
