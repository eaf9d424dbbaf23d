"""A stage's part of the output projection: all of it, none, or its share of the columns.

Where it is shared out, the last stage's final hidden states go to every other stage on a link of
their own (:mod:`sipipe.worker.projection.thread`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from sipipe.ipc.link.sender import Sender
from sipipe.observe.phases import Phase
from sipipe.worker.device import Launched
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.projection.logits import StageLogits
from sipipe.worker.projection.rows import ProjectionShard

Record = Callable[[Phase, ModelInput, int, int], None]
"""Records a phase of an iteration with its begin and end, in nanoseconds of ``time.monotonic_ns``."""

KEY = "hidden_states"
"""Key of the final hidden states among the tensors of their links."""


class Projection:
    """The output projection where it is not shared out: the last stage, which has ``stage_logits``,
    computes all of it, and other stages nothing."""

    def __init__(self, stage_logits: StageLogits | None = None) -> None:
        self._stage_logits = stage_logits

    def passing(self) -> AbstractContextManager[object]:
        """Context in which a forward pass is launched."""
        return nullcontext()

    def waiting(self) -> AbstractContextManager[object]:
        """Context within :meth:`passing` in which the pass waits for another process."""
        return nullcontext()

    def columns(
        self,
        inputs: ModelInput,  # noqa: ARG002
        rows: torch.Tensor,
        into: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """This rank's columns of the logits of final hidden states ``rows`` [n, H], on the last stage.
        They lie in ``into`` as :meth:`.StageLogits.compute` says. None on a rank that writes none."""
        assert self._stage_logits is not None, "only the last stage has final hidden states"
        return self._stage_logits.compute(rows, into)

    def put(self, launched: Launched) -> None:
        """Take note of an iteration that has been launched."""

    def drain(self) -> None:
        """Wait until the products of all iterations so far are done."""

    def doing(self) -> str:
        """The product that is computed now, as a predicate, for the report of a stall."""
        return ""

    def close(self) -> None:
        """End the links, and the threads that wait for them."""


@dataclass
class SharedProjection(Projection):
    """The last stage's share of the output projection, where it is shared out."""

    _senders: Sequence[Sender]
    """Links to the same rank of each other stage."""
    _shard: ProjectionShard
    _record: Record

    def columns(
        self, inputs: ModelInput, rows: torch.Tensor, into: torch.Tensor | None
    ) -> torch.Tensor | None:
        began = time.monotonic_ns()
        for sender in self._senders:
            # wait: stall_timeout; a stage that is m products behind, or its end
            sender.send(inputs.iteration, len(rows), {KEY: rows})
        self._record(Phase.SEND, inputs, began, time.monotonic_ns())
        return self._shard.multiply(rows, into)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
