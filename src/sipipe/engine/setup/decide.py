"""The decision how one engine is set up: once in the foreground, once in the engine's process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.numa_utils import get_auto_numa_nodes

from sipipe.config import CorePlacement, SiPipeConfig
from sipipe.cores import CorePlan, plan_cores, share_of, this_machine
from sipipe.engine.layers.choose import choose_layers
from sipipe.engine.layers.decoder import decoder_of
from sipipe.engine.layers.vocabulary import Vocabulary, choose_vocabulary
from sipipe.engine.setup import compatibility
from sipipe.engine.setup.derived import settings_of
from sipipe.engine.setup.host_agreement import check_hosts
from sipipe.engine.setup.kv_memory import share_kv_memory
from sipipe.engine.setup.rank_files import check_rank_files
from sipipe.engine.setup.record import Setup
from sipipe.engine.setup.stages import stages_of_hosts
from sipipe.engine.setup.vllm_config import PipelineVllmConfig
from sipipe.errors import ConfigError
from sipipe.gpu_slices import VISIBLE, named_slices
from sipipe.ipc.link.nixl_agent import nixl_reach


def decide(vllm_config: VllmConfig, node: int = 0) -> Setup:
    """Decide for host ``node`` of an engine with this configuration. Raises UnsupportedError: an
    option that SiPipe does not serve. ConfigError: a setting that does not fit the model or the
    machine. ResourceError: too little memory."""
    if not isinstance(vllm_config, PipelineVllmConfig):
        raise ConfigError(
            "this VllmConfig was made without SiPipe's plugin: have vLLM's EngineArgs make it, and "
            "name sipipe in VLLM_PLUGINS where that is set"
        )
    compatibility.check_features(vllm_config)
    config = settings_of(vllm_config)
    reason = compatibility.why_not_samplers(vllm_config, config)
    # The part of the pipeline that this host has.
    check_hosts(config.hosts, node, config.start_timeout)
    parallel = vllm_config.parallel_config
    stages = parallel.pipeline_parallel_size
    own_stages = stages_of_hosts(stages, config.hosts)[node]
    check_rank_files(vllm_config, own_stages)
    # The devices and cores of this host, which all replicas share.
    replicas = vllm_config.replicas
    config = _with_devices(config, replicas * len(own_stages), parallel.tensor_parallel_size)
    check_nixl(config)
    has_samplers = not reason and stages - 1 in own_stages
    plans = _plan_replicas(
        config,
        replicas,
        stages=len(own_stages),
        ranks=parallel.tensor_parallel_size,
        samplers=config.samplers if has_samplers else 0,
    )
    # The layers of all stages, and the output projection.
    decoder = decoder_of(vllm_config)
    layers = choose_layers(vllm_config, config, decoder, by_cost=not reason)
    vocabulary = Vocabulary()
    if not reason:
        vocabulary, layers = choose_vocabulary(vllm_config, config, decoder, layers)
    return Setup(
        vllm_config=vllm_config,
        config=config,
        reason=reason,
        decoder=decoder,
        layers=layers,
        vocabulary=vocabulary,
        cores=plans[parallel.data_parallel_index],
        node=node,
        host_stages=own_stages,
        kv_bytes=share_kv_memory(vllm_config, plans, layers, decoder.facts),
    )


def _plan_replicas(
    config: SiPipeConfig,
    replicas: int,
    *,
    stages: int,
    ranks: int,
    samplers: int | Literal["auto"],
) -> list[CorePlan]:
    """The cores of each replica's processes on this host, where each has ``stages`` stages of ``ranks``
    ranks. Raises ConfigError: the user places one pipeline, and there are several."""
    if replicas > 1 and isinstance(config.cores, CorePlacement):
        raise ConfigError(
            f'sipipe config: "cores" places one pipeline, and --data-parallel-size {replicas} has '
            'several: leave it "auto", or "off"'
        )
    workers = stages * ranks
    nodes = numa_nodes(config.devices or range(replicas * workers))
    return [
        plan_cores(
            share_of(this_machine(most=config.most_cores), replica, replicas),
            stages=stages,
            tensor_parallel=ranks,
            samplers=samplers,
            placement=config.cores,
            device="cpu" if current_platform.is_cpu() else "cuda",
            nodes=nodes[replica * workers :],
        )
        for replica in range(replicas)
    ]


def _with_devices(config: SiPipeConfig, stages: int, ranks: int) -> SiPipeConfig:
    """``config`` with the devices of this host's workers, if SiPipe has to name them: a worker sees its
    own slice of a GPU only, so that its number has to say which. ``stages`` are those of all replicas.
    Raises ConfigError: workers cannot have the devices that the user names, or that there are."""
    check_devices(config, stages, ranks)
    if config.devices is None and named_slices() and not current_platform.is_cpu():
        return msgspec.structs.replace(config, devices=tuple(range(stages * ranks)))
    return config


def check_devices(config: SiPipeConfig, stages: int, ranks: int) -> None:
    """Refuse devices that the workers of ``stages`` stages cannot have. Raises ConfigError."""
    if current_platform.is_cpu():
        _check_no_gpus(config)
        return
    slices = named_slices()
    if slices:
        _check_slices(config, slices, ranks)
    if config.devices is None:
        _check_enough_gpus(stages * ranks)
    else:
        _check_named_gpus(config.devices, stages * ranks, ranks)


def _check_no_gpus(config: SiPipeConfig) -> None:
    """Refuse settings that are of GPUs, where the engine runs on CPUs. Raises ConfigError."""
    if config.transport == "cuda_ipc":
        raise ConfigError(
            'sipipe config: "transport" is "cuda_ipc", which joins stages on GPUs, and this engine '
            'runs on CPUs: leave it "auto"'
        )
    if config.devices is not None:
        raise ConfigError('sipipe config: "devices" are GPUs, and this engine runs on CPUs')


def _check_enough_gpus(workers: int) -> None:
    """Refuse more workers than this host shows GPUs. Raises ConfigError."""
    visible = _visible_gpus()
    if 0 < visible < workers:
        raise ConfigError(
            f"--pipeline-parallel-size and --tensor-parallel-size need {workers} GPUs on "
            f"this host, and {_who_shows(visible)}: lower them, show more, or, for tests, have "
            'stages share GPUs by "devices" in the sipipe config ([0, 0])'
        )


def _check_named_gpus(devices: Sequence[int], workers: int, ranks: int) -> None:
    """Refuse GPUs of the user's that the ``workers``, in stages of ``ranks``, cannot have. Raises
    ConfigError."""
    if len(devices) != workers:
        raise ConfigError(
            f'sipipe config: "devices" must name a GPU for each of the {workers} '
            f"workers, not {list(devices)}"
        )
    visible = _visible_gpus()
    if 0 < visible <= max(devices):
        raise ConfigError(
            f'sipipe config: "devices" {list(devices)} counts GPUs from 0, and '
            f"{_who_shows(visible)}: name others, or show more"
        )
    for first in range(0, workers, ranks):
        if len(set(devices[first : first + ranks])) < ranks:
            raise ConfigError(
                f'sipipe config: "devices" {list(devices)} puts tensor-parallel ranks of one stage '
                "on the same GPU, which NCCL does not do; only stages can share one"
            )


def check_nixl(config: SiPipeConfig) -> None:
    """Refuse links by NIXL where there can be none. Raises ConfigError, which names the setting."""
    if config.transport != "nixl":
        return
    setting = 'sipipe config: "transport" is "nixl"'
    if config.hosts.count == 1:
        raise ConfigError(
            f'{setting}, which joins stages on several hosts, and this engine has one: leave it "auto"'
        )
    if config.hosts.encrypt_links:
        raise ConfigError(
            f'{setting}, which encrypts nothing, and "hosts.encrypt_links" is true: set it false on all '
            'hosts, in a network of your own, or leave "transport" "auto"'
        )
    if not nixl_reach():
        raise ConfigError(
            f'{setting}, and NIXL is not installed on this host: pip install "sipipe[nixl]", or leave it '
            '"auto"'
        )


def _check_slices(config: SiPipeConfig, slices: Sequence[str], ranks: int) -> None:
    """Refuse what slices of GPUs cannot do. Raises ConfigError, which names the variable."""
    named = f'{VISIBLE}="{os.environ[VISIBLE]}" names slices (MIG)'
    if config.transport == "cuda_ipc":
        raise ConfigError(
            f'sipipe config: "transport" is "cuda_ipc", and {named}, which cannot map one another\'s '
            'memory: leave it "auto"'
        )
    if ranks > 1:
        raise ConfigError(
            f"--tensor-parallel-size {ranks}: {named}, and NCCL takes those of a GPU for one device: "
            f"leave it out, and cut the model into stages (--pipeline-parallel-size {len(slices)})"
        )


def _visible_gpus() -> int:
    """Number of GPUs, or of slices of them, that workers of this host can have; 0 if it is not known."""
    # This count asks NVML, and makes no CUDA context in this process.
    return len(named_slices()) or torch.cuda.device_count()


def _who_shows(count: int) -> str:
    """Clause for messages on the number of GPUs, with the variable that it comes from, or the host."""
    value = os.environ.get(VISIBLE)
    return f"it shows {count}" if value is None else f'{VISIBLE}="{value}" shows {count}'


def numa_nodes(devices: Sequence[int]) -> list[int | None]:
    """NUMA node of each worker's GPU; None where nothing is known of it."""
    unknown: list[int | None] = [None] * len(devices)
    # The number of a slice is not that of its GPU.
    if current_platform.is_cpu() or named_slices():
        return unknown
    # vLLM gives no nodes in a container that may not bind memory. Those of the GPUs are still known.
    nodes = get_auto_numa_nodes() or current_platform.get_all_device_numa_nodes()
    if not nodes:
        return unknown
    return [nodes[gpu] if gpu < len(nodes) else None for gpu in devices]
