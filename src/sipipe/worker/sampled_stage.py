"""A stage on vLLM's second runner, for CPUs and GPUs; what it is made with; one that is not open yet.

What SiPipe has is around the runner's forward pass: inputs are prepared ahead by a thread of their
own (:mod:`sipipe.worker.hooks.preparation`, :mod:`sipipe.worker.double_buffer`), hidden states come and go
on links, the last stage's logits go to the samplers or to vLLM's own (:mod:`sipipe.worker.hooks.draws`),
and results are handed on when the device has them (:mod:`sipipe.worker.publisher`).

Who runs here: the preparing thread in :meth:`SampledStage.prepare`; the device thread in
:meth:`SampledStage.run` and what the runner receives and sends through; whoever follows BIC-I in
all else, with no iteration in the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from sipipe.errors import DamagedError, UnsupportedError
from sipipe.messages.drafts import Drafted, DraftRequest
from sipipe.messages.header import Header, Kind
from sipipe.messages.replies import IterationReport, KVReport
from sipipe.messages.stage_place import StagePlace
from sipipe.messages.start_records import WorkerBoot
from sipipe.messages.step import int32_view
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder
from sipipe.worker.device import Device, Launched
from sipipe.worker.double_buffer import DoubleBuffer, Work
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

    def tokens(self, header: Header, tokens: bytearray) -> None:
        """What a PLAN awaits: its SCHEDULE, with its tokens as int32."""

    def draft(self, request: DraftRequest) -> None:
        """The thread on the control pipe: the tokens of an iteration, for a head to draft behind."""

    def drain(self) -> None:
        """Return when nothing of an iteration is in the worker."""

    def doing(self) -> str:
        """What the threads that run iterations do now, as predicates."""
        return ""

    def close(self) -> None:
        """End the threads."""


def kv_reports(around: Surroundings) -> Callable[[Launched], None]:
    """What tells the engine what the worker's KV connector has done, iteration by iteration."""
    if around.boot.vllm_config.kv_transfer_config is None:
        return lambda _: None
    rank = around.boot.place.rank
    return lambda launched: around.report(
        KVReport(iteration=launched.inputs.iteration, rank=rank, output=launched.kv)
    )


def drafter_of(around: Surroundings, preparation: SiPipePrepares, slots: int) -> Drafter | None:
    """What proposes drafts on this stage; None where no head was loaded."""
    speculator = around.worker.speculator
    if speculator is None:
        return None
    from sipipe.worker.drafter import Drafter
    from sipipe.worker.hooks.head import Head

    return Drafter(
        Head(speculator, around.runner),
        around.runner,
        preparation.buffers,
        slots=slots,
        answer=around.report if around.reports else lambda _: None,
    )


def agreement(place: StagePlace) -> Callable[[Work], Work]:
    """What has all ranks of a stage do what its first one does next. A head has collectives, and each
    rank hears of drafts and of iterations in its own time."""
    if place.tp_size == 1:
        return lambda work: work
    group = get_tp_group()
    word = torch.zeros(1, dtype=torch.int64)

    def agree(work: Work) -> Work:
        word.fill_(work)
        # wait: none here, the engine's for an iteration; the first rank, which gets the same messages
        torch.distributed.broadcast(word, src=group.ranks[0], group=group.cpu_group)
        return Work(int(word))

    return agree


SETS = 2
"""Of input buffers: one is prepared while the device reads the other."""


