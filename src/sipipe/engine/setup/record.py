"""The setup of one engine: decided once in a process, and handed to every part.

``sipipe serve`` and ``generate`` decide in the foreground, where a refusal is one line and not a
traceback. vLLM hands the configuration to the engine's process, where the executor decides again, for
the machine as it then is. What is learnt later is in :class:`sipipe.engine.pipeline_opener.Running`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.import_utils import import_pynvml

from sipipe.config import CorePlacement, SiPipeConfig
from sipipe.core_binding import run_soon
from sipipe.cores import CorePlan
from sipipe.engine.engine_process import is_engine_process
from sipipe.engine.iteration.logits_room import rows_needed
from sipipe.engine.layers.decoder import Decoder
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
"""Variable by which vLLM's CPU workers find the cores of their threads."""

SCHEDULERS = ("PipelineScheduler", "AsyncPipelineScheduler")
"""Scheduler classes, by the number of microbatches that they are ahead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that is decided before a process of the engine starts."""

    vllm_config: PipelineVllmConfig
    config: SiPipeConfig
    """Settings of the user's, with the devices of this host where SiPipe has to name them."""
    reason: str
    """Reason for which vLLM's sampler draws, and not SiPipe's; empty where SiPipe's draw."""
    decoder: Decoder
    """Decoder layers of the model."""
    layers: tuple[int, ...]
    """Decoder layers of each stage."""
    vocabulary: Vocabulary
    """Shares of the output projection that the stages are expected to have."""
    cores: CorePlan
    """Cores of this host's processes. The last stage's host has the samplers, and none where vLLM's
    sampler draws."""
    node: int
    """Number of this host; 0 is the main host, where the executor runs."""
    host_stages: range
    """Stages of this host."""
    kv_bytes: int | None
    """Bytes of the KV cache of each worker of this host; None: as vLLM's configuration says."""

    @property
    def path(self) -> Path:
        """Place where tokens are drawn, as workers are told it."""
        return "device" if self.reason else "sipipe"

    @property
    def stages(self) -> int:
        """Pipeline stages of the engine, p."""
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
        """Workers with a KV connector: all of them, or none."""
        has_connector = self.vllm_config.kv_transfer_config is not None
        return self.stages * self.ranks if has_connector else 0

    @property
    def drafts(self) -> int:
        """Largest number of draft tokens of a request in one iteration."""
        speculative = self.vllm_config.speculative_config
        return 0 if speculative is None else int(speculative.num_speculative_tokens)

    @property
    def rows(self) -> int:
        """Largest number of rows of logits of all microbatches in flight, but for a few that wait for
        room.

        Drafts take the rows of requests that do not run. Where fewer requests may run than
        microbatches are in flight, each request has rows for its own drafts. A draft head proposes
        for every request, every time, and has rows for all of them."""
        sequences = int(self.vllm_config.scheduler_config.max_num_seqs)
        if head_of(self.vllm_config) is not None:
            return sequences * (1 + self.drafts)
        return max(sequences, min(sequences, self.slots) * (1 + self.drafts))

    @property
    def logits_rows(self) -> int:
        """Rows that the logits channel, BIC-L, has room for."""
        return rows_needed(self.rows, self.slots)

    @property
    def link_tokens(self) -> int:
        """Tokens that each buffer of a link has room for."""
        return buffer_tokens(self.rows, self.vllm_config.scheduler_config.max_num_batched_tokens)

    @property
    def measures(self) -> bool:
        """True if it is measured on the loaded model where tokens are drawn best. There is nothing to
        choose where the device cannot draw, or the samplers cannot; drafts that samplers propose are
        verified by them."""
        if self.config.cpu_sampling != "auto" or self.reason:
            return False
        if self.drafts and compatibility.why_samplers_verify(self.vllm_config):
            return False
        return compatibility.device_may_draw()

    @property
    def microbatch(self) -> int:
        """Sequences of a microbatch when as many as may run are spread over all in flight."""
        scheduler = self.vllm_config.scheduler_config
        even_share = math.ceil(int(scheduler.max_num_seqs) / self.slots)
        return min(even_share, int(scheduler.max_num_batched_tokens))

    @property
    def measured_rows(self) -> int:
        """Rows of a microbatch that is measured: its sequences and, where a head proposes for all of them,
        their drafts, of which vLLM's runner has room for as many rows as sequences may run."""
        if head_of(self.vllm_config) is None:
            return self.microbatch
        scheduler = self.vllm_config.scheduler_config
        most = min(int(scheduler.max_num_seqs), int(scheduler.max_num_batched_tokens))
        return min(self.microbatch * (1 + self.drafts), most)

    def host_parts(self) -> str:
        """Text for messages: the stages of this host, and its samplers."""
        stages = named(self.host_stages)
        return f"{stages} and the samplers" if self.cores.samplers else stages

    def host_suffix(self) -> str:
        """Text that follows a worker's name: its host, where there are several."""
        return f" on host {self.node}" if self.config.hosts.count > 1 else ""

    @property
    def dtype(self) -> str:
        """Name of the activations' dtype, such as ``"bfloat16"``."""
        return str(self.vllm_config.model_config.dtype).removeprefix("torch.")

    @property
    def hidden_size(self) -> int:
        """Elements of a token's hidden state."""
        return int(self.vllm_config.model_config.get_hidden_size())

    @property
    def vocab_size(self) -> int:
        """Tokens of the model's vocabulary, V: columns of the logits."""
        return int(self.vllm_config.model_config.get_vocab_size())

    def on_device(self, reason: str) -> Setup:
        """The setup of an engine whose tokens are better drawn by vLLM's sampler."""
        return dataclasses.replace(self, reason=reason, vocabulary=Vocabulary())

    def apply(self) -> None:
        """Set in vLLM's configuration what the executor, which the user named, brings with it:
        worker class, scheduler class, GPUs, and the KV caches' memory."""
        vllm_config = self.vllm_config
        parallel = vllm_config.parallel_config
        parallel.worker_cls = STOCK_WORKERS.get(parallel.worker_cls, parallel.worker_cls)
        if self.kv_bytes is not None:
            vllm_config.cache_config.kv_cache_memory_bytes = self.kv_bytes
        if current_platform.is_cpu():
            # vLLM 0.33 would take the GPUs of a replica for NUMA nodes.
            parallel.assigned_physical_gpu_ids = None
        elif self.config.devices is not None:
            assign_devices(vllm_config, self.config.devices)
        scheduler = vllm_config.scheduler_config
        if scheduler.scheduler_cls is None and self.config.scheduler == "pipeline":
            name = SCHEDULERS[vllm_config.ahead]
            scheduler.scheduler_cls = f"sipipe.engine.scheduling.scheduler.{name}"

    @contextmanager
    def worker_threads(self) -> Iterator[None]:
        """Have vLLM's CPU workers that are made in the body bind their threads to the plan's cores,
        unless the user has said to which."""
        variables = {}
        if current_platform.is_cpu() and envs.VLLM_CPU_OMP_THREADS_BIND == "auto":
            replica = self.vllm_config.parallel_config.data_parallel_index
            variables[BIND] = self.cores.omp_threads_bind(before=replica)
        with patch.dict(os.environ, variables):
            yield

    def bind_scheduler(self, *threads: int) -> None:
        """Bind this thread and ``threads`` (native ids) to the scheduler's cores, and have them run
        soon once they can, if this is vLLM's own engine process.

        Called when all other processes run, because they would inherit the binding. An engine inside
        the user's process is left alone."""
        if not is_engine_process():
            return
        run_soon()
        # Cores that others share are not the scheduler's to be bound to, unless the user says so.
        placed_by_user = isinstance(self.config.cores, CorePlacement)
        if self.cores.scheduler and (placed_by_user or not self.cores.shared):
            for thread in (0, *threads):
                os.sched_setaffinity(thread, self.cores.scheduler)


def assign_devices(vllm_config: VllmConfig, devices: Sequence[int] | None) -> None:
    """Tell vLLM the GPUs of this host's workers; None: as they are numbered."""
    parallel = vllm_config.parallel_config
    find_gpus_of_slices(current_platform, import_pynvml)
    if devices is None:
        parallel.assigned_physical_gpu_ids = None
        return
    # vLLM wants numbers of the machine's GPUs, users count those that are visible.
    gpus = [current_platform.visible_device_id_to_physical_device_id(gpu) for gpu in devices]
    # vLLM wants a GPU for each worker of the engine, but looks up those of this host only. The last
    # GPU stands for those of the other hosts.
    missing = parallel.world_size - len(gpus)
    parallel.assigned_physical_gpu_ids = gpus + gpus[-1:] * missing
