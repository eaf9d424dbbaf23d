"""Recording stock vLLM: a worker and a scheduler that do what vLLM's do, and note the times.

    PYTHONPATH=. vllm serve MODEL --pipeline-parallel-size 2 \\
        --worker-cls benchmarks.stock_trace.TracedWorker \\
        --scheduler-cls benchmarks.stock_trace.TracedScheduler \\
        --additional-config '{"sipipe": {"trace": "traces/stock"}}'

Both timelines then have the same phases and lie side by side in ``sipipe trace report``. With
asynchronous scheduling take ``TracedAsyncScheduler``.

What is subclassed or wrapped, all of it on the instances of this process: the worker's
``execute_model`` and ``sample_tokens``; the runner's ``_model_forward``; the model's
``compute_logits``; the pipeline group's ``irecv_tensor_dict`` and ``isend_tensor_dict`` with the
handles that they return.

How the phases are read off stock's order of work:

- the iteration's number travels as an attribute of ``SchedulerOutput``;
- DISPATCH is the instant at which ``schedule`` returns: the next thing that EngineCore does;
- GATHER ends when ``update_from_output`` is called: that is when EngineCore has the tokens;
- a worker waits for scheduling output from the end of one call to the start of the next;
- PREPARE is what the runner does from its call to the start of the forward, but for waits;
- SAMPLE on the last stage is from the end of ``execute_model`` to that of ``sample_tokens``, since
  the worker runs nothing else between the two.

Only on CPUs, where a call returns when its work is done: the host's clock says nothing of when an
accelerator did what was launched.
"""

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from sipipe.engine.setup.derived import settings_of
from sipipe.errors import ConfigError
from sipipe.observe.format import Header
from sipipe.observe.phases import Phase, Role
from sipipe.observe.recorder import Recorder, open_recorder

if TYPE_CHECKING or current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker
else:  # importing it would replace torch's CUDA functions; _open refuses other platforms
    CPUWorker = object

_Iteration = tuple[int, int, int, int]
"""Number, slot, sequences and tokens."""

_NUMBER = "sipipe_iteration"
"""Attribute of ``SchedulerOutput``: pickled with it, ignored by vLLM."""
_now = time.monotonic_ns


def _open(vllm_config: Any, role: Role, index: int = 0, rank: int = 0) -> Recorder:
    if not current_platform.is_cpu():
        raise ConfigError("stock vLLM can be recorded on CPUs only")
    settings = settings_of(vllm_config)
    if settings.trace is None:
        raise ConfigError(
            "recording stock vLLM needs a directory: "
            """--additional-config '{"sipipe": {"trace": "DIR"}}'"""
        )
    limit, ranks = settings.trace_limit, vllm_config.parallel_config.world_size
    return open_recorder(
        settings.trace,
        Header(
            role=role,
            index=index,
            rank=rank,
            stages=vllm_config.parallel_config.pipeline_parallel_size,
            inflight=vllm_config.max_concurrent_batches,
            run=vllm_config.instance_id,
            label="stock vLLM",
            model=str(vllm_config.model_config.model),
        ),
        limit=limit and (limit << 20) // (1 + ranks),
    )


class TracedScheduler(Scheduler):
    """vLLM's scheduler; records SCHEDULE, DISPATCH, GATHER, UPDATE and IDLE.

    Iterations are numbered from 0; outputs with nothing to run are not counted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sipipe_recorder: Recorder = _open(self.vllm_config, "executor")
        self._sipipe_count = 0
        self._sipipe_slots = self.vllm_config.max_concurrent_batches
        self._sipipe_since = self._sipipe_idle = _now()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        start = _now()
        if self._sipipe_idle:
            self.sipipe_recorder.record(Phase.IDLE, 0, 0, self._sipipe_idle, start)
            self._sipipe_idle = 0
        output = super().schedule(*args, **kwargs)
        self._sipipe_since = end = _now()
        tokens = output.total_num_scheduled_tokens
        if tokens:
            number, batch = self._sipipe_count, len(output.num_scheduled_tokens)
            self._sipipe_count += 1
            setattr(output, _NUMBER, number)
            record, slot = self.sipipe_recorder.record, number % self._sipipe_slots
            record(Phase.SCHEDULE, number, slot, start, end, batch, tokens)
            record(Phase.DISPATCH, number, slot, end, end, batch, tokens)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        start = _now()
        result = super().update_from_output(scheduler_output, model_runner_output)
        number = getattr(scheduler_output, _NUMBER, None)
        if number is not None:
            record, slot = self.sipipe_recorder.record, number % self._sipipe_slots
            batch = len(scheduler_output.num_scheduled_tokens)
            drawn = sum(map(len, model_runner_output.sampled_token_ids or ()))
            record(Phase.GATHER, number, slot, self._sipipe_since, start, batch, drawn)
            self._sipipe_since = end = _now()
            record(Phase.UPDATE, number, slot, start, end, batch, drawn)
            if not any(self.get_request_counts()):
                self._sipipe_idle = end
        return result

    def shutdown(self) -> None:
        self.sipipe_recorder.close()
        super().shutdown()


class TracedAsyncScheduler(TracedScheduler, AsyncScheduler):
    """vLLM's scheduler for asynchronous scheduling, recorded."""


