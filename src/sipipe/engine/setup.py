"""How one engine is set up: decided once in a process, and handed to every part.

``sipipe serve`` and ``generate`` decide in the foreground, where a refusal is one line and not a
traceback. vLLM then makes the same configuration again in the engine's process, where the executor
decides. What is learnt later is in :class:`sipipe.engine.opening.Running`.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.utils import config as config_class
from vllm.platforms import current_platform
from vllm.utils.numa_utils import get_auto_numa_nodes

from sipipe import halves
from sipipe.config import CorePlacement, SiPipeConfig
from sipipe.cores import (
    CorePlan,
    claimed,
    format_cpus,
    plan_cores,
    run_soon,
    share_of,
    this_machine,
)
from sipipe.engine import compatibility
from sipipe.engine.compatibility import STOCK_WORKERS
from sipipe.engine.hosts import check_hosts, named, stages_of_hosts
from sipipe.engine.kv_memory import share_kv_memory, spans_nodes
from sipipe.engine.layers.choose import choose_layers, describe_layers
from sipipe.engine.layers.vocabulary import Vocabulary, choose_vocabulary
from sipipe.engine.logits_room import rows_needed
from sipipe.engine.memory_budget import check_budget, describe, memory_budget
from sipipe.engine.speculation import without_speculation
from sipipe.errors import ConfigError
from sipipe.ipc.parent import end_after_starter
from sipipe.messages.boots import Path
from sipipe.messages.link import buffer_tokens

BIND = "VLLM_CPU_OMP_THREADS_BIND"
SCHEDULERS = "PipelineScheduler", "AsyncPipelineScheduler"
"""By how many microbatches they are ahead."""


@config_class(config={"arbitrary_types_allowed": True})
class PipelineVllmConfig(VllmConfig):
    """A VllmConfig whose engine keeps ``inflight`` microbatches in flight, where vLLM derives that
    number from the parallel configuration, and on vLLM's second runner, which vLLM does not take on
    CPUs without Triton; SiPipe has the kernels. The plugin has ``EngineArgs`` make this class."""

    replicas: int = 1
    """Engines of this host. Each one's process knows its number only, ``data_parallel_index``."""

    ahead: int = 0
    """Microbatches that are scheduled before there is room for them in the pipeline."""

    announced: bool = False
    """Whether a command of ours has said in the foreground how the engine is set up."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In vLLM's engine process too, which waits for its front end for five minutes, also when
        that is gone (the executor, which looks after it, comes later)."""
        self.__dict__.update(state)
        end_after_starter()

    @property
    def use_v2_model_runner(self) -> bool:
        return True

    def _validate_v2_model_runner(self) -> None:
        compatibility.check_kernels(self)
        # Kernels are all that the second runner wants Triton for.
        with patch.object(sys.modules[VllmConfig.__module__], "HAS_TRITON", True):
            super()._validate_v2_model_runner()

    def _get_v2_model_runner_unsupported_features(self) -> list[str]:
        # Drafts are not the runner's business.
        unsupported = VllmConfig._get_v2_model_runner_unsupported_features
        found: list[str] = unsupported(without_speculation(self))
        return found

    @property
    def max_concurrent_batches(self) -> int:
        config = SiPipeConfig.from_additional_config(self.additional_config)
        slots = config.resolved_inflight(self.parallel_config.pipeline_parallel_size)
        return slots + self.ahead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What is decided before anything starts."""

    vllm_config: PipelineVllmConfig
    config: SiPipeConfig
    reason: str
    """Why not SiPipe's samplers draw, but vLLM's; empty where they do."""
    layers: tuple[int, ...]
    """Decoder layers of each stage."""
    vocabulary: Vocabulary
    """Who is to multiply by the output projection."""
    cores: CorePlan
    """Of this host's processes. The last stage's host has the samplers, none where vLLM's draws."""
    node: int
    """Which host this is; 0 is the main host, where the executor runs."""
    here: range
    """The stages of this host."""
    kv_bytes: int | None
    """KV cache of each worker of this host; None: as vLLM's configuration says."""

    def describe(self) -> list[str]:
        """What this host does, for its user. Raises ResourceError: too little shared memory."""
        budget = memory_budget(self)
        check_budget(budget)
        notes = [f"vLLM's sampler draws on the last stage: {self.reason}"] if self.reason else []
        if not current_platform.is_cpu():
            slower = "SiPipe has run on one GPU only, where stock vLLM was quicker with one stage"
            notes.append(f"{slower} (docs/gpu.md)")
        elif self.dtype != "float32" and halves.slow():
            notes.append(f"{self.dtype}: {halves.HINT}")
        if current_platform.is_cpu() and spans_nodes(self.cores):
            spans = "A worker has cores of several NUMA nodes, and its memory on one"
            notes.append(f"{spans}: as many workers as nodes may be quicker (--pp, --tp)")
        elsewhere = self.here[-1] < self.stages - 1
        cores: tuple[str, ...] = self.cores.describe(self.here[0], elsewhere=elsewhere)
        if both := self.cores.cpus & claimed():
            own = 'give each its own (taskset -c, or "cores")'
            cores += (f"           another engine is bound to {format_cpus(both)} too: {own}",)
        cut, by_cost = "", not self.reason and not self.vocabulary.parts
        if not self.node:  # the main host decides
            cut = describe_layers(self.vllm_config, self.config, self.layers, by_cost=by_cost)
        lines = [*cores, describe(budget), cut, str(self.vocabulary), *notes]
        if (replicas := self.vllm_config.replicas) > 1:
            number = self.vllm_config.parallel_config.data_parallel_index
            lines.insert(0, f"replica {number} of {replicas}, each on its share of the cores:")
        if self.config.hosts.count > 1:
            lines.insert(0, f"host {self.node} of {self.config.hosts.count}: {self.has()}")
        return [line for line in lines if line]

    @property
    def path(self) -> Path:
        return "device" if self.reason else "sipipe"

    @property
    def stages(self) -> int:
        """p."""
        return int(self.vllm_config.parallel_config.pipeline_parallel_size)

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks of each stage, t."""
        return int(self.vllm_config.parallel_config.tensor_parallel_size)

    @property
    def slots(self) -> int:
        """Microbatches in flight, m."""
        return self.config.resolved_inflight(self.stages)

    @property
    def kv_movers(self) -> int:
        """Workers with a KV connector."""
        moves = self.vllm_config.kv_transfer_config is not None
        return self.stages * self.ranks if moves else 0

    @property
    def drafts(self) -> int:
        """Draft tokens of a request in one iteration at most."""
        speculative = self.vllm_config.speculative_config
        return 0 if speculative is None else int(speculative.num_speculative_tokens)

    @property
    def rows(self) -> int:
        """Rows of logits of all microbatches in flight at most, but for a few that wait for room.
        Drafts take the rows of requests that do not run; where few may run, each has its own."""
        sequences = int(self.vllm_config.scheduler_config.max_num_seqs)
        return max(sequences, min(sequences, self.slots) * (1 + self.drafts))

    @property
    def logits_rows(self) -> int:
        """Of BIC-L."""
        return rows_needed(self.rows, self.slots)

    @property
    def link_tokens(self) -> int:
        """Of a link's buffer."""
        return buffer_tokens(self.rows, self.vllm_config.scheduler_config.max_num_batched_tokens)

    @property
    def measures(self) -> bool:
        """Whether it is measured on the loaded model if CPU samplers draw: not where nothing else can."""
        auto = self.config.cpu_sampling == "auto" and not (self.reason or self.drafts)
        return auto and compatibility.device_may_draw()

    @property
    def microbatch(self) -> int:
        """Sequences of a microbatch when as many as may run are spread over all in flight."""
        scheduler = self.vllm_config.scheduler_config
        even = -(-int(scheduler.max_num_seqs) // self.slots)
        return min(even, int(scheduler.max_num_batched_tokens))

    def has(self) -> str:
        """What this host has, for messages."""
        return named(self.here) + (" and the samplers" if self.cores.samplers else "")

    def where(self) -> str:
        """Behind a worker's name: its host, where there are several."""
        return f" on host {self.node}" if self.config.hosts.count > 1 else ""

    @property
    def dtype(self) -> str:
        """Of activations, such as ``"bfloat16"``."""
        return str(self.vllm_config.model_config.dtype).removeprefix("torch.")

    def on_device(self, reason: str) -> Setup:
        """The setup of an engine whose tokens are better drawn by vLLM's sampler."""
        return dataclasses.replace(self, reason=reason, vocabulary=Vocabulary())

    def apply(self) -> None:
        """Set in vLLM's configuration what the executor, which the user named, brings with it:
        worker class, scheduler class, microbatches in flight, and the KV caches' memory."""
        vllm_config, parallel = self.vllm_config, self.vllm_config.parallel_config
        parallel.worker_cls = STOCK_WORKERS.get(parallel.worker_cls, parallel.worker_cls)
        if self.kv_bytes is not None:
            vllm_config.cache_config.kv_cache_memory_bytes = self.kv_bytes
        if current_platform.is_cpu():  # vLLM 0.33 would take a replica's for NUMA nodes
            parallel.assigned_physical_gpu_ids = None
        elif self.config.devices is not None:
            assign_devices(vllm_config, self.config.devices)
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is None and self.config.scheduler == "pipeline":
            name = SCHEDULERS[vllm_config.ahead]
            scheduler.scheduler_cls = f"sipipe.engine.scheduling.scheduler.{name}"

    @contextmanager
    def worker_threads(self) -> Iterator[None]:
        """While active, vLLM on CPUs reads which cores the workers' threads are bound to."""
        bound = {}
        if current_platform.is_cpu() and envs.VLLM_CPU_OMP_THREADS_BIND == "auto":
            number = self.vllm_config.parallel_config.data_parallel_index
            bound = {BIND: self.cores.omp_threads_bind(before=number)}
        with patch.dict(os.environ, bound):
            yield

    def bind_scheduler(self, *threads: int) -> None:
        """Bind this thread and ``threads`` (native ids) to the scheduler's cores, where they run soon,
        if this is vLLM's own engine process. Called once all other processes run: they would inherit
        the binding. An engine inside the user's process is left alone."""
        if not multiprocessing.current_process().name.startswith("EngineCore"):
            return
        run_soon()
        placed = isinstance(self.config.cores, CorePlacement)
        if self.cores.scheduler and (placed or not self.cores.shared):
            for thread in (0, *threads):
                os.sched_setaffinity(thread, self.cores.scheduler)


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
    check_hosts(config.hosts, node)
    stages, tp = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    here = stages_of_hosts(stages, config.hosts)[node]
    replicas, workers = vllm_config.replicas, len(here) * tp  # of each
    _check_devices(config, replicas * len(here), tp)
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
    if config.transport == "cuda_ipc" and on_cpu:
        raise ConfigError(
            'sipipe config: "transport" is "cuda_ipc", which joins stages on GPUs, and this engine '
            'runs on CPUs: leave it "auto"'
        )
    if devices is None:
        needed = 0 if on_cpu else stages * ranks
        here = torch.cuda.device_count() if needed else 0  # asks NVML, and makes no context
        if 0 < here < needed:
            raise ConfigError(
                f"--pipeline-parallel-size and --tensor-parallel-size need {needed} GPUs on "
                f"this host, which shows {here}: lower them, look at CUDA_VISIBLE_DEVICES, or, for "
                'tests, have stages share GPUs by "devices" in the sipipe config ([0, 0])'
            )
        return
    if on_cpu:
        raise ConfigError('sipipe config: "devices" are GPUs, and this engine runs on CPUs')
    if len(devices) != stages * ranks:
        raise ConfigError(
            f'sipipe config: "devices" must name a GPU for each of the {stages * ranks} '
            f"workers, not {list(devices)}"
        )
    if 0 < (shown := torch.cuda.device_count()) <= max(devices):
        raise ConfigError(
            f'sipipe config: "devices" {list(devices)} counts GPUs from 0, and this host shows '
            f"{shown}: look at CUDA_VISIBLE_DEVICES"
        )
    if any(len(set(devices[at : at + ranks])) < ranks for at in range(0, len(devices), ranks)):
        raise ConfigError(
            f'sipipe config: "devices" {list(devices)} puts tensor-parallel ranks of one stage on '
            "the same GPU, which NCCL does not do; only stages can share one"
        )


def assign_devices(vllm_config: VllmConfig, devices: Sequence[int] | None) -> None:
    """Tell vLLM the GPUs of this host's workers; None: as they are numbered. It wants one for each
    worker of the engine, but looks up this host's only: the last one stands for the rest."""
    parallel, ids = vllm_config.parallel_config, None
    if devices is not None:
        # vLLM wants numbers of the machine's GPUs, users count those that are visible.
        found = [current_platform.visible_device_id_to_physical_device_id(gpu) for gpu in devices]
        ids = [*found, *found[-1:] * (parallel.world_size - len(found))]
    parallel.assigned_physical_gpu_ids = ids


def _nodes(devices: Sequence[int]) -> list[int | None]:
    """NUMA node of each worker's GPU; None where nothing is known of it."""
    known = None
    if not current_platform.is_cpu():
        # vLLM's word is nothing in a container that may not bind memory; the GPUs' is still known.
        known = get_auto_numa_nodes() or current_platform.get_all_device_numa_nodes()
    return [known[gpu] if known and gpu < len(known) else None for gpu in devices]
