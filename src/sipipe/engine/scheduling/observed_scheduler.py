"""What SiPipe adds to whichever scheduler the engine uses: a record of each iteration, the phases
for the trace, the failure of single requests, and for its own the stage times by which it decides
how many microbatches to form.

Mixed in front of SiPipe's scheduler, vLLM's own, or a class of the user's, so that neither tracing
nor the failure of a single request depends on the choice.
"""

import time
from typing import Any

from vllm import outputs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from sipipe.engine.iterations import Iterations
from sipipe.engine.scheduling.concurrency import MeasuredTimes
from sipipe.engine.scheduling.scheduler import PipelineScheduler
from sipipe.engine.telemetry import Telemetry
from sipipe.observe.live import Word
from sipipe.observe.phases import Phase


class ObservedScheduler:
    """Mixin; use :func:`observed`. Runs on the engine's thread only."""

    iterations: Iterations
    telemetry: Telemetry

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._times: MeasuredTimes | None = None
        if isinstance(self, PipelineScheduler):
            self._times = self.telemetry.measured_times()
            self.follow(self._times.controller)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        began = time.monotonic_ns()
        if self._times is not None:
            self._times.poll()
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if output.total_num_scheduled_tokens:
            slot = self.slot if isinstance(self, PipelineScheduler) else None
            self.iterations.scheduled(output, slot, began, time.monotonic_ns())
            self.telemetry.live.set(Word.WAITING, len(self.waiting))  # type: ignore[attr-defined]
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        iteration = self.iterations.finish(scheduler_output)
        if iteration is not None and iteration.errors:
            # vLLM's own way to finish requests with an error from within an update.
            self.grammar_compile_error_reqs.update(_failed(iteration.errors))  # type: ignore[attr-defined]
        began = time.monotonic_ns()
        result = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        if iteration is not None:
            self.telemetry.record(Phase.UPDATE, iteration, began, time.monotonic_ns())
        return result


def _failed(errors: dict[str, str]) -> dict[str, Any]:
    """Why requests fail, as vLLM 0.33 wants it; 0.32 takes their ids alone."""
    made = getattr(outputs, "RequestError", None)
    if made is None:
        return dict(errors)
    return {
        request_id: made(code="generation_error", message=reason)
        for request_id, reason in errors.items()
    }


def observed(scheduler: type, iterations: Iterations, telemetry: Telemetry) -> type:
    """``scheduler`` with the mixin in front, bound to this engine's records and telemetry."""
    return type(
        scheduler.__name__,
        (ObservedScheduler, scheduler),
        {
            "iterations": iterations,
            "telemetry": telemetry,
            "__module__": scheduler.__module__,
        },
    )
