"""How long the phases of an iteration took: on the host's clock, or on the device's own.

A launch says nothing about when an accelerator did the work, so on CUDA the device's phases are
timed by events on its stream, which are read when they have happened, without waiting for them
(:class:`sipipe.observe.device.DeviceTimer`). On a CPU a phase is done when its call returns.

Who runs here: ``host`` from either executor's thread; ``device`` from the device executor's
alone; ``watch`` before both and ``close`` after them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from sipipe.observe.device import DeviceTimer
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder

if TYPE_CHECKING:
    import torch

    from sipipe.worker.inputs.model_input import ModelInput


class StageTiming:
    """Records phases of a stage's iterations."""

    def __init__(self, recorder: Recorder, timer: DeviceTimer | None = None) -> None:
        self._recorder = recorder
        self._timer = timer

    def watch(self, device: torch.device) -> None:
        """Time the phases of ``device`` by its own events, where it has some. Waits for it once."""
        if device.type == "cuda" and self._timer is None:
            import torch

            self._timer = DeviceTimer(self._recorder, lambda: torch.cuda.Event(enable_timing=True))

    def host(self, phase: Phase, inputs: ModelInput, began: int) -> None:
        """A phase that began at ``began`` (``time.monotonic_ns()``) and ends now."""
        self._recorder.record(
            phase,
            inputs.iteration,
            inputs.slot,
            began,
            time.monotonic_ns(),
            batch=inputs.num_reqs,
            tokens=inputs.num_tokens,
        )

    @contextmanager
    def device(self, phase: Phase, inputs: ModelInput) -> Iterator[None]:
        """A phase of the device: what is launched inside, on its current stream."""
        if self._timer is None:
            began = time.monotonic_ns()
            yield
            self.host(phase, inputs, began)
            return
        self._timer.collect()
        begun = self._timer.begin()
        yield
        self._timer.end(
            begun,
            phase,
            inputs.iteration,
            inputs.slot,
            batch=inputs.num_reqs,
            tokens=inputs.num_tokens,
        )

    def close(self) -> None:
        """Record what the device has still to finish. Nothing records after this."""
        if self._timer is not None:
            with suppress(RuntimeError):  # a device that failed has no times to give
                self._timer.close()
