"""A worker whose model is arithmetic, for engines that live for a second or two.

vLLM's engine core and scheduler, SiPipe's executor, processes, channels, threads, preparation and
samplers are the real ones; what is replaced is vLLM's worker, and the second runner in it
(:mod:`tests.worker.arithmetic`).
"""

from __future__ import annotations

from benchmarks.emulation.worker import EmulatedSharing, EmulatedWorker
from tests.worker.arithmetic import Runner, Worker, logits_table, look_up
from vllm.distributed import get_pp_group

from sipipe.messages.measured import Measured


class Shard:
    """In place of :class:`sipipe.worker.projection_rows.ProjectionShard`: a stage's columns."""

    def __init__(self, start, stop):
        self._logits = logits_table()[:, start:stop]

    def whole(self, hidden, into=None):
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
    sharing = StandInSharing

    def load_model(self, *_, **__):
        runner = Runner(self.place, self.vllm_config, self.cache_config.block_size)
        self.start(get_pp_group(), runner, self.draws)

    def determine_available_memory(self):
        return 1 << 20
