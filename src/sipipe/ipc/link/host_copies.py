"""Hidden states of GPUs by way of host memory: page-locked buffers, and the copies to and from them.

Where GPUs do not reach each other's memory, and between hosts::

    sender's stream     … forward ─► clone ─┐ event            next iteration …
    sender's copies                         └► copy to a buffer ─┐ event
    sender's thread                                              └► header ─►
    receiver's copies                                  copy to the GPU ─┐ event
    receiver's stream   … iteration before …                            └► forward
    give-back thread                                                    └► RELEASE

Who runs here: :class:`Departures` in the sender's own thread, :class:`Arrivals` in the thread that
takes, and in one of its own that sleeps until a buffer has been read.

Guarantees: the thread that launches a stage's work waits for no device, neither when it sends nor
when it takes. A copy waits for what made its source, and for nothing that a stream got later. A
buffer goes back when the copy out of it has ended. Relies on: memory that is page-locked, since
CUDA copies from other memory before it lets the caller go on; the sender, whose tensors are clones
that nobody overwrites (:mod:`.sender`).

Rejected: copies in the stage's own stream (the next iteration is in it already, so hidden states
would leave a stage's time late, and come as late); a stage's stream that waits for the copies of
what it has sent (over PCIe they take a hundred times as long as a clone in the GPU's memory).
"""

import logging
import mmap
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

_POPULATE_BELOW = 64 << 20
"""Bytes up to which memory is mapped at once, so that no page fault falls into an iteration."""

logger = logging.getLogger(f"vllm.{__name__}")


class _Pages(mmap.mmap):
    """Mapped memory that is unlocked before it is unmapped: CUDA would take what is mapped there
    next for locked already."""

    _unlock: Callable[[], object] = staticmethod(lambda: None)

    def lock(self, address: int, link: str) -> None:
        """Let a GPU's copies go straight to the memory, which begins at ``address``."""
        cudart = torch.cuda.cudart()
        if error := int(cudart.cudaHostRegister(address, len(self), 0)):
            # Only time is lost: copies from and to other memory hold up who asks for them.
            logger.warning(
                "%s: CUDA could not lock %.0f MiB of memory (error %d), so that stages wait for "
                "each other's copies: raise the limit on locked memory (ulimit -l)",
                link,
                len(self) / 2**20,
                error,
            )
            return
        self._unlock = lambda: cudart.cudaHostUnregister(address)

    def __del__(self) -> None:
        self._unlock()


def map_memory(descriptor: int, size: int, *, locked_for: str = "") -> torch.Tensor:
    """Memory of ``size`` bytes, uint8, that views keep alive.

    Args:
        descriptor: what is mapped, shared with other processes; -1: memory of this process alone.
        locked_for: the link whose GPU is to copy from and to it; empty: no GPU is.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if size <= _POPULATE_BELOW else 0)
    pages = _Pages(descriptor, size, flags)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if locked_for:
        pages.lock(memory.data_ptr(), locked_for)
    return memory


class Departures:
    """Copies from this thread's current GPU to page-locked memory, on a stream of their own."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._copies = torch.cuda.Stream(self._device)

    def fetch(
        self, parts: Sequence[torch.Tensor], views: Iterable[torch.Tensor], after: Any
    ) -> None:
        """Copy ``parts``, which are there once the GPU has reached ``after``, to ``views``; returns
        when that is done. By the sender's thread, which may wait for the GPU."""
        # A new thread's is GPU 0: its first call would make a context there.
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(after)
            for part, view in zip(parts, views, strict=True):
                view.copy_(part, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # waiting for it does not spin
            copied.record(self._copies)
        # wait: none of its own, `stall_timeout` for the iteration; the device
        copied.synchronize()


class Arrivals:
    """Copies from a link's buffers to this thread's current GPU, on a stream of their own.
    ``release``: gives a frame's buffer back; ``fail``: told, from the thread, what ended it."""

    def __init__(
        self, name: str, release: Callable[[int], None], fail: Callable[[Exception], None]
    ) -> None:
        self._release = release
        self._fail = fail
        self._device = torch.cuda.current_device()
        self._copies = torch.cuda.Stream(self._device)
        self._copied: dict[int, Any] = {}
        """The event after the copy of each frame whose buffer has not been given back."""
        self._read: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._give_back, name=f"sipipe-release-{name}", daemon=True
        )
        self._thread.start()

    def room(self, expected: Iterable[tuple[str, Any, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
        """Memory of the GPU for tensors of these keys, dtypes and shapes. It belongs to the copies'
        stream, so that a copy into it waits for nothing of the stage's own."""
        with torch.cuda.stream(self._copies):
            return {
                key: torch.empty(shape, dtype=dtype, device="cuda")
                for key, dtype, shape in expected
            }

    def copy(
        self, frame: int, places: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]
    ) -> None:
        """Copy a frame's tensors, in place in its buffer, to ``places`` in :meth:`room`."""
        with torch.cuda.stream(self._copies):
            for place, source in zip(places, sources, strict=True):
                place.copy_(source, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._copies)
        self._copied[frame] = copied

    def join(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let what the calling thread launches from now on use ``tensors``, all copies of which are
        queued."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._copies)
        for tensor in tensors.values():
            tensor.record_stream(stream)  # torch's allocator gives it to nobody until then

    def give_back(self, frame: int) -> None:
        """Give a frame's buffer back once it has been read; returns at once."""
        self._read.put((frame, self._copied.pop(frame)))

    def close(self) -> None:
        """End the thread; nothing reads the buffers any more when this returns."""
        self._read.put(None)
        self._thread.join()  # wait: none of its own; the device, which has all that it needs
        # wait: none of its own, `stall_timeout` for the iteration; the device
        self._copies.synchronize()

    def _give_back(self) -> None:
        try:
            torch.cuda.set_device(self._device)
            # wait: none, between iterations; `give_back`, `close`
            while (read := self._read.get()) is not None:
                frame, copied = read
                # wait: none of its own, `stall_timeout` for the iteration; the device
                copied.synchronize()
                self._release(frame)
        except Exception as error:
            self._fail(error)
