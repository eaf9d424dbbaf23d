"""The device that a stage runs on: marks, waits and copies, and threads that wait for it.

The thread that launches a stage's work never waits for the device. It marks the place in the order
of its work, and another thread waits for the mark. On the host all work is done when a call returns,
so a mark is the time.

A :class:`DeviceThread` takes iterations that were launched from a queue, in order. It alone may wait
for the device. Its error ends the worker.

The CUDA side has run on one GPU (docs/gpu.md). Its order is tested on an emulated one
(``tests/worker/test_cuda_order.py``).
"""

from __future__ import annotations

import ctypes
import queue
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch

from sipipe.errors import ResourceError, StallError
from sipipe.ipc.link.cuda_device import CudaDriver
from sipipe.messages.measured import TIMES
from sipipe.worker.inputs.model_input import ModelInput


class Device:
    """Marks and copies, as on a host, where everything is done when a call returns. A thread that
    launches calls ``mark``; one other, or the same, calls the rest."""

    def use(self) -> None:
        """Have the calling thread, a new one, work with this device from now on."""

    def beside(self) -> Device:
        """The same device for another thread that launches: :meth:`use` gives its work a stream of
        its own, which waits for nothing of the others."""
        return self

    def mark(self) -> Any:
        """A mark behind everything that the calling thread has launched."""
        return time.monotonic_ns()

    def wait(self, mark: Any) -> int:
        """Sleep until the device has reached ``mark``; returns the time then, in nanoseconds of
        ``time.monotonic_ns()``."""
        return int(mark)

    def undisturbed(self) -> Device:
        """The same device for timing: on the host, marks are the calling thread's CPU time, which a
        busy neighbour does not lengthen."""
        return _HostWork()

    def occupy(self, seconds: float) -> None:
        """Keep the device busy for ``seconds`` at least. A host is not kept busy: the thread that
        launches would be."""

    def nanoseconds(self, first: Any, last: Any) -> int:
        """Nanoseconds from one mark to another, both of which the device has reached."""
        return int(last - first)

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:  # noqa: ARG002
        """Copy a matrix to host memory once the device has reached ``after``; returns the copy's mark.

        ``target`` has the shape and dtype of ``source``, and the rows of both are contiguous. Neither
        may be touched or freed until the device has reached the mark."""
        if source.data_ptr() != target.data_ptr():  # if they are the same, it was computed in place
            # Tensor.copy_ would use an OpenMP team of this thread's: with more threads than cores
            # libgomp puts those of the forward pass to sleep after every operator.
            np.copyto(*(matrix.view(torch.uint8).numpy() for matrix in (target, source)))
        return self.mark()

    def lock_pages(self, memory: memoryview) -> None:
        """Lock ``memory`` in place, so that copies go straight to it, until :meth:`unlock_pages`. Raises
        ResourceError: the system does not let the process lock that much."""

    def unlock_pages(self, memory: memoryview) -> None:
        """Unlock what :meth:`lock_pages` has locked, before the memory is given back."""


class HostDevice(Device):
    """The host's cores."""

    def use(self) -> None:
        # With this call torch sets the number of threads for this thread's OpenMP. vLLM's kernels ask
        # only OpenMP.
        torch.get_num_threads()


class _HostWork(HostDevice):
    """The host's cores for timing: marks are the calling thread's CPU time."""

    def mark(self) -> int:
        return time.thread_time_ns()


class CudaStageDevice(Device):
    """A CUDA device. Marks are events, and copies have a stream of their own."""

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        """``stream`` is for the thread that launches; None leaves it the one that it has."""
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._stream = stream
        self._driver: CudaDriver | None = None

    def use(self) -> None:
        # A new thread has GPU 0, where its first call would make a context, whose memory nobody counts.
        torch.cuda.set_device(self._device)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def beside(self) -> CudaStageDevice:
        return CudaStageDevice(self._device, torch.cuda.Stream(self._device))

    def undisturbed(self) -> Self:
        return self

    def mark(self) -> Any:
        # With `blocking` a thread that waits sleeps, and does not ask the driver over and over.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Any) -> int:
        mark.synchronize()  # wait: none of its own, `stall_timeout` for the iteration; the device
        return time.monotonic_ns()

    def occupy(self, seconds: float) -> None:
        with torch.cuda.device(self._device):
            torch.cuda._sleep(int(seconds * _CYCLES))

    def nanoseconds(self, first: Any, last: Any) -> int:
        return int(first.elapsed_time(last) * 1e6)

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(after)
            if target.is_contiguous():
                target.copy_(source, non_blocking=True)
            else:
                # A rank's columns of wider rows. torch would copy by pageable memory, and wait for that.
                self._driver = self._driver or CudaDriver(self._copies)
                self._driver.copy_rows(target, source)
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            event.record(self._copies)
            return event

    def lock_pages(self, memory: memoryview) -> None:
        error = torch.cuda.cudart().cudaHostRegister(_address(memory), memory.nbytes, 0)
        if int(error):
            raise ResourceError(
                f"CUDA could not lock {memory.nbytes / 2**20:,.0f} MiB of the logits' memory "
                f"(error {int(error)}): raise the limit on locked memory (ulimit -l), or lower "
                "--max-num-seqs"
            )

    def unlock_pages(self, memory: memoryview) -> None:
        torch.cuda.cudart().cudaHostUnregister(_address(memory))


