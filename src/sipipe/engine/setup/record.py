"""How one engine is set up: decided once in a process, and handed to every part.

``sipipe serve`` and ``generate`` decide in the foreground, where a refusal is one line and not a
traceback. vLLM then makes the same configuration again in the engine's process, where the executor
decides. What is learnt later is in :class:`sipipe.engine.pipeline_opener.Running`.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.import_utils import import_pynvml

from sipipe.config import CorePlacement, SiPipeConfig
from sipipe.cores import (
    CorePlan,
    run_soon,
)
from sipipe.engine.iteration.logits_room import rows_needed
from sipipe.engine.layers.vocabulary import Vocabulary
from sipipe.engine.setup import compatibility
from sipipe.engine.setup.compatibility import STOCK_WORKERS
from sipipe.engine.setup.draft_head import head_of
from sipipe.engine.setup.stages import named
from sipipe.engine.setup.vllm_config import PipelineVllmConfig
from sipipe.gpu_slices import find_gpus_of_slices
from sipipe.messages.link import buffer_tokens
from sipipe.messages.start_records import Path

BIND = "VLLM_CPU_OMP_THREADS_BIND"
SCHEDULERS = "PipelineScheduler", "AsyncPipelineScheduler"
"""By how many microbatches they are ahead."""


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
        if head_of(self.vllm_config) is not None:  # which proposes for every request, every time
            return sequences * (1 + self.drafts)
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


def assign_devices(vllm_config: VllmConfig, devices: Sequence[int] | None) -> None:
    """Tell vLLM the GPUs of this host's workers; None: as they are numbered. It wants one for each
    worker of the engine, but looks up this host's only: the last one stands for the rest."""
    parallel, ids = vllm_config.parallel_config, None
    find_gpus_of_slices(current_platform, import_pynvml)
    if devices is not None:
        # vLLM wants numbers of the machine's GPUs, users count those that are visible.
        found = [current_platform.visible_device_id_to_physical_device_id(gpu) for gpu in devices]
        ids = [*found, *found[-1:] * (parallel.world_size - len(found))]
    parallel.assigned_physical_gpu_ids = ids
