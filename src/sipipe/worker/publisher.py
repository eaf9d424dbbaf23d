"""What an iteration produced, handed on when the device has produced it.

Who runs here
    The launching thread puts a :class:`Launched` into the queue and goes on. The publisher's
    thread takes them in order: it fetches the logits into their BIC-L entry, waits for the device,
    commits the entry, and reports what the engine waits for.
Guarantees
    Nothing of an iteration is said before the device has run it. So the engine resolves no
    iteration whose inputs the device may still read, and iteration i + m, which is written into
    the same staging buffers, comes after that. An error ends the worker, and is what every later
    call raises.
Relies on
    The device's order: a mark is reached when everything before it is done.
Rejected
    Copying on the launching thread: it would sleep while the next iteration could be launched.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from sipipe.errors import StallError
from sipipe.observe.phases import Phase
from sipipe.worker.device import Device
from sipipe.worker.logits import LogitsHandover

_IDLE = "waits for the next iteration"


@dataclass(slots=True, kw_only=True, eq=False)
class Launched:
    """An iteration that has been launched on the device."""

    iteration: int
    slot: int
    num_reqs: int
    num_tokens: int
    first: Any = None
    """The device's mark before the stage's layers."""
    last: Any = None
    """The one after everything of the iteration."""
    logits: torch.Tensor | None = None
    """[rows, V of this rank], where this rank writes logits and anything samples."""
    output: Any = None
    """What vLLM's ``sample_tokens`` returned."""
    draws: bool = False
    """Whether ``output`` has tokens that were drawn on the device, which are to be reported."""
    reports: bool = False
    """Whether the engine may wait for this rank's word: for those tokens, for prompt
    log-probabilities, or because no sampler will say anything."""


class Publisher:
    """Hands on what was launched.

    Args:
        device: the one it runs on.
        logits: this rank's writer of BIC-L, if it has one.
        report: tells the engine that an iteration has run, its prompt log-probabilities, the
            tokens that were drawn on the device, and the scores of prompts' named tokens.
        record: takes a phase: its iteration, when it began and when it ended.
        fail: told, from the publisher's thread, what ended it.
        stall_timeout: seconds for which a late sampler may hold an entry.
    """

    def __init__(
        self,
        device: Device,
        logits: LogitsHandover | None,
        *,
        report: Callable[[int, dict[str, Any], list[int], dict[str, Any]], None],
        record: Callable[[Phase, Launched, int, int], None],
        fail: Callable[[Exception], None],
        stall_timeout: float,
    ) -> None:
        self._device = device
        self._logits = logits
        self._report = report
        self._record = record
        self._fail = fail
        self._stall_timeout = stall_timeout
        self._queue: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._progress = threading.Condition()  # wait: held for moments; nobody waits under it
        self._put = self._done = 0
        self._error: Exception | None = None
        self._doing = _IDLE
        self._thread = threading.Thread(target=self._run, name="SiPipePublisher", daemon=True)
        self._thread.start()

    def put(self, launched: Launched) -> None:
        """``launched`` is on its way. Does not wait; the tensors belong to the publisher now."""
        if self._error is not None:
            raise self._error
        self._put += 1
        self._queue.put(launched)

    def drain(self) -> None:
        """Return when everything that was put is done, and the device with it.

        Raises:
            StallError: not within the stall time-out. Exception: the one that ended the publisher.
        """
        with self._progress:
            # wait: `stall_timeout`; the publisher's thread, its error
            done = self._progress.wait_for(
                lambda: self._error is not None or self._done == self._put, self._stall_timeout
            )
        if self._error is not None:
            raise self._error
        if not done:
            raise StallError(f"waited {self._stall_timeout:g} s for the device: it {self._doing}")

    def doing(self) -> str:
        """What the thread does now, as a predicate."""
        return self._doing

    def close(self) -> None:
        """End the thread after what it is doing; what was not done is dropped."""
        self._queue.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self._device.use()
            # wait: none, between iterations; `put`, `close`
            while (launched := self._queue.get()) is not None:
                self._publish(launched)
                del launched  # its tensors go back to the device now, not with the next one
                with self._progress:
                    self._done += 1
                    self._doing = _IDLE
                    self._progress.notify_all()
        except Exception as error:
            with self._progress:
                self._error = error
                self._progress.notify_all()
            self._fail(error)

    def _publish(self, launched: Launched) -> None:
        device, name = self._device, f"iteration {launched.iteration}"
        with ExitStack() as entry:
            copied = None
            if launched.logits is not None:
                assert self._logits is not None
                self._doing = f"waits for a free place for the logits of {name}"
                rows = launched.logits.shape[0]
                target = entry.enter_context(
                    self._logits.entry(launched.iteration, rows, self._stall_timeout)
                )
                copied = device.fetch(launched.logits, target, launched.last)
            self._doing = f"runs {name} on the device"
            device.wait(launched.last)
            ran = time.monotonic_ns()
            took = device.nanoseconds(launched.first, launched.last)
            self._record(Phase.FORWARD, launched, ran - took, ran)
            if copied is not None:
                self._doing = f"hands over the logits of {name}"
                # Not a phase of the stage: its device runs the next iteration meanwhile.
                device.wait(copied)
        if launched.reports:
            # Waits for vLLM's copies to the host, which have a stream of their own.
            found = launched.output.get_output()
            tokens = launched.output.sampled_token_ids.ravel().tolist() if launched.draws else []
            scores = {r: t for r, t in found.prompt_logprobs_dict.items() if t is not None}
            self._report(launched.iteration, scores, tokens, found.prompt_token_id_logprobs_dict)
