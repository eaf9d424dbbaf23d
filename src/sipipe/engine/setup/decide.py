"""Decides how one engine is set up: once in the foreground, once in the engine's process."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.numa_utils import get_auto_numa_nodes

from sipipe.config import CorePlacement, SiPipeConfig
from sipipe.cores import (
    plan_cores,
    share_of,
    this_machine,
)
from sipipe.engine.layers.choose import choose_layers
from sipipe.engine.layers.vocabulary import Vocabulary, choose_vocabulary
from sipipe.engine.setup import compatibility
from sipipe.engine.setup.host_agreement import check_hosts
from sipipe.engine.setup.kv_memory import share_kv_memory
from sipipe.engine.setup.rank_files import check_rank_files
from sipipe.engine.setup.record import Setup
from sipipe.engine.setup.stages import stages_of_hosts
from sipipe.engine.setup.vllm_config import PipelineVllmConfig
from sipipe.errors import ConfigError
from sipipe.gpu_slices import VISIBLE, named_slices


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
    config = SiPipeConfig.from_additional_config(vllm_config.additional_config)
    reason = compatibility.why_not_samplers(vllm_config, config)
    parallel = vllm_config.parallel_config
    check_hosts(config.hosts, node, config.start_timeout)
    stages, tp = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    here = stages_of_hosts(stages, config.hosts)[node]
    check_rank_files(vllm_config, here)
    replicas, workers = vllm_config.replicas, len(here) * tp  # of each
    _check_devices(config, replicas * len(here), tp)
    if config.devices is None and named_slices() and not current_platform.is_cpu():
        # A worker sees its own alone, so that its number says which.
        config = msgspec.structs.replace(config, devices=tuple(range(replicas * workers)))
    if replicas > 1 and isinstance(config.cores, CorePlacement):
        raise ConfigError(
            f'sipipe config: "cores" places one pipeline, and --data-parallel-size {replicas} has '
            'several: leave it "auto", or "off"'
        )
    nodes = _nodes(config.devices or range(replicas * workers))
    plans = [
        plan_cores(
            share_of(this_machine(most=config.most_cores), number, replicas),
            stages=len(here),
            tensor_parallel=tp,
            samplers=0 if reason or stages - 1 not in here else config.samplers,
            placement=config.cores,
            device="cpu" if current_platform.is_cpu() else "cuda",
            nodes=nodes[number * workers :],
        )
        for number in range(replicas)
    ]
    layers, vocabulary = choose_layers(vllm_config, config, by_cost=not reason), Vocabulary()
    if not reason:
        vocabulary, layers = choose_vocabulary(vllm_config, config, layers)
    return Setup(
        vllm_config=vllm_config,
        config=config,
        reason=reason,
        layers=layers,
        vocabulary=vocabulary,
        cores=plans[parallel.data_parallel_index],
        node=node,
        here=here,
        kv_bytes=share_kv_memory(vllm_config, plans, layers),
    )


def _check_devices(config: SiPipeConfig, stages: int, ranks: int) -> None:
    devices, on_cpu = config.devices, current_platform.is_cpu()
    slices = () if on_cpu else named_slices()
    if config.transport == "cuda_ipc" and on_cpu:
        raise ConfigError(
            'sipipe config: "transport" is "cuda_ipc", which joins stages on GPUs, and this engine '
            'runs on CPUs: leave it "auto"'
        )
    if slices:
        _check_slices(config, slices, ranks)
    if devices is None:
        needed = 0 if on_cpu else stages * ranks
        shown = _visible_gpus() if needed else 0
        if 0 < shown < needed:
            raise ConfigError(
                f"--pipeline-parallel-size and --tensor-parallel-size need {needed} GPUs on "
                f"this host, and {_who_shows(shown)}: lower them, show more, or, for tests, have "
                'stages share GPUs by "devices" in the sipipe config ([0, 0])'
            )
        return
    if on_cpu:
        raise ConfigError('sipipe config: "devices" are GPUs, and this engine runs on CPUs')
    if len(devices) != stages * ranks:
        raise ConfigError(
            f'sipipe config: "devices" must name a GPU for each of the {stages * ranks} '
            f"workers, not {list(devices)}"
        )
    shown = _visible_gpus()
    if 0 < shown <= max(devices):
        raise ConfigError(
            f'sipipe config: "devices" {list(devices)} counts GPUs from 0, and '
            f"{_who_shows(shown)}: name others, or show more"
        )
    if any(len(set(devices[at : at + ranks])) < ranks for at in range(0, len(devices), ranks)):
        raise ConfigError(
            f'sipipe config: "devices" {list(devices)} puts tensor-parallel ranks of one stage on '
            "the same GPU, which NCCL does not do; only stages can share one"
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
    """GPUs, or slices of them, that workers of this host can have; 0 where nothing says."""
    return len(named_slices()) or torch.cuda.device_count()  # asks NVML, and makes no context


def _who_shows(count: int) -> str:
    """Where the number of GPUs comes from, for messages: the variable with its value, or the host."""
    value = os.environ.get(VISIBLE)
    return f"it shows {count}" if value is None else f'{VISIBLE}="{value}" shows {count}'


def _nodes(devices: Sequence[int]) -> list[int | None]:
    """NUMA node of each worker's GPU; None where nothing is known of it."""
    known = None
    if not (current_platform.is_cpu() or named_slices()):  # a slice's GPU has another number
        # vLLM's word is nothing in a container that may not bind memory; the GPUs' is still known.
        known = get_auto_numa_nodes() or current_platform.get_all_device_numa_nodes()
    return [known[gpu] if known and gpu < len(known) else None for gpu in devices]
