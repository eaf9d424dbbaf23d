"""A stage on vLLM's second runner, for CPUs and GPUs, before and after its channels are open.

SiPipe's part is around the runner's forward pass. A thread of their own prepares inputs ahead
(:mod:`sipipe.worker.hooks.preparation`, :mod:`sipipe.worker.double_buffer`). Hidden states come and
go on links. The last stage's logits go to the samplers or to vLLM's own sampler
(:mod:`sipipe.worker.hooks.draws`). Results are handed on when the device has them
(:mod:`sipipe.worker.publisher`).

Who runs here: the preparing thread in :meth:`SampledStage.prepare`; the device thread in
:meth:`SampledStage.run` and in what the runner receives and sends through; the thread that follows
BIC-I in everything else, with no iteration in the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from sipipe.errors import DamagedError, UnsupportedError
from sipipe.messages.drafts import Drafted, DraftRequest
from sipipe.messages.header import Header, Kind
from sipipe.messages.replies import IterationReport, KVReport
from sipipe.messages.start_records import WorkerBoot
from sipipe.messages.step import int32_view
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder
from sipipe.worker.agreement import agreement, comparison
from sipipe.worker.device import Device, Launched
from sipipe.worker.double_buffer import DoubleBuffer
from sipipe.worker.hooks.draws import NothingDrawn
from sipipe.worker.hooks.preparation import SiPipePrepares, VllmPrepares, why_vllm_prepares
from sipipe.worker.inputs.kernels import Int32
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.late_input import LateInput
from sipipe.worker.links import Links
from sipipe.worker.projection.logits import LogitsHandover
from sipipe.worker.projection.projection import Projection
from sipipe.worker.publisher import Publisher

if TYPE_CHECKING:
    from sipipe.worker.drafter import Drafter

Report = Callable[[IterationReport | KVReport | Drafted], None]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Everything outside of a stage that it works with."""

    boot: WorkerBoot
    """Record from which the worker has started."""
    wrapper: Any
    """vLLM's wrapper of its worker, whose model is loaded."""
    report: Report
    """Reports to the engine that an iteration has run, where no sampler does."""
    recorder: Recorder
    """Recorder of the stage's phases."""
    fail: Callable[[Exception], None]
    """Takes the error that ends one of the stage's threads for which nobody waits."""

    @property
    def worker(self) -> Any:
        """vLLM's worker."""
        return self.wrapper.worker

    @property
    def runner(self) -> Any:
        """vLLM's second model runner."""
        return self.worker.model_runner

    @property
    def reports(self) -> bool:
        """True on the one rank that reports for the last stage."""
        place = self.boot.place
        return place.is_last and place.tp_rank == 0

    def record(self, phase: Phase, inputs: ModelInput, began: int, ended: int = 0) -> None:
        """Record a phase from ``began`` to ``ended`` (``time.monotonic_ns()``); 0 is now."""
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
    """A stage before its links are open, for control calls alone."""

    double_buffer: DoubleBuffer | None = None
    """Loop of the process's main thread; None while that follows BIC-I itself."""

    def grammar(self, iteration: int, output: GrammarOutput | None) -> None:
        """Take the grammar's bitmask for some requests of ``iteration``."""

    def tokens(self, header: Header, tokens: bytearray) -> None:
        """Take the tokens, as int32, of an iteration that was planned; ``header`` is its SCHEDULE's."""

    def draft(self, request: DraftRequest) -> None:
        """The thread on the control pipe: the tokens of an iteration, for a head to draft behind."""

    def drain(self) -> None:
        """Wait until nothing of an iteration is in the worker."""

    def doing(self) -> str:
        """Predicates on the threads that run iterations, for the report of a stall."""
        return ""

    def close(self) -> None:
        """End the threads."""


def kv_reports(around: Surroundings) -> Callable[[Launched], None]:
    """A function that reports to the engine what the worker's KV connector has done in an iteration."""
    if around.boot.vllm_config.kv_transfer_config is None:
        return lambda _: None
    rank = around.boot.place.rank
    return lambda launched: around.report(
        KVReport(iteration=launched.inputs.iteration, rank=rank, output=launched.kv)
    )