class _Handle:
    """A communication handle with another ``wait``."""

    def __init__(self, handle: Any, wait: Any) -> None:
        self._handle, self.wait = handle, wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class TracedWorker(CPUWorker):
    """vLLM's worker, recorded."""

    sipipe_now: _Iteration | None = None
    """The work in progress; None outside of it."""
    sipipe_recorder: Recorder | None = None
    _sipipe_count = 0
    _sipipe_since = 0
    _sipipe_prepare = 0
    _sipipe_sampling: tuple[_Iteration, int] | None = None

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's warm-up; recording begins after it."""
        result = super().compile_or_warm_up_model()
        stage, rank = get_pp_group().rank_in_group, get_tp_group().rank_in_group
        self.sipipe_recorder = _open(self.vllm_config, "stage", stage, rank)
        self._sipipe_wrap()
        self._sipipe_since = _now()
        return result

    def execute_model(self, scheduler_output: Any) -> Any:
        tokens = scheduler_output.total_num_scheduled_tokens
        if self.sipipe_recorder is None or not tokens:
            return super().execute_model(scheduler_output)
        number = getattr(scheduler_output, _NUMBER, self._sipipe_count)
        self._sipipe_count = number + 1
        slot = number % self.vllm_config.max_concurrent_batches
        self.sipipe_now = (number, slot, len(scheduler_output.num_scheduled_tokens), tokens)
        self.sipipe_note(Phase.WAIT_SCHEDULING, self._sipipe_since, _now())
        try:
            return super().execute_model(scheduler_output)
        finally:
            self._sipipe_since = _now()
            if get_pp_group().is_last_rank:
                self._sipipe_sampling = (self.sipipe_now, self._sipipe_since)
            self.sipipe_now = None

    def sample_tokens(self, grammar_output: Any) -> Any:
        pending, self._sipipe_sampling = self._sipipe_sampling, None
        result = super().sample_tokens(grammar_output)
        if pending is not None:
            of, start = pending
            self._sipipe_since = _now()
            self.sipipe_note(Phase.SAMPLE, start, self._sipipe_since, of)
        return result

    def shutdown(self) -> None:
        if self.sipipe_recorder is not None:
            self.sipipe_recorder.close()
        super().shutdown()

    def sipipe_note(self, phase: Phase, start: int, end: int, of: _Iteration | None = None) -> None:
        """Record a phase of ``of``, or of the iteration in progress."""
        of = of or self.sipipe_now
        if of is not None and self.sipipe_recorder is not None:
            self.sipipe_recorder.record(phase, of[0], of[1], start, end, of[2], of[3])

    def _sipipe_wrap(self) -> None:
        """Put the recording around what this process's runner and groups call."""
        runner, group = self.model_runner, get_pp_group()
        run, model = runner.execute_model, runner.get_model()
        # vLLM has no hook around its forward pass.
        forward = runner._model_forward  # noqa: SLF001

        def execute(*args: Any, **kwargs: Any) -> Any:
            self._sipipe_prepare = _now()
            return run(*args, **kwargs)

        def prepared_forward(*args: Any, **kwargs: Any) -> Any:
            self.sipipe_note(Phase.PREPARE, self._sipipe_prepare, _now())
            return timed_forward(*args, **kwargs)

        timed_forward = self._sipipe_timed(forward, Phase.FORWARD)
        runner.execute_model = execute
        runner._model_forward = prepared_forward  # noqa: SLF001
        if hasattr(model, "compute_logits"):
            model.compute_logits = self._sipipe_timed(model.compute_logits, Phase.LOGITS)
        if group.world_size > 1:
            receive = self._sipipe_timed(group.irecv_tensor_dict, Phase.WAIT_HIDDEN)
            send = self._sipipe_timed(group.isend_tensor_dict, Phase.SEND)

            def timed_receive(*args: Any, **kwargs: Any) -> Any:
                tensors, handles, after = receive(*args, **kwargs)
                return tensors, self._sipipe_handles(handles, Phase.WAIT_HIDDEN), after

            def timed_send(*args: Any, **kwargs: Any) -> Any:
                return self._sipipe_handles(send(*args, **kwargs), Phase.SEND)

            group.irecv_tensor_dict, group.isend_tensor_dict = timed_receive, timed_send

    def _sipipe_timed(self, call: Any, phase: Phase, of: _Iteration | None = None) -> Any:
        """``call``, recorded as a phase of ``of``, or of the iteration in progress."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = _now()
            result = call(*args, **kwargs)
            self.sipipe_note(phase, start, _now(), of)
            return result

        return timed

    def _sipipe_handles(self, handles: list[Any], phase: Phase) -> list[_Handle]:
        """``handles`` whose waits are recorded as a phase of the iteration that made them."""
        of = self.sipipe_now
        return [_Handle(h, self._sipipe_timed(h.wait, phase, of)) for h in handles]
