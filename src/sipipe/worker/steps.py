"""One iteration on SiPipe's stage runner: inputs, hidden states in, forward, results out.

Who runs here: the preparing thread in :meth:`StageSteps.prepare`, the device thread in all else;
:class:`~sipipe.worker.double_buffer.DoubleBuffer` decides when.

Invariant: an iteration's rows of BIC-L are the sampled requests in the order of
``SchedulerOutput.num_scheduled_tokens``, which is also the order in which the engine tells the
samplers whose rows they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender
from sipipe.observe.phases import Phase
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.logits import LogitsHandover, StageLogits
from sipipe.worker.runner import StageRunner
from sipipe.worker.vocabulary import SharedHead

Tensors = dict[str, torch.Tensor]


class StageSteps:
    """What a double buffer runs.

    Args:
        runner: runs the stage's layers.
        head: computes this rank's columns of the logits, if it has any.
        receiver, sender: of the links with the stages before and behind.
        logits: this rank's writer of BIC-L, if it is one.
        report: tells the engine that an iteration has run, where no sampler will; None: another
            rank does.
        record: takes a phase, its iteration and when it began.
        stall_timeout: seconds to wait for a place in BIC-L.
    """

    def __init__(
        self,
        runner: StageRunner,
        head: StageLogits | None,
        receiver: Receiver | None,
        sender: Sender | None,
        logits: LogitsHandover | None,
        *,
        report: Callable[[int, dict[str, Any]], None] | None,
        record: Callable[[Phase, ModelInput, int], None],
        stall_timeout: float,
    ) -> None:
        self._runner = runner
        self._head = head
        self._receiver = receiver
        self._sender = sender
        self._logits = logits
        self._report = report
        self._record = record
        self._stall_timeout = stall_timeout
        self.shared: SharedHead | None = None
        """Where the output projection is shared out over all stages."""
        self.part: Callable[[Any], Tensors] = lambda tensors: tensors
        """What of the result this rank sends, and what it makes of what it received."""
        self.whole: Callable[[Tensors], Tensors] = lambda tensors: tensors

    def prepare(
        self, iteration: int, slot: int, buffer_set: int, output: SchedulerOutput
    ) -> ModelInput:
        """Inputs of ``iteration`` into ``buffer_set``."""
        began = time.monotonic_ns()
        inputs = self._runner.prepare(output, slot, buffer_set, iteration)
        self._record(Phase.PREPARE, inputs, began)
        return inputs

    def receive(self, inputs: ModelInput) -> Tensors | None:
        """The hidden states of the previous stage, in place."""
        if self.shared is not None and inputs.num_tokens > inputs.num_reqs:
            self.shared.catch_up()
        if self._receiver is None:
            return None
        if self.shared is not None:
            self.shared.serve(self._receiver.descriptors)
        began = time.monotonic_ns()
        tensors = self.whole(self._receiver.take(inputs.iteration, inputs.num_tokens))
        self._record(Phase.WAIT_HIDDEN, inputs, began)
        return tensors

    def forward(self, inputs: ModelInput, received: Tensors | None) -> Any:
        """Run the stage's layers."""
        began = time.monotonic_ns()
        if self.shared is None:
            result = self._runner.forward(inputs, received)
        else:
            decodes = inputs.num_reqs == inputs.num_tokens > 0
            between = self.shared.begin_pass(began, decodes)
            result = self._runner.forward(inputs, received, between)
            began = self.shared.end_pass(decodes)
        self._record(Phase.FORWARD, inputs, began)
        if self._receiver is not None:
            self._receiver.release(inputs.iteration)
        return result

    def send(self, inputs: ModelInput, result: Any) -> None:
        """Hidden states to the next stage, or logits to the samplers."""
        if self._sender is None:
            self._finish(inputs, result)
            return
        began = time.monotonic_ns()
        self._sender.send(inputs.iteration, inputs.num_tokens, self.part(result))
        self._record(Phase.SEND, inputs, began)
        if self.shared is not None:
            self.shared.expect(inputs)

    def _finish(self, inputs: ModelInput, hidden: torch.Tensor) -> None:
        """Last stage: logits to the samplers, and a report where the engine waits for one."""
        if len(inputs.sampled):
            rows = self._runner.rows(inputs, hidden)
            if self.shared is not None:
                self.shared.spread(inputs, rows)
                self.shared.multiply(inputs, rows)
            else:
                self._project(inputs, rows)
        extras = self._runner.prompt_logprobs(inputs, hidden) if inputs.prompt_chunks else {}
        if (extras or not len(inputs.sampled)) and self._report is not None:
            self._report(inputs.iteration, extras)

    @torch.inference_mode()
    def _project(self, inputs: ModelInput, rows: torch.Tensor) -> None:
        """This rank's columns of the logits of final hidden states [n, H], to the samplers."""
        assert self._head is not None
        into = self._logits.ahead(inputs.iteration, len(rows)) if self._logits is not None else None
        began = time.monotonic_ns()
        logits = self._head.compute(rows, into)
        self._record(Phase.LOGITS, inputs, began)
        if self._logits is not None:
            assert logits is not None
            began = time.monotonic_ns()
            self._logits.store(inputs.iteration, logits, self._stall_timeout)
            self._record(Phase.HANDOVER, inputs, began)

    def meanwhile(self, until: Sequence[int]) -> None:
        """The device has nothing of its own to do until one of the descriptors is readable."""
        if self.shared is not None:
            self.shared.serve(until)

    def interrupt(self) -> None:
        """End the device thread's waits for other stages."""
        for end in (self._receiver, self.shared):
            if end is not None:
                end.close()