def drafter_of(
    around: Surroundings, device: Device, preparation: SiPipePrepares, slots: int
) -> Drafter | None:
    """The drafter of this stage; None where no head was loaded."""
    speculator = around.worker.speculator
    if speculator is None:
        return None
    from sipipe.worker.drafter import Drafter
    from sipipe.worker.hooks.head import head_of_speculator

    return Drafter(
        head_of_speculator(speculator, around.runner),
        around.runner,
        preparation.buffers,
        stage_device=device,
        slots=slots,
        answer=around.report if around.reports else lambda _: None,
        compare=comparison(around.boot.place, around.boot.config.stall_timeout),
    )


SETS = 2
"""Sets of input buffers: one is prepared while the device reads the other."""


class SampledStage(ClosedStage):
    """One rank of a stage whose channels are open. ``logits`` is this rank's writer of BIC-L, if it has
    one."""

    double_buffer: DoubleBuffer

    def __init__(
        self,
        around: Surroundings,
        links: Links,
        device: Device,
        draws: NothingDrawn,
        projection: Projection,
        logits: LogitsHandover | None,
    ) -> None:
        self._around = around
        self._links = links
        self._device = device
        self._draws = draws
        self._projection = projection
        boot = around.boot
        stall_timeout = boot.config.stall_timeout
        # SiPipe's group of stages (`hooks.world`), through which vLLM's runner sends and receives.
        group: Any = get_pp_group()
        group.receive = self._receive
        group.send = self._send
        draws.open(projection, logits)
        nothing = ModelInput(iteration=-1, slot=0, buffer_set=0, output=None)
        self._launched = Launched(inputs=nothing)
        """The iteration that is being launched, or was last."""
        self._publisher = Publisher(
            device,
            logits,
            report=around.report,
            record=around.record,
            fail=around.fail,
            stall_timeout=stall_timeout,
            kv_reports=kv_reports(around),
        )
        self._late = LateInput("tokens", None)
        self._preparation = VllmPrepares(self._tokens)
        self._drafter: Drafter | None = None
        """Draft head on this stage; None if it has none."""
        reason = why_vllm_prepares(around.runner)
        if not (draws.reads_states or reason):
            self._preparation = SiPipePrepares(
                self._tokens,
                around.runner,
                device,
                slots=boot.watched.inflight,
                sets=SETS,
                logits=boot.rows,
                following=around.worker.speculator is not None,
                decode_tokens=draws.decode_tokens,
            )
            self._drafter = drafter_of(around, device, self._preparation, boot.watched.inflight)
        elif boot.speculates and not draws.reads_states:
            raise UnsupportedError(
                f"--speculative-config: SiPipe does not draft here, since {reason}: leave it out"
            )
        self.double_buffer = DoubleBuffer(
            self,
            sets=SETS,
            stall_timeout=stall_timeout,
            interrupt=self._interrupt,
            may_run=self._may_run,
            agree=agreement(boot.place) if self._drafter is not None else lambda work: work,
        )

    def _may_run(self, inputs: ModelInput) -> bool:
        """Say if the requests for drafts are run that were sent before this iteration was published."""
        return self._drafter is None or self._drafter.done >= inputs.output.drafts_asked

    def draft(self, request: DraftRequest) -> None:
        drafter = self._drafter
        assert drafter is not None, "drafts are asked of the last stage, which has the head"
        self.double_buffer.run_between(partial(drafter.propose, request))

    def _interrupt(self) -> None:
        """End the device thread's wait for another process."""
        self._late.close()
        self._links.interrupt()
        self._draws.close()

    def grammar(self, iteration: int, output: GrammarOutput | None) -> None:
        self._draws.restrict(iteration, output)

    def prepare(self, header: Header, buffer_set: int, output: SchedulerOutput) -> ModelInput:
        """Preparing thread: write the inputs of ``output`` into ``buffer_set``. Those of a planned
        iteration lack its tokens, which :meth:`tokens` brings."""
        began = time.monotonic_ns()
        inputs = ModelInput(
            iteration=header.number, slot=header.slot, buffer_set=buffer_set, output=output
        )
        inputs.logits_row = header.logits_row
        inputs.samples = header.logits_rows
        inputs.awaits = header.kind is Kind.PLAN
        self._preparation.prepare(inputs)
        self._around.record(Phase.PREPARE, inputs, began)
        return inputs

    def run(self, inputs: ModelInput) -> None:
        """Device thread: launch the iteration. Returns before the device has run it; :meth:`prepare` of
        the same set waits for that."""
        with self._projection.passing():
            launched = Launched(inputs=inputs, first=self._device.mark())
            self._launched = launched
            self._preparation.begin(inputs)
            self._draws.begin(launched)
            output = self._around.wrapper.execute_model(inputs.output)
            if self._drafter is not None and inputs.num_tokens:
                self._drafter.keep(inputs)
            if inputs.num_tokens:
                launched.output = self._draws.finish(self._around.worker, inputs, output)
            else:  # only blocks of the KV cache come or go
                launched.output = output
                launched.reports = False
            returned = getattr(launched.output, "model_runner_output", launched.output)
            launched.kv = launched.kv or getattr(returned, "kv_connector_output", None)
            self._draws.end()
        launched.last = self._device.mark()
        self._publisher.put(launched)
        self._projection.put(launched)

    def tokens(self, header: Header, tokens: bytearray) -> None:
        self._late.put(header.number, (header, tokens))

    def _tokens(self, inputs: ModelInput) -> Int32:
        """Device thread: wait for the tokens of ``inputs``, which was planned. Raises DamagedError: they
        are not as many as it has."""
        name = f"iteration {inputs.iteration}"
        self.double_buffer.running = f"waits for the tokens of {name}"
        with self._projection.waiting():
            header, tokens = self._late.take(inputs.iteration)
        token_ids = int32_view(tokens)
        if len(token_ids) != inputs.num_tokens:
            raise DamagedError(
                f"channel bic-i: {len(token_ids)} tokens came for {inputs.num_tokens} of {name}"
            )
        inputs.logits_row = header.logits_row
        inputs.samples = header.logits_rows
        inputs.awaits = False
        self.double_buffer.running = f"runs {name}"
        self._launched.first = self._device.mark()
        return token_ids

    def _receive(self) -> dict[str, torch.Tensor]:
        """Receive hidden states into the runner's own buffers, which it returns: they have the rows
        with which the runner may pad the batch."""
        began = time.monotonic_ns()
        inputs = self._launched.inputs
        name = f"iteration {inputs.iteration}"
        count = inputs.num_tokens
        self.double_buffer.running = f"waits for hidden states of {name}"
        with self._projection.waiting():
            buffers: dict[str, torch.Tensor] = self._around.runner.intermediate_tensors.tensors
            tensors = self._links.take(inputs.iteration, count, buffers)
            for key, tensor in tensors.items():
                # vLLM hands a stage what its model makes room for. What else one sends is not read.
                buffer = buffers.get(key)
                if buffer is not None and tensor.data_ptr() != buffer.data_ptr():
                    buffer[:count].copy_(tensor)  # the link did not put it there
            self._links.release(inputs.iteration)
        self.double_buffer.running = f"runs {name}"
        self._around.record(Phase.WAIT_HIDDEN, inputs, began)
        self._launched.first = self._device.mark()
        return buffers

    def _send(self, tensors: Any) -> Callable[[], None]:
        """Send hidden states, without the rows with which the runner has padded the batch. Returns a
        function that waits until they may be overwritten."""
        began = time.monotonic_ns()
        inputs = self._launched.inputs
        iteration = inputs.iteration
        count = inputs.num_tokens
        self.double_buffer.running = f"hands over iteration {iteration}"
        rows = {key: tensor[:count] for key, tensor in tensors.items()}
        # wait: `stall_timeout`; the next stage, which gives buffers back, or its end
        self._links.send(iteration, count, rows)
        self._around.record(Phase.SEND, inputs, began)
        return self._links.wait_sent

    def drain(self) -> None:
        self._projection.drain()
        self._publisher.drain()
        self._links.flush()

    def doing(self) -> str:
        predicates = [self.double_buffer.doing(), f"(publisher) {self._publisher.doing()}"]
        projection = self._projection.doing()
        if projection:
            predicates.append(f"(projection thread) {projection}")
        return ", ".join(predicates)

    def close(self) -> None:
        self.double_buffer.close()
        self._publisher.close()
