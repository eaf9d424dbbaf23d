"""One stage's part of an iteration: inputs, hidden states in, forward, hidden states or logits out.

The loop owns the stage's ends of the data plane: the link from the previous stage, the link to
the next, and on the last stage the writer of BIC-L. Which thread runs which step is decided by
:class:`sipipe.stage.StageExecutor`: overlapped with two input versions, in turn with one.

Invariant: rows of a logits slot are the sampled requests in the order of
``SchedulerOutput.num_scheduled_tokens``, which is also the order in which the executor tells the
samplers whose rows they are.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from vllm.distributed import get_pp_group
from vllm.v1.core.sched.output import SchedulerOutput

from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender
from sipipe.ipc.ring.logits import LogitsWriter
from sipipe.messages.boots import LogitsFormat, StageDescription, WorkerBoot
from sipipe.messages.link import LinkEndpoint
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder
from sipipe.worker.executor import StageExecutor
from sipipe.worker.handover import LogitsHandover
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.runner import StageRunner
from sipipe.worker.timing import StageTiming

Report = Callable[[int, dict[str, Any]], None]

LOGITS_DTYPES: dict[torch.dtype, Literal["float32", "float16", "bfloat16"]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class StageLoop:
    """One worker's steady path; the calls that :class:`sipipe.stage.StageExecutor` makes.

    Args:
        boot: what the process was started with.
        worker: vLLM's worker, its model loaded.
        sockets: of the links from the previous stage and to the next one, as far as there are any.
        report: tells the executor that an iteration has run, where no sampler will.
        recorder: takes the phases of each iteration.

    Who runs here: the CPU executor's thread in :meth:`prepare` and :meth:`announce`, the device
    executor's in :meth:`receive`, :meth:`forward` and :meth:`send`; control calls with both idle.
    """

    def __init__(
        self,
        boot: WorkerBoot,
        worker: Any,
        sockets: Sequence[socket.socket],
        report: Report,
        recorder: Recorder,
    ) -> None:
        self._boot = boot
        self._place = boot.place
        self._worker = worker
        self._sockets = sockets
        self._report = report
        self._timing = StageTiming(recorder)
        self._runner: StageRunner | None = None
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._logits: LogitsHandover | None = None
        self._stock_iteration = self._stock_tokens = 0
        self.executor: StageExecutor | None = None
        """Both executors, once the data plane is open; None on vLLM's own path."""

    # ---- opening, by control calls ------------------------------------------------------------

    def describe(self) -> StageDescription:
        """What the engine needs to make this rank's channels; the KV cache is set up by now."""
        stock = self._worker.model_runner
        unsupported = StageRunner.reason(stock) or ""
        if self._boot.path != "sipipe" or unsupported:
            return StageDescription(unsupported=unsupported)
        self._timing.watch(stock.device)
        self._runner = StageRunner(
            stock,
            slots=self._boot.slots,
            versions=self._versions,
            check_token_safety=self._boot.config.check_token_safety,
        )
        return StageDescription(
            logits=self._logits_format(self._runner, stock) if self._place.is_last else None,
        )

    def _logits_format(self, runner: StageRunner, stock: Any) -> LogitsFormat | None:
        """What this rank writes to BIC-L; None on ranks that do not gather."""
        model_config = self._boot.vllm_config.model_config
        hidden = torch.zeros(
            1, model_config.get_hidden_size(), dtype=model_config.dtype, device=stock.device
        )
        if self._boot.vllm_config.lora_config is not None:
            stock._set_active_loras((0,), (0,), set())  # the projection looks for a mapping
        logits = runner.compute_logits(hidden)
        if logits is None:
            return None
        head = runner.head
        return LogitsFormat(
            width=head.vocab_size if head.shard else logits.shape[1],
            dtype=LOGITS_DTYPES[logits.dtype],
            shard=head.shard,
        )

    def open(self, *, links: list[LinkEndpoint], logits: Any) -> None:
        """Open this rank's ends of the links and, on the last stage, the writer of BIC-L.

        ``logits`` is None when the engine runs on vLLM's own path.
        """
        place = self._place
        if not place.is_first:
            self._receiver = open_receiver(links[place.rank - place.tp_size], self._sockets[0])
        if not place.is_last:
            self._sender = open_sender(links[place.rank], self._sockets[-1])
        if logits is None:
            group = get_pp_group()
            group.receive, group.send = self._receive_stock, self._send_stock
            return
        assert self._runner is not None
        if place.is_last and (place.tp_rank == 0 or self._runner.head.shard):
            self._logits = LogitsHandover(
                LogitsWriter.open(logits, rank=place.tp_rank),
                self._boot.config.logits_layout,
                self._worker.model_runner.device,
            )
        self.executor = StageExecutor(
            self,
            versions=self._versions,
            depth=2 * self._boot.slots,
            interrupt=self._interrupt,
            stall_timeout=self._boot.config.stall_timeout,
            device_thread=False,
            name=f"SiPipe-{place.name}",
        )

    @property
    def _versions(self) -> int:
        return 2 if self._boot.config.overlap else 1

    # ---- SiPipe's path: the calls of the executors ----------------------------------------------

    def prepare(
        self, iteration: int, slot: int, version: int, output: SchedulerOutput
    ) -> ModelInput:
        """Inputs of ``iteration`` into ``version``."""
        assert self._runner is not None
        began = time.monotonic_ns()
        inputs = self._runner.prepare(output, slot, version, iteration)
        self._timing.host(Phase.PREPARE, inputs, began)
        return inputs

    def announce(self, iteration: int, inputs: ModelInput) -> None:
        """Nothing: the buffers of both links are ready for any number of tokens."""

    def receive(self, iteration: int, inputs: ModelInput) -> dict[str, torch.Tensor] | None:
        """The hidden states of the previous stage, in place."""
        if self._receiver is None:
            return None
        began = time.monotonic_ns()
        tensors = self._receiver.take(iteration, inputs.num_tokens_padded)
        self._timing.host(Phase.WAIT_HIDDEN, inputs, began)
        return tensors

    def forward(
        self, iteration: int, inputs: ModelInput, received: dict[str, torch.Tensor] | None
    ) -> Any:
        """Run the stage's layers."""
        assert self._runner is not None
        with self._timing.device(Phase.FORWARD, inputs):
            result = self._runner.forward(inputs, received)
        if self._receiver is not None:
            self._receiver.release(iteration)
        return result

    def send(self, iteration: int, inputs: ModelInput, result: Any) -> None:
        """Hidden states to the next stage, or logits to the samplers."""
        if self._place.is_last:
            self._finish(iteration, inputs, result)
            return
        assert self._sender is not None
        began = time.monotonic_ns()
        self._sender.send(iteration, inputs.num_tokens_padded, result)
        self._timing.host(Phase.SEND, inputs, began)

    def _finish(self, iteration: int, inputs: ModelInput, hidden: torch.Tensor) -> None:
        """Last stage: logits to the samplers, and a report where the executor waits for one."""
        assert self._runner is not None
        extras = self._runner.prompt_logprobs(inputs, hidden) if inputs.prompt_rows else {}
        rows = len(inputs.sampled)
        if rows:
            into = self._logits.ahead(rows) if self._logits is not None else None
            with self._timing.device(Phase.LOGITS, inputs):
                logits = self._runner.logits(inputs, hidden, into)
            if self._logits is not None:
                assert logits is not None
                began = time.monotonic_ns()
                timeout = self._boot.config.stall_timeout
                self._logits.store(iteration, logits, timeout)
                self._timing.host(Phase.HANDOVER, inputs, began)
        if (extras or not rows) and self._place.tp_rank == 0:
            self._report(iteration, extras)

    def drain(self) -> None:
        """Return when no iteration is in the worker; control calls run then."""
        if self.executor is not None:
            self.executor.drain()
        if self._sender is not None:
            self._sender.wait_sent()

    def doing(self) -> str | None:
        """What the executors do now, for the stall report; None before they exist."""
        return self.executor.doing() if self.executor is not None else None

    def _interrupt(self) -> None:
        """End a wait for another process (from :meth:`StageExecutor.close` and after an error)."""
        if self._receiver is not None:
            self._receiver.close()

    # ---- vLLM's own path ------------------------------------------------------------------------

    def run_stock(self, execute_model: Callable[..., Any], output: SchedulerOutput) -> Any:
        """vLLM's ``execute_model``; its hidden states go through our links."""
        if output.total_num_scheduled_tokens > 0:
            self._stock_iteration += 1
            self._stock_tokens = output.total_num_scheduled_tokens
        result = execute_model(output)
        if self._receiver is not None and output.total_num_scheduled_tokens > 0:
            self._receiver.release(self._stock_iteration)
        return result

    def _receive_stock(self) -> dict[str, torch.Tensor]:
        assert self._receiver is not None
        return self._receiver.take(self._stock_iteration, self._stock_tokens)

    def _send_stock(self, tensors: Any) -> None:
        assert self._sender is not None
        rows = max(tensor.shape[0] for tensor in tensors.values())
        self._sender.send(self._stock_iteration, rows, tensors)
        self._sender.wait_sent()

    def close(self) -> None:
        """Release links and channels; the executors have ended."""
        self._timing.close()
        for end in (self._receiver, self._sender, self._logits):
            if end is not None:
                end.close()
