"""A stage that is not open yet, and one on vLLM's own path.

:class:`sipipe.worker.sampled_stage.SampledStage` is the stage whose tokens CPU samplers draw.

Who runs here: whoever follows BIC-I, with no iteration in the worker; vLLM's runner, in what it
receives and sends through.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from sipipe.messages.boots import WorkerBoot
from sipipe.messages.replies import IterationReport
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder
from sipipe.worker.device_thread import Launched
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.links import Links

if TYPE_CHECKING:
    from sipipe.worker.double_buffer import DoubleBuffer

Report = Callable[[IterationReport], None]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a stage is made with."""

    boot: WorkerBoot
    wrapper: Any
    """vLLM's, around its worker, whose model is loaded."""
    report: Report
    """Tells the engine that an iteration has run, where no sampler will."""
    recorder: Recorder
    fail: Callable[[Exception], None]
    """Told what ends a thread of the stage's own that nobody waits for."""

    @property
    def worker(self) -> Any:
        return self.wrapper.worker

    @property
    def runner(self) -> Any:
        return self.worker.model_runner

    @property
    def reports(self) -> bool:
        """Whether this rank reports."""
        place = self.boot.place
        return place.is_last and place.tp_rank == 0

    def record(
        self, phase: Phase, inputs: ModelInput | Launched, began: int, ended: int = 0
    ) -> None:
        """A phase that began at ``began`` (``time.monotonic_ns()``) and ends then, or now."""
        self.recorder.record(
            phase,
            inputs.iteration,
            inputs.slot,
            began,
            ended or time.monotonic_ns(),
            batch=inputs.num_reqs,
            tokens=inputs.num_tokens,
        )


class ClosedStage:
    """Before its links are open: control calls alone."""

    double_buffer: DoubleBuffer | None = None
    """What the process's main thread runs; None: it follows BIC-I itself."""

    def execute(self, output: SchedulerOutput) -> Any:  # noqa: ARG002
        """vLLM's ``execute_model``, as a control call."""
        raise AssertionError("on SiPipe's path an iteration is no call")

    def expect(self, iteration: int, row: int) -> None:
        """The iteration's logits will have the rows of BIC-L from ``row`` on."""

    def grammar(self, iteration: int, output: GrammarOutput | None) -> None:
        """What the next token of some requests of ``iteration`` may be."""

    def drain(self) -> None:
        """Return when nothing of an iteration is in the worker."""

    def doing(self) -> str:
        """What the threads that run iterations do now, as predicates."""
        return ""

    def close(self) -> None:
        """End the threads."""


class VllmStage(ClosedStage):
    """vLLM's own path: its runner and sampler unmodified, hidden states through our links."""

    def __init__(self, around: Surroundings, links: Links) -> None:
        self._around = around
        self._links = links
        self._iteration = self._tokens = 0
        """Of the step that vLLM's worker runs."""
        group: Any = get_pp_group()
        group.receive, group.send = self._receive, self._send

    def execute(self, output: SchedulerOutput) -> Any:
        if output.total_num_scheduled_tokens > 0:
            self._iteration, self._tokens = self._iteration + 1, output.total_num_scheduled_tokens
        return self._around.wrapper.execute_model(output)

    def _receive(self) -> dict[str, torch.Tensor]:
        """Into the runner's own buffer, whose rows beyond the batch's are there when it pads."""
        kept: dict[str, torch.Tensor] = self._around.runner.intermediate_tensors.tensors
        tensors = self._links.take(self._iteration, self._tokens, kept)
        for key, tensor in tensors.items():
            if tensor.data_ptr() != kept[key].data_ptr():  # else it came in pieces
                kept[key][: self._tokens].copy_(tensor)
        self._links.release(self._iteration)
        return kept

    def _send(self, tensors: Any) -> Callable[[], None]:
        """Without the rows with which the runner has padded the batch."""
        rows = {key: tensor[: self._tokens] for key, tensor in tensors.items()}
        # wait: `stall_timeout`; the next stage, which gives buffers back, or its end
        self._links.send(self._iteration, self._tokens, rows)
        return self._links.wait_sent

    def drain(self) -> None:
        self._links.wait_sent()
