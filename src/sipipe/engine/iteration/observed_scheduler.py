"""Additions of SiPipe to any scheduler, its own, vLLM's or a user's: a record of each iteration, the
phases for the trace, the failure of single requests, their order of arrival; for its own also the
stage times by which it decides how many microbatches to form."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm import outputs
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from sipipe.best_effort import BestEffort
from sipipe.engine.iteration.admission import leave_out_unknown_tokens, refusal_of_sampler
from sipipe.engine.iteration.head_drafts import HeadDrafts
from sipipe.engine.iteration.iteration import Scheduled
from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.requests import RequestTracker
from sipipe.engine.iteration.telemetry import Telemetry
from sipipe.engine.iteration.wrong_blocks import WrongBlocksScheduler
from sipipe.engine.scheduling.compilations import (
    INVALID,
    Compilations,
    allows_nothing,
    compile_beside,
)
from sipipe.engine.scheduling.concurrency import MeasuredTimes
from sipipe.engine.scheduling.scheduler import PipelineScheduler
from sipipe.engine.scheduling.speculations import speculation
from sipipe.engine.setup.compatibility import device_may_draw
from sipipe.observe.live import Word
from sipipe.observe.phases import Phase

logger = init_logger(f"vllm.{__name__}")

NAN = "NaN"
"""Word of a sampler's message that logits have no value (:mod:`sipipe.sampler.result`)."""
NOTHING_LEFT = "no token is left to sample"
"""Beginning of a sampler's message that every logit is masked (:mod:`sipipe.sampler.result`)."""


