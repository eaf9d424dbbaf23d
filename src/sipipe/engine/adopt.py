"""What SiPipe sets in vLLM's configuration beyond the executor that the user named."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.logger import init_logger

from sipipe.config import SiPipeConfig
from sipipe.engine.compatibility import STOCK_WORKERS, Choice
from sipipe.errors import ConfigError

logger = init_logger(f"vllm.{__name__}")

PIPELINE_SCHEDULER = "sipipe.engine.scheduling.scheduler.PipelineScheduler"


class PipelineVllmConfig(VllmConfig):
    """A VllmConfig whose engine keeps ``inflight`` microbatches in flight.

    vLLM derives that number from the parallel configuration and reads it once, after it has made
    the executor; the executor gives the instance this class.
    """

    @property
    def max_concurrent_batches(self) -> int:
        config = SiPipeConfig.from_additional_config(self.additional_config)
        return config.resolved_inflight(self.parallel_config.pipeline_parallel_size)


def adopt(vllm_config: VllmConfig, config: SiPipeConfig, choice: Choice) -> SiPipeConfig:
    """Set worker class, scheduler class and microbatches in flight for the path that is taken.

    Returns the settings that hold there. May be called again when the path turns out to be
    vLLM's.

    Raises:
        ConfigError: the user's own ``--worker-cls``.
    """
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    ours = STOCK_WORKERS.get(parallel.worker_cls)
    if ours is None and parallel.worker_cls not in STOCK_WORKERS.values():
        raise ConfigError(
            f"--worker-cls {parallel.worker_cls}: SiPipe brings its own worker class; leave the "
            "option out (this platform may not be supported)"
        )
    parallel.worker_cls = ours or parallel.worker_cls
    if choice.path == "vllm":
        logger.warning("SiPipe leaves this engine on vLLM's own path: %s", choice.reason)
        values = {**config.to_dict(), "inflight": parallel.pipeline_parallel_size}
        config = SiPipeConfig.from_dict(values)
        additional = vllm_config.additional_config
        vllm_config.additional_config = {
            **(additional if isinstance(additional, dict) else {}),
            "sipipe": values,
        }
        if scheduler.scheduler_cls == PIPELINE_SCHEDULER:
            scheduler.scheduler_cls = None
    elif scheduler.scheduler_cls is None and config.scheduler == "pipeline":
        scheduler.scheduler_cls = PIPELINE_SCHEDULER
    vllm_config.__class__ = PipelineVllmConfig
    return config
