"""Results of an iteration, handed on when the device has produced them.

Who runs here
    The launching thread puts a :class:`Launched` into the queue and goes on. The publisher's
    thread takes them in order: it fetches the logits into their BIC-L entry, waits for the device,
    commits the entry, and reports what the engine waits for.
Guarantees
    Nothing of an iteration is reported before the device has run it. So the engine resolves no
    iteration whose inputs the device may still read.
Relies on
    The device's order: a mark is reached when everything before it is done.
Rejected
    Copying on the launching thread, which would sleep while the next iteration could be launched.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from sipipe.messages.replies import IterationReport
from sipipe.observe.phases import Phase
from sipipe.worker.device import Device, DeviceThread, Launched
from sipipe.worker.projection.logits import LogitsHandover
from sipipe.worker.projection.projection import Record


class Publisher(DeviceThread):
    """Hands on the results of what was launched.

    Args:
        device: the stage's device.
        logits: this rank's writer of BIC-L, if it has one.
        report: sends a report to the engine.
        record: records phases.
        fail: called with an error of the thread.
        stall_timeout: seconds for which a late sampler may hold an entry.
        kv_reports: reports what the KV connector has done in an iteration.
    """

    def __init__(
        self,
        device: Device,
        logits: LogitsHandover | None,
        *,
        report: Callable[[IterationReport], None],
        record: Record,
        fail: Callable[[Exception], None],
        stall_timeout: float,
        kv_reports: Callable[[Launched], None] = lambda _: None,
    ) -> None:
        self._kv_reports = kv_reports
        self._logits = logits
        self._report = report
        self._record = record
        super().__init__(device, "SiPipePublisher", fail=fail, stall_timeout=stall_timeout)

    def _do(self, launched: Launched) -> None:
        # The entry is committed when the context ends, so after the device has run the iteration.
        with ExitStack() as entry:
            copied = None
            if launched.logits is not None:
                copied = self._fetch_logits(launched, launched.logits, entry)
            self._wait(launched, copied)
        self._kv_reports(launched)
        if launched.reports:
            self._send_report(launched)

    def _fetch_logits(self, launched: Launched, logits: torch.Tensor, entry: ExitStack) -> Any:
        """Have the logits copied into their entry of BIC-L, which ``entry`` commits; returns the copy's
        mark."""
        assert self._logits is not None
        inputs = launched.inputs
        self._doing = f"waits for a free place for the logits of iteration {inputs.iteration}"
        rows = logits.shape[0]
        target = entry.enter_context(
            self._logits.entry(inputs.iteration, inputs.logits_row, rows, self._stall_timeout)
        )
        return self._device.fetch(logits, target, launched.last)

    def _wait(self, launched: Launched, copied: Any) -> None:
        """Wait until the device has run the iteration, and its logits are ``copied``; record the
        phases."""
        device = self._device
        inputs = launched.inputs
        self._doing = f"runs iteration {inputs.iteration} on the device"
        # One sleep for both. A thread that sleeps until an event wakes up late, and from the marks it
        # is known when the earlier one was reached.
        ended = device.wait(launched.last if copied is None else copied)
        if copied is not None:
            # The copy is not a phase of the stage: its device runs the next iteration meanwhile.
            ended -= device.nanoseconds(launched.last, copied)
        began = ended - device.nanoseconds(launched.first, launched.last)
        projected = ended
        if launched.made is not None:
            projected -= device.nanoseconds(launched.made, launched.last)
        self._record(Phase.FORWARD, inputs, began, projected)
        if projected < ended:
            self._record(Phase.LOGITS, inputs, projected, ended)

    def _send_report(self, launched: Launched) -> None:
        """Report what the engine waits for."""
        iteration = launched.inputs.iteration
        # This waits for vLLM's copies to the host, which have a stream of their own.
        output = launched.output.get_output()
        if launched.whole:
            drafts = launched.drafts.read() if launched.drafts is not None else {}
            self._report(IterationReport(iteration=iteration, output=output, drafts=drafts))
            return
        tokens = launched.output.sampled_token_ids.ravel().tolist() if launched.draws else []
        prompt_logprobs = {
            request: tensors
            for request, tensors in output.prompt_logprobs_dict.items()
            if tensors is not None
        }
        report = IterationReport(
            iteration=iteration,
            prompt_logprobs=prompt_logprobs,
            prompt_scores=output.prompt_token_id_logprobs_dict,
            tokens=tokens,
        )
        self._report(report)
