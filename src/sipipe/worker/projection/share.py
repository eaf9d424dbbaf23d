"""A worker's share of the output projection: the steps by which it gets and opens it.

The last stage's ranks offer their rows. Every stage says how long its parts take. Every rank takes
its rows, and opens its end of the links of final hidden states.

Who runs here: the thread that follows BIC-I, in control calls with no iteration in the worker.
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
    """One rank's share. ``worker`` is vLLM's, whose model is loaded."""

    def __init__(self, boot: WorkerBoot, worker: Any, device: Device) -> None:
        self._boot = boot
        self._place = boot.place
        self._worker = worker
        self._device = device
        self._offered: OfferedRows | None = None
        self.shard: ProjectionShard | None = None
        """This rank's rows, once it has taken them."""
        self.writer = boot.place.tp_rank
        """Index of this rank among the writers of BIC-L."""

    def device_bytes(self) -> int:
        """Bytes that the rows and their traffic take of this rank's GPU. The last stage's rows are its
        model's, and take nothing more."""
        runner = self._worker.model_runner
        place = self._place
        if not self._boot.parts or place.is_last or runner.device.type == "cpu":
            return 0
        model = self._boot.vllm_config.model_config
        rows = runner.max_num_reqs
        hidden = model.get_hidden_size()
        depth = max(2, self._boot.watched.inflight)
        columns = model.get_vocab_size() * self._boot.parts[place.stage] / place.tp_size
        weights = columns * hidden
        logits = 2 * columns * rows  # two products at a time, at most
        link = depth * rows * hidden
        return int((weights + logits + link) * model.dtype.itemsize)

    def offer(self, stage_logits: StageLogits, hidden: torch.Tensor) -> ProjectionOffer | str:
        """The last stage's offer of its rows, or why they cannot be shared out; ``hidden`` as
        :class:`.OfferedRows` takes it."""
        if not self._boot.parts:
            return ""
        self._offered = OfferedRows(stage_logits, hidden)
        return self._offered.reason or self._offered.offer

    def time_parts(self, stage_logits: StageLogits | None, sequences: int) -> Measured:
        """Measure this rank as :func:`~sipipe.worker.projection.rows.time_parts` does."""
        return time_parts(self._worker.model_runner, stage_logits, sequences, self._device)

    def take(self, offers: Sequence[ProjectionOffer], bounds: Sequence[int]) -> None:
        """Take this rank's rows out of ``offers``. ``bounds`` are the first columns of the writers of
        BIC-L, with V at the end. Writer ``r * stages + s`` is rank r of stage s, so that the columns of
        one offer, which a rank of the last stage has made, follow one another."""
        self.writer = self._place.tp_rank * self._place.stages + self._place.stage
        with set_current_vllm_config(self._boot.vllm_config):
            self.shard = self._take(offers, bounds[self.writer], bounds[self.writer + 1])

    def _take(self, offers: Sequence[ProjectionOffer], start: int, stop: int) -> ProjectionShard:
        """The rows from ``start`` on, without ``stop``."""
        return ProjectionShard(
            offers,
            start=start,
            stop=stop,
            dtype=self._boot.vllm_config.model_config.dtype,
            device=self._worker.model_runner.device,
            loaded=None if self._offered is None else self._offered.rows,
        )

    def withdraw_offer(self) -> None:
        """Free the memory of this rank's offer if the projection is not shared out after all. The last
        stage keeps its rows."""
        if self._offered is not None and self.shard is None:
            self._offered.close(taken=False)

    def open(
        self,
        ends: LinkEnds,
        logits: LogitsHandover | None,
        record: Record,
        fail: Callable[[Exception], None],
    ) -> Projection:
        """Open this rank's end of the links of final hidden states. All stages have their rows now, so
        the last one frees the memory of its offer.

        Args:
            ends: this rank's ends of links that were opened and tried. Those that are used are taken.
            logits: this rank's writer of BIC-L.
            record: records phases.
            fail: called with an error of a thread.
        """
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
            device=self._device,
            receiver=receiver,
            shard=self.shard,
            logits=logits,
            record=record,
            fail=fail,
            bound=link.stall_timeout,
        )
