"""Where the output projection of a stage is computed: here, or shared out over all stages.

Shared out, the last stage's final hidden states go to every other stage on a link of their own
(:mod:`sipipe.worker.projection.thread`).
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
"""Takes a phase, its iteration, when it began and when it ended."""


KEY = "hidden_states"
"""Of final hidden states on their links."""


class Projection:
    """Not shared out: the last stage has all of it, ``stage_logits``, other stages nothing."""

    def __init__(self, stage_logits: StageLogits | None = None) -> None:
        self._stage_logits = stage_logits

    def passing(self) -> AbstractContextManager[object]:
        """Held while a forward pass is launched."""
        return nullcontext()

    def waiting(self) -> AbstractContextManager[object]:
        """Held within :meth:`passing`, while the pass waits for another process."""
        return nullcontext()

    def columns(
        self,
        inputs: ModelInput,  # noqa: ARG002
        rows: torch.Tensor,
        into: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Last stage: this rank's columns of the logits of final hidden states [n, H]; in ``into``
        as :meth:`StageLogits.compute` has it. None on a rank that writes none."""
        assert self._stage_logits is not None, "only the last stage has final hidden states"
        return self._stage_logits.compute(rows, into)

    def put(self, launched: Launched) -> None:
        """An iteration has been launched."""

    def drain(self) -> None:
        """Return when nothing of an iteration is due."""

    def doing(self) -> str:
        """What is due, for the report of a stall."""
        return ""

    def close(self) -> None:
        """End the links, and whatever waits for them."""


@dataclass
class SharedProjection(Projection):
    """The last stage's part, where it is shared out."""

    _senders: Sequence[Sender]
    """One to each other stage."""
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
        return self._shard.whole(rows, into)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