def _address(memory: memoryview) -> int:
    """The address of the first byte of ``memory``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def stage_device(device: torch.device) -> Device:
    """The device that a stage's worker runs on."""
    return CudaStageDevice(device) if device.type == "cuda" else HostDevice()


_CYCLES = 2e9
"""Cycles of a GPU in a second, or more than it has."""

_MOST_OCCUPIED = 1.0
"""Seconds for which a device is kept busy, at most. The first calls compile, and may take longer."""


def seconds(device: Device, call: Callable[[], object]) -> float:
    """Median of the seconds that the device takes for ``call``, each time from the end of the one before.

    The device is kept busy until all calls are launched. A call whose launch takes longer than its
    work would otherwise count with its launch, which serving hides behind earlier work. The first two
    calls do not count."""
    call()
    began = time.perf_counter()
    call()
    launched = time.perf_counter() - began
    device.occupy(min((TIMES + 1) * launched, _MOST_OCCUPIED))
    marks = [device.mark()]
    for _ in range(TIMES):
        call()
        marks.append(device.mark())
    device.wait(marks[-1])
    return statistics.median(device.nanoseconds(*pair) for pair in pairwise(marks)) * 1e-9


_IDLE = "waits for the next iteration"


@dataclass(slots=True, kw_only=True, eq=False)
class Launched:
    """An iteration that has been launched on the device."""

    inputs: ModelInput
    first: Any = None
    """Mark of the device before the stage's layers."""
    made: Any = None
    """Mark before the output projection, on the last stage."""
    last: Any = None
    """Mark after everything of the iteration."""
    logits: torch.Tensor | None = None
    """Logits [rows, V of this rank], where this rank writes any and anything samples."""
    output: Any = None
    """Result of vLLM's ``sample_tokens``."""
    draws: bool = False
    """True if ``output`` has tokens that were drawn on the device, which are reported."""
    kv: Any = None
    """vLLM's ``KVConnectorOutput``, if a connector has something to report."""
    drafts: Any = None
    """Drafts that a head has proposed in the pass (:class:`.CopiedDrafts`); None: there are none."""
    whole: bool = False
    """True if all of ``output`` is reported, since no sampler draws."""
    reports: bool = False
    """True if the engine may wait for this rank's report: for tokens of the device, for prompt
    log-probabilities, or because no sampler answers."""


class DeviceThread(ABC):
    """A thread that does something with each iteration that was launched, in order. ``fail`` is called,
    from the thread, with the error that ended it; ``stall_timeout`` is the seconds of a wait."""

    def __init__(
        self, device: Device, name: str, *, fail: Callable[[Exception], None], stall_timeout: float
    ) -> None:
        self._device = device
        self._fail = fail
        self._stall_timeout = stall_timeout
        self._queue: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._progress = threading.Condition()  # wait: held for moments; nobody waits under it
        self._put = 0
        """Iterations that were put into the queue."""
        self._done = 0
        """Iterations that the thread has finished."""
        self._error: Exception | None = None
        self._closing = False
        self._doing = _IDLE
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _do(self, launched: Launched) -> None:
        """Do everything that is to be done with one iteration; keep ``_doing`` up to date."""

    def put(self, launched: Launched) -> None:
        """Give the thread an iteration, whose tensors belong to it from now on. Does not wait. Raises
        Exception: the one that ended the thread."""
        if self._error is not None:
            raise self._error
        self._put += 1
        self._queue.put(launched)

    def drain(self) -> None:
        """Wait until everything that was put is done, and the device with it. Raises StallError: not
        within the stall time-out. Exception: the one that ended the thread."""
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
        """Predicate on what the thread does now, for the report of a stall."""
        return self._doing

    def close(self) -> None:
        """End the thread after the iteration that it is at; those behind that are dropped."""
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
