"""A stage's ends of the data plane, and what runs between them.

The loop opens the link from the previous stage, the link to the next and, where logits are
written, the writer of BIC-L; where the output projection is shared out, the links from the last
stage too. On SiPipe's stage runner :class:`StageSteps` runs the iterations in the two threads of
:class:`DoubleBuffer`; on vLLM's own path there is no double buffer, and ``execute_model`` is a
control call.

Who runs here: whoever follows BIC-I, in control calls (``describe``, ``open``, ``run_vllm``) with
no iteration in the worker; vLLM's own runners, in what they send and receive through.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_pp_group, get_tp_group
from vllm.v1.core.sched.output import SchedulerOutput

from sipipe.ipc.link.buffers import buffer_bytes
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.schema import TensorSchema
from sipipe.ipc.link.sender import Sender
from sipipe.ipc.ring.logits import LogitsEndpoint, LogitsWriter
from sipipe.messages.boots import HeadOffer, StageDescription, WorkerBoot
from sipipe.messages.link import LinkEndpoint, buffer_tokens
from sipipe.messages.logits import LogitsShape
from sipipe.messages.measured import Measured
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder
from sipipe.worker.device import stage_device
from sipipe.worker.device_thread import Launched
from sipipe.worker.double_buffer import DoubleBuffer
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.logits import LogitsHandover
from sipipe.worker.publisher import Publisher
from sipipe.worker.runner import StageRunner
from sipipe.worker.shards import cut, join
from sipipe.worker.sharing import Sharing
from sipipe.worker.steps import StageSteps
from sipipe.worker.support import unsupported_reason
from sipipe.worker.vocabulary import SharedHead

if TYPE_CHECKING:
    from sipipe.worker.device_vocabulary import HeadThread
    from sipipe.worker.second_runner import SecondRunner

Report = Callable[..., None]


class StageLoop:
    """One worker's steady path.

    Args:
        boot: what the process was started with.
        wrapper: vLLM's, around its worker, whose model is loaded.
        sockets: of the links from the previous stage and to the next one, as far as there are any.
        report: tells the engine that an iteration has run, where no sampler will.
        recorder: takes the phases of each iteration.
        fail: told what ends a thread of the loop's own that nobody waits for.
    """

    def __init__(
        self,
        boot: WorkerBoot,
        wrapper: Any,
        sockets: Sequence[socket.socket],
        report: Report,
        recorder: Recorder,
        fail: Callable[[Exception], None],
    ) -> None:
        self._boot = boot
        self._place = boot.place
        self._worker = wrapper.worker
        self._execute_model: Callable[[SchedulerOutput], Any] = wrapper.execute_model
        self._sockets = sockets
        self._report = report
        self._fail = fail
        self._recorder = recorder
        self._runner: StageRunner | None = None
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._logits: LogitsHandover | None = None
        self._shared: SharedHead | HeadThread | None = None
        """Where the output projection is shared out over all stages."""
        self._second = self._host_second_runner()
        device = None if self._second is None else self._device
        make = getattr(self._worker, "sharing", Sharing)
        self._sharing: Sharing = make(boot, self._worker, device)
        self._publisher: Publisher | None = None
        self._iteration = self._tokens = 0
        """Of the step that vLLM's worker runs."""
        self._cuts = False
        """Whether this rank sends a part of its hidden states, and the next stage's ranks gather."""
        self.double_buffer: DoubleBuffer | None = None
        """The two threads of SiPipe's stage runner, once the data plane is open."""

        self._worker.reserved = self._sharing.device_bytes() + self._arena_bytes()

    # ---- opening, by control calls ------------------------------------------------------------

    def _host_second_runner(self) -> SecondRunner | None:
        """vLLM's second runner, its sampling replaced: before vLLM warms it up."""
        if self._boot.path != "sipipe" or not self._worker.use_v2_model_runner:
            return None
        from sipipe.worker.second_runner import SecondRunner  # other CPU workers do without it

        device = self._worker.model_runner.device
        self._device = getattr(self._worker, "emulated", None) or stage_device(device)
        second = SecondRunner(self._worker, self._device)
        if not self._boot.measures:
            second.take_over(per_row=self._boot.config.cpu_sampling == "per_row")
        return second

    def _arena_bytes(self) -> int:
        """What the link from the previous stage will take of this stage's GPU."""
        config, runner = self._boot.config, self._worker.model_runner
        kept = getattr(runner, "intermediate_tensors", None)
        if kept is None or runner.device.type == "cpu" or config.transport == "shm":
            return 0
        schema = TensorSchema.capture(kept.tensors, runner.max_num_tokens)
        tokens = buffer_tokens(runner.max_num_reqs, runner.max_num_tokens)
        return max(2, self._boot.watched.inflight) * buffer_bytes(schema, tokens)

    def describe(self) -> StageDescription:
        """What the engine needs to make this rank's channels; the KV cache is set up by now."""
        vllm_runner = self._worker.model_runner
        runner: SecondRunner | StageRunner | None = self._second
        if self._boot.path != "sipipe":
            return StageDescription()
        if runner is None and (unsupported := unsupported_reason(vllm_runner)):
            return StageDescription(unsupported=unsupported)
        with set_current_vllm_config(self._boot.vllm_config):
            if runner is None:
                runner = self._runner = StageRunner(
                    vllm_runner,
                    slots=self._boot.watched.inflight,
                    sets=self._sets,
                    check_token_safety=self._boot.config.check_token_safety,
                )
            if runner.head is None:
                return StageDescription()
            if self._boot.vllm_config.lora_config is not None:
                # The projection looks for a mapping.
                vllm_runner._set_active_loras((0,), (0,), set())
            model, device = self._boot.vllm_config.model_config, vllm_runner.device
            hidden = torch.randn(3, model.get_hidden_size(), dtype=model.dtype).to(device)
            with torch.inference_mode():
                logits = runner.head.settle(hidden)
                offered = self._sharing.offer(runner.head, hidden)
        if logits is None:
            return StageDescription(head=offered)
        shape = LogitsShape(
            vocab=runner.head.vocab_size if runner.head.bounds else logits.shape[1],
            dtype=str(logits.dtype).removeprefix("torch."),
            # Every rank writes its columns, or the first one rows that vLLM has gathered.
            bounds=runner.head.bounds,
        )
        return StageDescription(logits=shape, head=offered)

    def time_parts(self, *, sequences: int) -> Measured:
        """How long the parts of a microbatch take, all stages at once."""
        runner = self._second or self._runner
        assert runner is not None
        return self._sharing.time_parts(runner.head, sequences)

    def take_head(self, *, offers: list[HeadOffer], bounds: tuple[int, ...]) -> None:
        """Take this rank's rows of the output projection from the last stage, which offers them."""
        self._sharing.take(offers, bounds)

    def open(
        self,
        *,
        links: list[LinkEndpoint],
        logits: LogitsEndpoint | None,
        heads: Sequence[LinkEndpoint] = (),
    ) -> None:
        """Open this rank's ends of the links and, where it writes logits, the writer of BIC-L.

        ``heads``: the links from the last stage to each other, where the output projection is
        shared out; by rank of the receiver. ``logits`` is None when the engine runs on vLLM's own
        path.
        """
        place, config = self._place, self._boot.config
        sockets = list(self._sockets)  # of links within this host
        if not place.is_first:
            link = links[place.rank - place.tp_size]
            self._receiver = open_receiver(link, None if link.port else sockets.pop(0))
        if not place.is_last:
            link = links[place.rank]
            self._sender = open_sender(link, None if link.port else sockets.pop(0))
            self._cuts = bool(link.port) and place.tp_size > 1
        if logits is None or self._second is not None:
            group = get_pp_group()
            group.receive, group.send = self._receive_vllm, self._send_vllm
        if logits is None:
            return
        runner = self._second or self._runner
        assert runner is not None
        head = runner.head
        sharing = self._sharing
        if (head is not None or sharing.shard is not None) and sharing.writer < logits.shape.ranks:
            writer = LogitsWriter(logits, rank=sharing.writer)
            self._logits = LogitsHandover(writer)
            if self._second is not None:
                self._device.lock_pages(self._logits.buffer)
        sharing.keep()
        if sharing.shard is not None:
            self._shared = sharing.open(heads, sockets, self._logits, self._record, self._fail)
        if self._second is not None:
            self._publisher = Publisher(
                self._device,
                self._logits,
                report=self._report,
                record=self._record,
                fail=self._fail,
                stall_timeout=config.stall_timeout,
            )
            self._second.open(
                self._publisher,
                self._shared,
                writes=self._logits is not None,
                reports=place.is_last and place.tp_rank == 0,
            )
            return
        assert self._runner is not None
        steps = StageSteps(
            self._runner,
            head,
            self._receiver,
            self._sender,
            self._logits,
            report=self._report if place.is_last and place.tp_rank == 0 else None,
            record=self._record,
            stall_timeout=config.stall_timeout,
        )
        if self._shared is not None:
            assert isinstance(self._shared, SharedHead)
            steps.shared = self._shared
        if place.tp_size > 1:
            steps.part, steps.whole = self._part, self._whole
        self.double_buffer = DoubleBuffer(
            steps,
            sets=self._sets,
            stall_timeout=config.stall_timeout,
            interrupt=steps.interrupt,
            meanwhile=steps.meanwhile,
        )

    def measure(self, *, sequences: int) -> Measured:
        """How long the parts of a microbatch take, drawn on this device and by CPU samplers."""
        from sipipe.worker.measure import measure_stage  # as above

        assert self._second is not None
        with set_current_vllm_config(self._boot.vllm_config):
            return measure_stage(
                self._worker.model_runner, self._device, sequences, self._second.head, self._logits
            )

    def settle(self, *, draws: str) -> None:
        """Who draws, as ``cpu_sampling`` says it, now that it was measured; no iteration has run."""
        if draws != "off" and self._second is not None:
            self._second.take_over(per_row=draws == "per_row")
            return
        if self._publisher is not None:
            self._publisher.close()
        if self._logits is not None:
            self._device.unlock_pages(self._logits.buffer)
            self._logits.close()
        self._second = self._publisher = self._logits = None

    @property
    def _sets(self) -> int:
        return 2 if self._boot.config.overlap else 1

    def drain(self) -> None:
        """Return when no iteration is in the worker; control calls run then."""
        if self.double_buffer is not None:
            self.double_buffer.drain()
        if self._shared is not None:
            self._shared.drain()
        if self._publisher is not None:
            self._publisher.drain()
        if self._sender is not None:
            self._sender.wait_sent()

    def _record(
        self, phase: Phase, inputs: ModelInput | Launched, began: int, ended: int = 0
    ) -> None:
        """A phase that began at ``began`` (``time.monotonic_ns()``) and ends then, or now."""
        self._recorder.record(
            phase,
            inputs.iteration,
            inputs.slot,
            began,
            ended or time.monotonic_ns(),
            batch=inputs.num_reqs,
            tokens=inputs.num_tokens,
        )

    # ---- vLLM's runners, on either path ---------------------------------------------------------

    def run(
        self,
        iteration: int,
        slot: int,
        output: SchedulerOutput,
        logits_row: int = -1,
        logits_rows: int = 0,
    ) -> None:
        """Run an iteration of BIC-I, or prepare it for the device thread."""
        if self._logits is not None and logits_row >= 0:
            self._logits.expect(iteration, logits_row)
        if self._second is not None:
            self._iteration, self._tokens = iteration, output.total_num_scheduled_tokens
            self._second.run(iteration, slot, output, self._execute_model, logits_rows)
        else:
            assert self.double_buffer is not None, "an iteration before the data plane was open"
            self.double_buffer.prepare(iteration, slot, output)

    def run_vllm(self, output: SchedulerOutput) -> Any:
        """vLLM's ``execute_model`` on its own path; its hidden states go through our links."""
        if output.total_num_scheduled_tokens > 0:
            self._iteration += 1
            self._tokens = output.total_num_scheduled_tokens
        return self._execute_model(output)

    def _receive_vllm(self) -> dict[str, torch.Tensor]:
        """Into the runner's own buffer, whose rows beyond the batch's are there when it pads."""
        assert self._receiver is not None
        began = time.monotonic_ns()
        kept: dict[str, torch.Tensor] = self._worker.model_runner.intermediate_tensors.tensors
        tensors = self._whole(self._receiver.take(self._iteration, self._tokens, into=kept))
        for key, tensor in tensors.items():
            if tensor.data_ptr() != kept[key].data_ptr():  # else it came in pieces
                kept[key][: self._tokens].copy_(tensor)
        self._receiver.release(self._iteration)
        if self._second is not None and self._second.launched is not None:
            self._record(Phase.WAIT_HIDDEN, self._second.launched, began)
            self._second.received()
        return kept

    def _send_vllm(self, tensors: Any) -> Callable[[], None]:
        """Without the rows with which the runner has padded the batch."""
        assert self._sender is not None
        began = time.monotonic_ns()
        rows = {key: tensor[: self._tokens] for key, tensor in tensors.items()}
        self._sender.send(self._iteration, self._tokens, self._part(rows))
        if self._second is not None and self._second.launched is not None:
            self._record(Phase.SEND, self._second.launched, began)
        return self._sender.wait_sent

    def doing(self) -> str:
        """What the threads that run iterations do now, as predicates."""
        due = self._shared.doing() if self._shared is not None else ""
        if self._second is not None and self._publisher is not None:
            said = f"(launching thread) {self._second.doing()}"
            said += f", (publisher) {self._publisher.doing()}"
            return f"{said}, (head thread) {due}" if due else said
        said = self.double_buffer.doing() if self.double_buffer is not None else ""
        return f"{said}, {due}" if due else said

    # ---- between hosts --------------------------------------------------------------------------

    def _part(self, tensors: Any) -> Any:
        place = self._place
        return cut(tensors, place.tp_rank, place.tp_size) if self._cuts else tensors

    def _whole(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ranks = self._place.tp_size
        if ranks == 1:
            return tensors
        return join(tensors, ranks, partial(get_tp_group().all_gather, dim=0))

    def close(self) -> None:
        """End the threads; release links and channels."""
        if self.double_buffer is not None:
            self.double_buffer.close()
        for end in (self._publisher, self._shared, self._receiver, self._sender, self._logits):
            if end is not None:
                end.close()
