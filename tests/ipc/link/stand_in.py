"""A device without a GPU, for :mod:`sipipe.ipc.link.cuda_ipc`: what CUDA orders, and nothing more.

A copy happens some time after it was asked for, on a thread that stands for the copy stream; an
event counts how often it was recorded and how often that has come true, in memory that other
processes map. A wait that is missing in the transport shows as data that are not there yet. The
caller's own stream is the caller itself.
"""

from __future__ import annotations

import mmap
import os
import queue
import random
import struct
import threading
import time
import weakref

import torch

from sipipe.ipc.link import cuda_ipc

LONGEST_DELAY = 0.001
_COUNTS = struct.Struct("<QQ")  # recorded, come true


class Shared:
    """Memory that another process finds by a handle, as long as this one lives."""

    def __init__(self, nbytes: int) -> None:
        self.descriptor = os.memfd_create("sipipe-stand-in", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, nbytes)
        self.memory = mmap.mmap(self.descriptor, nbytes)
        self.handle = f"{os.getpid()}:{self.descriptor}".encode()
        weakref.finalize(self, os.close, self.descriptor)


def attach(handle: bytes) -> mmap.mmap:
    pid, descriptor = handle.decode().split(":")
    ours = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        return mmap.mmap(ours, 0)
    finally:
        os.close(ours)


class Event:
    def __init__(self, memory: mmap.mmap, owner: Shared | None = None) -> None:
        self.memory = memory
        self.owner = owner

    def record(self, stream) -> None:
        recorded, done = _COUNTS.unpack_from(self.memory)
        _COUNTS.pack_into(self.memory, 0, recorded + 1, done)
        stream.give(lambda: self.come_true(recorded + 1))

    def recorded(self) -> int:
        return _COUNTS.unpack_from(self.memory)[0]

    def come_true(self, record: int) -> None:
        struct.pack_into("<Q", self.memory, 8, record)

    def wait(self, record: int) -> None:
        while _COUNTS.unpack_from(self.memory)[1] < record:
            time.sleep(0.0002)


class Stream:
    """Runs what it is given in order, late, on a thread of its own."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(self._calls,), daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    @staticmethod
    def _run(calls: queue.SimpleQueue) -> None:
        while (call := calls.get()) is not None:
            time.sleep(random.random() * LONGEST_DELAY)
            call()

    def give(self, call) -> None:
        self._calls.put(call)

    def wait_event(self, event: Event) -> None:
        record = event.recorded()
        self.give(lambda: event.wait(record))

    def finish(self) -> None:
        done = threading.Event()
        self._calls.put(done.set)
        done.wait(60)


class Now:
    """The caller's own stream: the caller does at once what it is given."""

    wait_event = Stream.wait_event

    def give(self, call) -> None:
        call()

    def wait_stream(self, stream: Stream) -> None:
        stream.finish()

    def record_event(self) -> Event:
        event = Event(mmap.mmap(-1, _COUNTS.size))
        event.record(self)
        return event


class StandInDevice:
    """As :class:`sipipe.ipc.link.cuda_device.CudaDevice`."""

    uuid = "stand-in"

    def __init__(self) -> None:
        self.copies = Stream()
        self._mapped: dict[int, tuple[mmap.mmap, torch.Tensor]] = {}

    def check(self, key, tensor, link):
        assert tensor.is_cpu

    def allocate(self, nbytes):
        shared = Shared(nbytes)
        tensor = torch.frombuffer(shared.memory, dtype=torch.uint8)
        weakref.finalize(tensor.untyped_storage(), lambda kept: None, shared)
        tensor.shared = shared
        return tensor, shared.handle

    def map(self, handle, uuid):
        assert uuid == self.uuid
        memory = attach(handle)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._mapped[tensor.data_ptr()] = (memory, tensor)
        return tensor.data_ptr()

    def unmap(self, address):
        self.copies.finish()
        del self._mapped[address]

    def event(self):
        shared = Shared(_COUNTS.size)
        return Event(shared.memory, shared), shared.handle

    def open_event(self, handle):
        return Event(attach(handle))

    def copy(self, to, tensor):
        base, (_, memory) = max(item for item in self._mapped.items() if item[0] <= to)
        target = memory[to - base : to - base + tensor.nbytes]
        source = tensor.reshape(-1).view(torch.uint8)
        self.copies.give(lambda: target.copy_(source))

    def now(self):
        return Now()


def use() -> None:
    """From now on links between GPUs work in this process, on the CPU."""
    cuda_ipc.CudaDevice = StandInDevice  # type: ignore[assignment,misc]
