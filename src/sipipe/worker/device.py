"""What handing results on asks of the device that a stage runs on.

The thread that launches a stage's work never waits for the device: it marks where it is, and
another thread waits for the mark. On the host all work is done when a call returns, so a mark is
the time. What is launched beside the launching thread, in the same order, is a :class:`DeviceThread`'s:
it takes iterations from a queue, and alone may wait for the device. Its error ends the worker.

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
    """Marks and copies; here as on a host, where everything is done when the call returns. ``mark``
    is called by a thread that launches, the rest by one other, or by the same."""

    def use(self) -> None:
        """The calling thread, a new one, works with this device from now on."""

    def beside(self) -> Device:
        """The same device for another thread that launches: :meth:`use` gives its work a stream of
        its own, which waits for nothing of the others."""
        return self

    def mark(self) -> Any:
        """Where the launching thread is now."""
        return time.monotonic_ns()

    def wait(self, mark: Any) -> int:
        """Sleep until the device has reached ``mark``; returns when, in monotonic nanoseconds."""
        return int(mark)

    def undisturbed(self) -> Device:
        """The same device for timing: on the host, marks are the calling thread's CPU time, which a
        busy neighbour does not lengthen."""
        return _HostWork()

    def occupy(self, seconds: float) -> None:
        """Keep the device busy for at least so long; not on the host, where who launches is it."""

    def nanoseconds(self, first: Any, last: Any) -> int:
        """From one mark that the device has reached to another."""
        return int(last - first)

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:  # noqa: ARG002
        """Copy a matrix to host memory once the device has reached ``after``; the copy's mark.
        ``target`` has the shape and type of ``source``; the rows of both are contiguous. Neither
        may be touched or freed until the device has reached the mark."""
        if source.data_ptr() != target.data_ptr():  # else it was computed there
            # Tensor.copy_ would use an OpenMP team of this thread's: with more threads than cores
            # libgomp puts those of the forward pass to sleep after every operator.
            np.copyto(*(matrix.view(torch.uint8).numpy() for matrix in (target, source)))
        return self.mark()

    def lock_pages(self, memory: memoryview) -> None:
        """Let copies go straight to ``memory``, for as long as the process lives. Raises
        ResourceError: the system does not let the process lock that much."""

    def unlock_pages(self, memory: memoryview) -> None:
        """What :meth:`lock_pages` locked is about to be given back."""


class HostDevice(Device):
    """The host's cores."""

    def use(self) -> None:
        torch.get_num_threads()  # torch tells this thread's OpenMP: vLLM's kernels ask that alone


class _HostWork(HostDevice):
    def mark(self) -> int:
        return time.thread_time_ns()


class CudaStageDevice(Device):
    """A CUDA device: marks are events, copies have a stream of their own."""

    def __init__(self, device: torch.device, own: Any = None) -> None:
        """``own``: the stream of the thread that launches; None: the one that it has."""
        self._device = device
        self._copies = torch.cuda.Stream(device)
        self._own = own
        self._driver: CudaDriver | None = None

    def use(self) -> None:
        # A new thread's is GPU 0: its first call would make a context there, memory nobody counts.
        torch.cuda.set_device(self._device)
        if self._own is not None:
            torch.cuda.set_stream(self._own)

    def beside(self) -> CudaStageDevice:
        return CudaStageDevice(self._device, torch.cuda.Stream(self._device))

    def undisturbed(self) -> Self:
        return self

    def mark(self) -> Any:
        # Blocking: who waits sleeps, and does not ask the driver over and over.
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
                # A rank's columns of wider rows: torch would take pageable memory, and wait.
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
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def stage_device(device: torch.device) -> Device:
    """The device that a stage's worker runs on."""
    return CudaStageDevice(device) if device.type == "cuda" else HostDevice()


_CYCLES = 2e9
"""Of a GPU in a second, or more than it has."""

_MOST_OCCUPIED = 1.0
"""Seconds: of which the first calls, that compile, are not worth more."""


def seconds(device: Device, call: Callable[[], object]) -> float:
    """What some calls take the device, each from the end of the one before: the median. The device
    is kept busy until all are launched: else a call whose launch takes longer than its work would
    count as that, which serving hides behind earlier work. The first two do not count."""
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
