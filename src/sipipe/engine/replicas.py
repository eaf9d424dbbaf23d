"""Data-parallel replicas: engines of one server that share its host, each a pipeline of its own.

vLLM starts a process for each, balances between them, and has each one forget the others but for its
number, ``data_parallel_index``; how many there are stays in ``PipelineVllmConfig.replicas``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from vllm.platforms import current_platform

from sipipe.config import CorePlacement, SiPipeConfig
from sipipe.cores import CorePlan, plan_cores, share_of, this_machine
from sipipe.errors import ConfigError

if TYPE_CHECKING:
    from sipipe.engine.setup import PipelineVllmConfig, Setup


def plan_replicas(
    vllm_config: PipelineVllmConfig,
    config: SiPipeConfig,
    *,
    stages: int,
    samplers: int | Literal["auto"],
    nodes: Sequence[int | None],
) -> list[CorePlan]:
    """The cores of each replica on this host, which has ``stages`` of each. ``nodes``: NUMA node of
    each worker's device, by replica and rank. Raises ConfigError: a placement of one pipeline."""
    replicas, ranks = vllm_config.replicas, vllm_config.parallel_config.tensor_parallel_size
    if replicas > 1 and isinstance(config.cores, CorePlacement):
        raise ConfigError(
            f'sipipe config: "cores" places one pipeline, and --data-parallel-size {replicas} has '
            'several: leave it "auto", or "off"'
        )
    return [
        plan_cores(
            share_of(this_machine(), number, replicas),
            stages=stages,
            tensor_parallel=ranks,
            samplers=samplers,
            placement=config.cores,
            device="cpu" if current_platform.is_cpu() else "cuda",
            nodes=nodes[number * stages * ranks :],
        )
        for number in range(replicas)
    ]


def tell_replicas(setup: Setup) -> None:
    """Before they start: what each one's KV caches get, while nobody has taken any memory."""
    if setup.vllm_config.replicas > 1 and setup.kv_bytes is not None:
        setup.vllm_config.cache_config.kv_cache_memory_bytes = setup.kv_bytes
