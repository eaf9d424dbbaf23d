"""What an iteration produced, handed on when the device has produced it.

Who runs here
    The launching thread puts a :class:`Launched` into the queue and goes on. The publisher's
    thread takes them in order: it fetches the logits into their BIC-L entry, waits for the device,
    commits the entry, and reports what the engine waits for.
Guarantees
    Nothing of an iteration is said before the device has run it. So the engine resolves no
    iteration whose inputs the device may still read.
Relies on
    The device's order: a mark is reached when everything before it is done.
"""

from collections.abc import Callable
from contextlib import ExitStack

from sipipe.messages.replies import IterationReport
from sipipe.observe.phases import Phase
from sipipe.worker.device import Device, DeviceThread, Launched
from sipipe.worker.projection.logits import LogitsHandover
from sipipe.worker.projection.projection import Record


class Publisher(DeviceThread):
    """Hands on what was launched. ``logits``: this rank's writer of BIC-L, if it has one;
    ``stall_timeout``: seconds for which a late sampler may hold an entry."""

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
        device, inputs = self._device, launched.inputs
        name = f"iteration {inputs.iteration}"
        with ExitStack() as entry:
            copied = None
            if launched.logits is not None:
                assert self._logits is not None
                self._doing = f"waits for a free place for the logits of {name}"
                rows = launched.logits.shape[0]
                where = inputs.iteration, inputs.logits_row, rows
                target = entry.enter_context(self._logits.entry(*where, self._stall_timeout))
                copied = device.fetch(launched.logits, target, launched.last)
            self._doing = f"runs {name} on the device"
            # One sleep: who sleeps until an event wakes up late, and what ended before it is known
            # from the marks.
            ran = device.wait(launched.last if copied is None else copied)
            if copied is not None:
                # The copy is not a phase of the stage: its device runs the next iteration meanwhile.
                ran -= device.nanoseconds(launched.last, copied)
            took = device.nanoseconds(launched.first, launched.last)
            made = ran
            if launched.made is not None:
                made -= device.nanoseconds(launched.made, launched.last)
            self._record(Phase.FORWARD, inputs, ran - took, made)
            if made < ran:
                self._record(Phase.LOGITS, inputs, made, ran)
        self._kv_reports(launched)
        if launched.reports:
            # Waits for vLLM's copies to the host, which have a stream of their own.
            found = launched.output.get_output()
            if launched.whole:
                self._report(IterationReport(iteration=inputs.iteration, output=found))
                return
            tokens = launched.output.sampled_token_ids.ravel().tolist() if launched.draws else []
            asked = {r: t for r, t in found.prompt_logprobs_dict.items() if t is not None}
            report = IterationReport(
                iteration=inputs.iteration,
                prompt_logprobs=asked,
                prompt_scores=found.prompt_token_id_logprobs_dict,
                tokens=tokens,
            )
            self._report(report)
