"""How a worker comes to its part of the output projection, where that is shared out.

The last stage's ranks offer their rows, every stage says how long its parts take, every rank takes
its rows, and opens its end of the links of final hidden states.

Who runs here: whoever follows BIC-I, in control calls with no iteration in the worker.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from sipipe.messages.measured import Measured
from sipipe.messages.start_records import ProjectionOffer, WorkerBoot
from sipipe.worker.device import Device
from sipipe.worker.links import LinkEnds
from sipipe.worker.projection.logits import LogitsHandover, StageLogits
from sipipe.worker.projection.projection import Projection, Record, SharedProjection
from sipipe.worker.projection.rows import OfferedRows, ProjectionShard, time_parts
from sipipe.worker.projection.thread import ProjectionThread


class ProjectionShare:
    """One rank's part; ``worker`` is vLLM's, whose model is loaded."""

    def __init__(self, boot: WorkerBoot, worker: Any, device: Device) -> None:
        self._boot = boot
        self._place = boot.place
        self._worker = worker
        self._device = device
        self._offered: OfferedRows | None = None
        self.shard: ProjectionShard | None = None
        """This rank's rows, once it has taken them."""
        self.writer = boot.place.tp_rank
        """Which writer of BIC-L this rank is."""

    def device_bytes(self) -> int:
        """What the rows and their traffic take of this rank's GPU. The last stage's rows are its model's."""
        runner, place = self._worker.model_runner, self._place
        if not self._boot.parts or place.is_last or runner.device.type == "cpu":
            return 0
        model, rows = self._boot.vllm_config.model_config, runner.max_num_reqs
        columns = model.get_vocab_size() * self._boot.parts[place.stage] / place.tp_size
        hidden, depth = model.get_hidden_size(), max(2, self._boot.watched.inflight)
        elements = columns * (hidden + 2 * rows) + depth * rows * hidden
        return int(elements * model.dtype.itemsize)

    def offer(self, stage_logits: StageLogits, hidden: torch.Tensor) -> ProjectionOffer | str:
        """The last stage's rows, or why they cannot be shared out; ``hidden`` as of OfferedRows."""
        if not self._boot.parts:
            return ""
        self._offered = OfferedRows(stage_logits, hidden)
        return self._offered.reason or self._offered.offer

    def time_parts(self, stage_logits: StageLogits | None, sequences: int) -> Measured:
        """What :func:`time_parts` says of this rank."""
        return time_parts(self._worker.model_runner, stage_logits, sequences, self._device)

    def take(self, offers: Sequence[ProjectionOffer], bounds: Sequence[int]) -> None:
        """Take this rank's rows of what is offered. ``bounds``: as BIC-L has them; writer ``r *
        stages + s`` is rank r of stage s."""
        self.writer = self._place.tp_rank * self._place.stages + self._place.stage
        with set_current_vllm_config(self._boot.vllm_config):
            self.shard = self._take(offers, *bounds[self.writer : self.writer + 2])

    def _take(self, offers: Sequence[ProjectionOffer], start: int, stop: int) -> ProjectionShard:
        loaded = None if self._offered is None else self._offered.rows
        dtype = self._boot.vllm_config.model_config.dtype
        device = self._worker.model_runner.device
        return ProjectionShard(offers, start, stop, dtype, device, loaded)

    def keep(self) -> None:
        """The last stage keeps what it has offered, if nobody has taken it."""
        if self._offered is not None and self.shard is None:
            self._offered.close(taken=False)

    def open(
        self,
        ends: LinkEnds,
        logits: LogitsHandover | None,
        record: Record,
        fail: Callable[[Exception], None],
    ) -> Projection:
        """This rank's end of the links of final hidden states; all stages have their rows now."""
        assert self.shard is not None
        assert logits is not None, "every rank of every stage writes logits"
        place = self._place
        last_stage = (place.stages - 1) * place.tp_size
        if place.is_last:
            if self._offered is not None:
                self._offered.close()
            receivers = range(place.tp_rank, last_stage, place.tp_size)
            senders = [ends.take_sender(receiver)[1] for receiver in receivers]
            return SharedProjection(senders, self.shard, record)
        link, receiver = ends.take_receiver(last_stage + place.tp_rank)
        return ProjectionThread(
            self._device, receiver, self.shard, logits, record, fail, link.stall_timeout
        )