class ObservedScheduler(WrongBlocksScheduler):
    """Mixin; use :func:`observed`. Runs on the engine's thread only."""

    iterations: Iterations
    telemetry: Telemetry
    tracker: RequestTracker
    publish_due: Callable[[], None]
    """Publishes what waits for the result that is taken in."""
    head_drafts: HeadDrafts | None
    """Drafts of a head on the last stage; None: there is no head."""
    rows: int
    """Rows of logits of all microbatches in flight, where there are drafts; 0: there are none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._times: MeasuredTimes | None = None
        self._tokenless: set[str] = set()
        """Requests that have been scheduled and have no token yet."""
        self._idle_from = time.monotonic_ns()
        self.telemetry.live.set(Word.IDLE_FROM, self._idle_from)
        self._busy = False
        self._explaining = BestEffort("explaining why a request fails", bounded=False)
        self._watching = BestEffort("the figures of requests", bounded=False)
        if isinstance(self, PipelineScheduler):
            self.use_pp = False  # the tracker knows the tokens that stages are to be told
            self._times = self.telemetry.measured_times(self.controller, self.ahead)
        self._compilations: Compilations | None = None
        """None: of a scheduler that has no grammars."""
        if (manager := getattr(self, "structured_output_manager", None)) is not None:
            self._compilations = compile_beside(manager, self.vllm_config)
        controller = self._times.controller if self._times is not None else None
        self._speculation = speculation(self, controller)

    def add_request(self, request: Request) -> None:
        if self._kernels_draw():
            leave_out_unknown_tokens(request, self.vllm_config.model_config.get_vocab_size())
        super().add_request(request)
        if request.request_id in self.requests:  # it was not refused
            self.tracker.arrived(request.request_id)

    def _refusal(self, request: Request, known: Request | None) -> str:
        reason = super()._refusal(request, known)
        if not reason and self._kernels_draw():
            reason = refusal_of_sampler(request)
        return reason

    def _kernels_draw(self) -> bool:
        """Say if the kernels of vLLM's second sampler draw, whose tables have bounds."""
        return self.tracker.draws == "off" and device_may_draw()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        began = time.monotonic_ns()
        self._watching(None, self._show, began)
        self._speculation.fit()
        if self._compilations is not None:
            self._compilations.sweep()
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            asks = self._speculation.asks
            # Read where vLLM's runner has the head propose in the same pass, and by the last stage.
            output.num_spec_tokens_to_schedule = asks
            scheduled = Scheduled(
                output=output, began_ns=began, ended_ns=time.monotonic_ns(), asks=asks
            )
            if isinstance(self, PipelineScheduler):
                scheduled = replace(scheduled, slot=self.slot, turn=self.turn, load=self.load)
            iteration = self.iterations.record(scheduled)
            if self._times is not None:
                self._times.expect(iteration)
            for new in output.scheduled_new_reqs:  # a preempted one is new once more
                if new.sampling_params and not self.requests[new.req_id].num_output_tokens:
                    self._tokenless.add(new.req_id)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        self.publish_due()
        iteration = self.iterations.finish(scheduler_output)
        errors = iteration.outcome.errors if iteration is not None else {}
        refused = self._refused()
        failing: dict[str, str] = {}
        if errors:
            # vLLM's own way to finish requests with an error from within an update.
            # One that is scheduled once more already may have failed before.
            failing = {name: errors[name] for name in errors if self._takes_result(name)}
            for request_id, reason in failing.items():
                errors[request_id] = failing[request_id] = self._explaining(
                    reason, self._explained, request_id, reason
                )
            for request_id, reason in failing.items():
                logger.error("request %s fails: %s", request_id, reason)
            self.grammar_compile_error_reqs.update(_failed(failing))  # type: ignore[attr-defined]
        if errors or (iteration is not None and iteration.outcome.tainted):
            self.clear_blocks()
        wrong = self.blocks_of(name for name, why in failing.items() if NAN in why)
        began = time.monotonic_ns()
        if self._tokenless and model_runner_output.sampled_token_ids:  # none of a pooling model
            self._watching(None, self._time_first_tokens, model_runner_output)
        result = super().update_from_output(scheduler_output, model_runner_output)
        if wrong:
            # It may have come from a block that had another's NaN before, and would be in every
            # request with that prompt. They are free by now, and nobody has them yet.
            self.kv_cache_manager.evict_blocks(wrong)  # type: ignore[attr-defined]
        if iteration is not None:
            self._speculation.take(iteration)
        reasons = errors | refused
        for client in result.values() if reasons else ():
            for output in client.outputs:
                if output.finish_reason == FinishReason.ERROR and output.request_id in reasons:
                    output.stop_reason = reasons[output.request_id]
                    output.num_nans_in_logits = int(NAN in reasons[output.request_id])
        ended = time.monotonic_ns()
        if iteration is not None:
            self.telemetry.record(Phase.UPDATE, iteration, began, ended)
        self._watching(None, self._show, ended)
        return result

    def _takes_result(self, request_id: str) -> bool:
        """Say if a request takes what the next result has of it.

        A request that has begun anew takes nothing that was computed before: its blocks may have held
        anything, and an error of its own comes again.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        return not (request.drop_stale_output and request.num_stale_output_tokens > 0)

    def _explained(self, request_id: str, reason: str) -> str:
        """``reason``, why a request has no token; or that its grammar allows none."""
        structured = self.requests[request_id].structured_output_request
        if structured is None or not reason.startswith(NOTHING_LEFT):
            return reason
        if not allows_nothing(self.structured_output_manager, structured.grammar):  # type: ignore[attr-defined]
            return reason
        return f"{INVALID}the grammar allows no token behind those that it has allowed so far"

    def _refused(self) -> dict[str, str]:
        """Why the grammars of requests that fail now did not compile; vLLM 0.33 says so itself."""
        failing = getattr(self, "grammar_compile_error_reqs", None)
        if not isinstance(failing, set):
            return {}
        reasons = {}
        for request_id in failing:
            request = self.requests.get(request_id)
            structured = request.structured_output_request if request is not None else None
            if structured is not None and isinstance(structured.grammar, Exception):
                reasons[request_id] = f"{INVALID}{structured.grammar}"
        return reasons

    def _time_first_tokens(self, output: ModelRunnerOutput) -> None:
        now = time.time()
        live = self.telemetry.live
        for request_id in list(self._tokenless):
            request = self.requests.get(request_id)
            index = output.req_id_to_index.get(request_id)
            if request is None:
                self._tokenless.discard(request_id)
            elif index is not None and output.sampled_token_ids[index]:
                self._tokenless.discard(request_id)
                live.add(Word.FIRST_TOKENS)
                live.add(Word.TTFT_NS, max(0, int((now - request.arrival_time) * 1e9)))

    def _show(self, now: int) -> None:
        """Show how many requests there are, and since when there are none."""
        live = self.telemetry.live
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
        live.set(Word.RUNNING, running)
        live.set(Word.WAITING, waiting)
        live.set(Word.INFLIGHT, len(self.iterations))
        if self._busy == bool(running or waiting):
            return
        self._busy = not self._busy
        if self._busy:
            self.telemetry.idle(self._idle_from, now)
            if self._times is not None:
                self._times.pause()
        else:
            self._idle_from = now
            live.set(Word.IDLE_FROM, now)


def _failed(errors: dict[str, str]) -> dict[str, Any]:
    """Why requests fail, as vLLM 0.33 wants it; 0.32 takes their ids alone."""
    made = getattr(outputs, "RequestError", None)
    if made is None:
        return dict(errors)
    return {
        name: made(
            code="validation_error" if why.startswith(INVALID) else "generation_error", message=why
        )
        for name, why in errors.items()
    }


def observed(
    scheduler: type,
    iterations: Iterations,
    telemetry: Telemetry,
    tracker: RequestTracker,
    publish_due: Callable[[], None] = lambda: None,
    rows: int = 0,
    head_drafts: HeadDrafts | None = None,
) -> type:
    """``scheduler`` with the mixin in front, bound to this engine's records and telemetry."""
    records: dict[str, Any] = {
        "iterations": iterations,
        "telemetry": telemetry,
        "tracker": tracker,
        "rows": rows,
    }
    records["head_drafts"] = head_drafts
    records["publish_due"] = staticmethod(publish_due)
    if issubclass(scheduler, ObservedScheduler):  # of an engine before, with the same configuration
        scheduler = scheduler.__bases__[1]
    bases = ObservedScheduler, scheduler
    return type(scheduler.__name__, bases, {**records, "__module__": scheduler.__module__})
