"""A thread that does what is launched beside a stage's launching thread, in the same order.

Who runs here: the launching thread puts an iteration into the queue and goes on; the thread takes
them in order, and may wait for the device, which nobody else does. An error ends the worker, and is
what every later call raises.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sipipe.errors import StallError
from sipipe.worker.device import Device
from sipipe.worker.inputs.model_input import ModelInput

_IDLE = "waits for the next iteration"


@dataclass(slots=True, kw_only=True, eq=False)
class Launched:
    """An iteration that has been launched on the device."""

    inputs: ModelInput
    first: Any = None
    """The device's mark before the stage's layers."""
    made: Any = None
    """Last stage: the one before its part of the output projection."""
    last: Any = None
    """The one after everything of the iteration."""
    logits: torch.Tensor | None = None
    """[rows, V of this rank], where this rank writes logits and anything samples."""
    output: Any = None
    """What vLLM's ``sample_tokens`` returned."""
    draws: bool = False
    """Whether ``output`` has tokens that were drawn on the device, which are to be reported."""
    kv: Any = None
    """vLLM's ``KVConnectorOutput``, where a connector has something to say."""
    whole: bool = False
    """Whether the engine is told all of ``output``, since no sampler draws."""
    reports: bool = False
    """Whether the engine may wait for this rank's word: for those tokens, for prompt
    log-probabilities, or because no sampler will say anything."""


class DeviceThread(ABC):
    """Does something with what was launched. ``fail``: told, from the thread, what ended it;
    ``stall_timeout``: seconds of a wait."""

    def __init__(
        self, device: Device, name: str, *, fail: Callable[[Exception], None], stall_timeout: float
    ) -> None:
        self._device = device
        self._fail = fail
        self._stall_timeout = stall_timeout
        self._queue: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._progress = threading.Condition()  # wait: held for moments; nobody waits under it
        self._put = self._done = 0
        self._error: Exception | None = None
        self._closing = False
        self._doing = _IDLE
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _do(self, launched: Launched) -> None:
        """All there is to do with one iteration; ``_doing`` says what that is just now."""

    def put(self, launched: Launched) -> None:
        """``launched`` is on its way. Does not wait; the tensors belong to the thread now."""
        if self._error is not None:
            raise self._error
        self._put += 1
        self._queue.put(launched)

    def drain(self) -> None:
        """Return when everything that was put is done, and the device with it. StallError: not within
        the stall time-out. Exception: the one that ended the thread."""
        with self._progress:
            # wait: `stall_timeout`; the thread itself, its error
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
        self._closing = True
        self._queue.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self._device.use()
            # wait: none, between iterations; `put`, `close`
            while (launched := self._queue.get()) is not None:
                self._do(launched)
                del launched  # its tensors go back to the device now, not with the next one
                with self._progress:
                    self._done += 1
                    self._doing = _IDLE
                    self._progress.notify_all()
        except Exception as error:
            with self._progress:
                self._error = error
                self._progress.notify_all()
            if not self._closing:
                self._fail(error)
