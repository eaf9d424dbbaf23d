"""A worker whose model is arithmetic, for engines that live for a second or two.

vLLM's engine core and scheduler, SiPipe's executor, processes, channels, threads, preparation and
samplers are the real ones; what is replaced is vLLM's worker, and the second runner in it
(:mod:`tests.worker.arithmetic`).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from benchmarks.emulation.worker import EmulatedSharing, EmulatedWorker
from tests.worker.arithmetic import Runner, Worker, logits_table, look_up
from vllm.distributed import get_pp_group, parallel_state
from vllm.distributed.kv_transfer import ensure_kv_transfer_initialized
from vllm.v1.worker.gpu.kv_connector import get_kv_connector

from sipipe.messages.measured import Measured
from sipipe.worker.device import HostDevice


class Shard:
    """In place of :class:`sipipe.worker.projection.rows.ProjectionShard`: a stage's columns."""

    def __init__(self, start, stop):
        self._logits = logits_table()[:, start:stop]

    def multiply(self, hidden, into=None):
        return look_up(self._logits, hidden)


class StandInSharing(EmulatedSharing):
    """Half of the columns for each stage."""

    def time_parts(self, head, sequences):
        return Measured(layers=1e-3, projection=1e-3)

    def _take(self, offers, start, stop):
        return Shard(start, stop)


class StandInWorker(Worker, EmulatedWorker):
    """vLLM's worker, as far as the executor knows it."""

    __init__ = EmulatedWorker.__init__

    def parts(self, boot):
        device = HostDevice()
        return device, StandInSharing(boot, self, device)

    def load_model(self, *_, **__):
        runner = Runner(self.boot.place, self.vllm_config, self.cache_config.block_size)
        self.start(get_pp_group(), runner, self.boot.draws)

    def determine_available_memory(self):
        return 1 << 20

    def initialize_from_config(self, kv_cache_config):
        """What a KV connector moves is the runner's cache."""
        if self.vllm_config.kv_transfer_config is not None:
            # vLLM makes it of processes alone, and its connectors ask it for their rank.
            parallel_state._TP = SimpleNamespace(  # noqa: SLF001
                rank_in_group=0, broadcast_object=lambda one, **_: one
            )
            ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
            blocks = torch.full((kv_cache_config.num_blocks, self.cache_config.block_size), -2)
            self.model_runner.cache = blocks.view(-1).numpy()
            caches = {f"stage{self.boot.place.stage}": blocks}
            self.model_runner.kv_connector = get_kv_connector(self.vllm_config, caches)