class SampledStage(ClosedStage):
    """One rank of it, whose channels are open; ``logits``: this rank's writer of BIC-L, if any."""

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
        self._around, self._links = around, links
        boot, runner = around.boot, around.runner
        group: Any = get_pp_group()
        group.receive, group.send = self._receive, self._send
        bound = boot.config.stall_timeout
        self._device, self._draws, self._projection = device, draws, projection
        draws.open(projection, logits)
        nothing = ModelInput(iteration=-1, slot=0, buffer_set=0, output=None)
        self._launched = Launched(inputs=nothing)
        """The iteration that is being launched, or was last."""
        told: dict[str, Any] = {"report": around.report, "record": around.record}
        told |= {"fail": around.fail, "kv_reports": kv_reports(around)}
        self._publisher = Publisher(device, logits, stall_timeout=bound, **told)
        self._late = LateInput("tokens", None)
        self._preparation = VllmPrepares(self._tokens)
        self._drafter: Drafter | None = None
        """The head on this stage; None: it has none."""
        reason = why_vllm_prepares(runner)
        if not (draws.reads_states or reason):
            slots = boot.watched.inflight
            self._preparation = SiPipePrepares(
                self._tokens,
                runner,
                device,
                slots=slots,
                sets=SETS,
                logits=boot.rows,
                following=around.worker.speculator is not None,
            )
            self._drafter = drafter_of(around, self._preparation, slots)
        elif boot.speculates:
            raise UnsupportedError(
                f"--speculative-config: SiPipe does not draft here, since {reason}: leave it out"
            )
        self.double_buffer = DoubleBuffer(
            self,
            sets=SETS,
            stall_timeout=bound,
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
        self._late.close()
        self._links.interrupt()
        self._draws.close()

    def grammar(self, iteration: int, output: GrammarOutput | None) -> None:
        self._draws.restrict(iteration, output)

    def prepare(self, header: Header, buffer_set: int, output: SchedulerOutput) -> ModelInput:
        """Preparing thread: write ``output``'s inputs into ``buffer_set``; :meth:`tokens` ends a PLAN's."""
        began = time.monotonic_ns()
        inputs = ModelInput(
            iteration=header.number, slot=header.slot, buffer_set=buffer_set, output=output
        )
        inputs.logits_row, inputs.samples = header.logits_row, header.logits_rows
        inputs.awaits = header.kind is Kind.PLAN
        self._preparation.prepare(inputs)
        self._around.record(Phase.PREPARE, inputs, began)
        return inputs

    def run(self, inputs: ModelInput) -> None:
        """Device thread: launch the iteration; returns before the device has run it, for which
        :meth:`prepare` of the same set waits."""
        with self._projection.passing():
            launched = self._launched = Launched(inputs=inputs, first=self._device.mark())
            self._preparation.begin(inputs)
            self._draws.begin(launched)
            output = self._around.wrapper.execute_model(inputs.output)
            if self._drafter is not None and inputs.num_tokens:
                self._drafter.keep(inputs)
            if inputs.num_tokens:
                launched.output = self._draws.finish(self._around.worker, inputs, output)
            else:  # blocks of the KV cache alone come or go
                launched.output, launched.reports = output, False
            returned = getattr(launched.output, "model_runner_output", launched.output)
            launched.kv = launched.kv or getattr(returned, "kv_connector_output", None)
            self._draws.end()
        launched.last = self._device.mark()
        self._publisher.put(launched)
        self._projection.put(launched)

    def tokens(self, header: Header, tokens: bytearray) -> None:
        self._late.put(header.number, (header, tokens))

    def _tokens(self, inputs: ModelInput) -> Int32:
        """Device thread: wait for what ``inputs`` awaits."""
        name = f"iteration {inputs.iteration}"
        self.double_buffer.running = f"waits for the tokens of {name}"
        with self._projection.waiting():
            header, tokens = self._late.take(inputs.iteration)
        found = int32_view(tokens)
        if len(found) != inputs.num_tokens:
            raise DamagedError(
                f"channel bic-i: {len(found)} tokens came for {inputs.num_tokens} of {name}"
            )
        inputs.logits_row, inputs.samples = header.logits_row, header.logits_rows
        inputs.awaits = False
        self.double_buffer.running = f"runs {name}"
        self._launched.first = self._device.mark()
        return found

    def _receive(self) -> dict[str, torch.Tensor]:
        """Into the runner's own buffer, whose rows beyond the batch's are there when it pads."""
        began, inputs = time.monotonic_ns(), self._launched.inputs
        name, count = f"iteration {inputs.iteration}", inputs.num_tokens
        self.double_buffer.running = f"waits for hidden states of {name}"
        with self._projection.waiting():
            kept: dict[str, torch.Tensor] = self._around.runner.intermediate_tensors.tensors
            tensors = self._links.take(inputs.iteration, count, kept)
            for key, tensor in tensors.items():
                if tensor.data_ptr() != kept[key].data_ptr():  # else it came in pieces
                    kept[key][:count].copy_(tensor)
            self._links.release(inputs.iteration)
        self.double_buffer.running = f"runs {name}"
        self._around.record(Phase.WAIT_HIDDEN, inputs, began)
        self._launched.first = self._device.mark()
        return kept

    def _send(self, tensors: Any) -> Callable[[], None]:
        """Without the rows with which the runner has padded the batch."""
        began, inputs = time.monotonic_ns(), self._launched.inputs
        iteration, count = inputs.iteration, inputs.num_tokens
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
        said = [self.double_buffer.doing(), f"(publisher) {self._publisher.doing()}"]
        if due := self._projection.doing():
            said.append(f"(projection thread) {due}")
        return ", ".join(said)

    def close(self) -> None:
        self.double_buffer.close()
        self._publisher.close()
