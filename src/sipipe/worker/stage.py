"""A stage that is not open yet, and what every stage is made with.

:class:`sipipe.worker.sampled_stage.SampledStage` is the one that runs iterations.

Who runs here: whoever follows BIC-I, with no iteration in the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import GrammarOutput

from sipipe.messages.boots import WorkerBoot
from sipipe.messages.replies import IterationReport, KVReport
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder
from sipipe.worker.inputs.model_input import ModelInput

if TYPE_CHECKING:
    from sipipe.worker.double_buffer import DoubleBuffer

Report = Callable[[IterationReport | KVReport], None]


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

    def record(self, phase: Phase, inputs: ModelInput, began: int, ended: int = 0) -> None:
        """A phase that began at ``began`` (``time.monotonic_ns()``) and ends then, or now."""
        self.recorder.record(
            phase,
            inputs.iteration,
            inputs.slot,
            began,
            ended or time.monotonic_ns(),
            batch=max(inputs.num_reqs, inputs.samples),  # rows, where there are drafts
            tokens=inputs.num_tokens,
        )


class ClosedStage:
    """Before its links are open: control calls alone."""

    double_buffer: DoubleBuffer | None = None
    """What the process's main thread runs; None: it follows BIC-I itself."""

    def grammar(self, iteration: int, output: GrammarOutput | None) -> None:
        """What the next token of some requests of ``iteration`` may be."""

    def drain(self) -> None:
        """Return when nothing of an iteration is in the worker."""

    def doing(self) -> str:
        """What the threads that run iterations do now, as predicates."""
        return ""

    def close(self) -> None:
        """End the threads."""
