"""What handing results on asks of the device that a stage runs on.

The thread that launches a stage's work never waits for the device: it marks where it is, and
another thread waits for the mark. On the host all work is done when a call returns, so a mark is
the time.

The CUDA side has run on one GPU (docs/gpu.md). Its order is tested on an emulated one
(``tests/worker/test_cuda_order.py``).
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Self

import torch

from sipipe.errors import ResourceError
from sipipe.ipc.link.cuda_device import CudaDriver
from sipipe.messages.measured import TIMES


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
        """Keep the device busy for at least so long, with work that does nothing; on the host, where
        who launches is the device, not at all."""

    def nanoseconds(self, first: Any, last: Any) -> int:
        """From one mark that the device has reached to another."""
        return int(last - first)

    def fetch(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:  # noqa: ARG002
        """Copy a matrix to host memory once the device has reached ``after``; the copy's mark.
        ``target`` has the shape and type of ``source``; the rows of both are contiguous. Neither
        may be touched or freed until the device has reached the mark."""
        if source.data_ptr() != target.data_ptr():  # else it was computed there
            target.copy_(source)
        return self.mark()

    def lock_pages(self, memory: memoryview) -> None:
        """Let copies go straight to ``memory``, for as long as the process lives. Raises
        ResourceError: the system does not let the process lock that much."""

    def unlock_pages(self, memory: memoryview) -> None:
        """What :meth:`lock_pages` locked is about to be given back."""


class HostDevice(Device):
    """The host's cores."""


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
        # A new thread's is GPU 0, where its first call would make a context: memory that nobody
        # counts, on another stage's GPU.
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
                # A rank's columns of wider rows, which torch would take through pageable memory,
                # and wait.
                self._driver = self._driver or CudaDriver(self._copies)
                self._driver.copy_rows(target, source)
            event = torch.cuda.Event(blocking=True)
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
    is kept busy until all are launched. Else a call whose launch takes longer than its work would
    count as that, which serving hides behind earlier work. What the first two take does not
    count."""
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
