"""CUDA without a GPU: what it orders, and nothing more; for the code that runs on a GPU, unchanged.

A tensor "on cuda:k" is memory of its own that the host cannot see. What is done with it (each
ATen operator, each copy of the driver's) is put into the current stream of the calling thread and
runs when the device gets there; the host goes on with a tensor of the right shape that holds
poison until then. Streams have no threads: a seed decides, at every call of the host, which of
them go on and how far, from nothing at all until somebody waits to everything at once. An event
stands for a place in a stream. Memory is taken back as torch's allocator does: poison comes as
soon as the work that was queued in its stream is done, and in the streams that ``record_stream``
named. Copies read page-locked memory when they run; with pageable memory the host waits.

Threads of the code under test take turns (:class:`Actor`): each stops before every call of the
device and at its queue until the test lets it go on, so that a seed is one schedule.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NEVER = PAGEABLE, HOST_TENSOR = "pageable memory", "a host tensor in a kernel"
_HAND_OVER = 60  # seconds; a bug in the tests themselves, not a bound that a test relies on
_PACES = ((1000,), (0, 0, 0, 1), (0,))  # operations that a stream runs at a call of the host


def poison(memory: torch.Tensor) -> None:
    memory.view(torch.uint8).fill_(0xA5) if memory.is_contiguous() else memory.fill_(-7)
    if memory.dtype.is_floating_point:
        memory.fill_(float("nan"))


class Stream:
    """Operations in order; ``done`` of the ``queued`` ones have run."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.machine = machine = Machine.current
        self.index = machine.index_of(device)
        self.operations: list[Any] = []
        self.done = 0
        self.pace: tuple[int, ...] = machine.random.choice(_PACES)
        machine.streams.append(self)
        self.cuda_stream = len(machine.streams)

    @property
    def queued(self) -> int:
        return len(self.operations)

    def wait_event(self, event: Event) -> None:
        if event.place is not None:
            self.machine.put(self, event.place)

    def wait_stream(self, other: Stream) -> None:
        self.machine.put(self, (other, other.queued))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.done == self.queued

    def synchronize(self) -> None:
        self.machine.wait("stream", (self, self.queued))


class Event:
    """A place in a stream: what was queued there when it was recorded last."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.machine = Machine.current
        self.place: tuple[Stream, int] | None = None
        self.timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.machine.stream_of(self.machine.device)
        self.place = self.machine.put(stream, lambda: None)

    @property
    def device(self) -> Any:
        return torch.device("cuda", self.place[0].index) if self.place else None

    def synchronize(self) -> None:
        if self.place is not None:
            self.machine.enter(self.place[0].index)
            self.machine.wait("event", self.place)

    def elapsed_time(self, other: Event) -> float:
        for event in (self, other):
            assert event.timing, "an event without timing"
            if not event.machine.reached(event.place):
                raise RuntimeError("CUDA error: device not ready")
        return 1.0

    def ipc_handle(self) -> bytes:
        with self.machine.lock:
            self.machine.shared.append(self)
            return str(len(self.machine.shared) - 1).encode()

    @staticmethod
    def from_ipc_handle(device: Any, handle: bytes) -> Event:
        return Machine.current.shared[int(handle)]


class Block:
    """Memory of a device, given back when the host has no tensor on it any more."""

    def __init__(self, stream: Stream, memory: torch.Tensor) -> None:
        self.memory, self.streams = memory, {stream}

    def __del__(self) -> None:
        machine = next(iter(self.streams)).machine
        with machine.lock:
            machine.freed.append(([(s, s.queued) for s in self.streams], self.memory))


class Actor:
    """A thread of the code under test, which goes on when it is let."""

    def __init__(self, items: queue.SimpleQueue[Any]) -> None:
        self.items = items
        self.go, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.free = self.idle = False

    def step(self) -> None:
        if not self.free:
            self.back.release()
            assert self.go.acquire(timeout=_HAND_OVER)

    def end(self) -> None:
        """It takes no more turns; called by itself, or from outside while it stands."""
        self.free = True
        self.back.release()
        self.go.release()

    def let(self) -> None:
        """One turn."""
        self.go.release()
        assert self.back.acquire(timeout=_HAND_OVER)


class SteppedQueue:
    """In place of a thread's ``queue.SimpleQueue``: its reader is an actor."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.actor = Actor(self.items)
        self.actor.free = not Machine.current.stepped
        Machine.current.actors.append(self.actor)

    def put(self, item: Any) -> None:
        self.items.put(item)
        if item is None:
            self.actor.end()

    def get(self) -> Any:
        Machine.current.local.actor = self.actor
        self.actor.idle = True
        self.actor.step()
        self.actor.idle = False
        return self.items.get(timeout=_HAND_OVER)


class Machine:
    """GPUs of one host, all streams of them, and the seed's decisions."""

    current: Machine

    def __init__(self, seed: int, gpus: int = 2) -> None:
        Machine.current = self
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.local = threading.local()
        self.streams: list[Stream] = []
        self.shared: list[Event] = []
        self.freed: list[Any] = []
        self.locked: list[tuple[int, int]] = []
        self.errors: list[Exception] = []
        self.actors: list[Actor] = []
        self.waits: list[str] = []
        """What the launching thread waited for, and what no thread may wait for."""
        self.strangers: list[str] = []
        """Threads, other than the launching one, that put work into a device's own stream."""
        self.foreign: list[str] = []
        """Threads whose calls have made a context on a GPU that is not theirs."""
        self.copies = 0
        """Of tensors or matrices, in a device or between one and the host."""
        self.launching = threading.current_thread()
        self.own = [Stream(index) for index in range(gpus)]
        self.stepped = True
        """Whether threads take turns; else they run as they like, as does the test's own."""
        self.calm = True
        """Everything runs at once, as long as a test sets up."""

    # ---- what the host asks ---------------------------------------------------------------------

    def put(self, stream: Stream, operation: Any) -> tuple[Stream, int]:
        """A closure, or a place that ``stream`` waits for; returns the place after it."""
        self.turn()
        with self.lock:
            if threading.current_thread() is not self.launching and stream in self.own:
                self.strangers.append(threading.current_thread().name)
            stream.operations.append(operation)
            place = (stream, stream.queued)
            self.drift()
            return place

    def wait(self, what: str, place: tuple[Stream, int]) -> None:
        self.turn()
        with self.lock:
            if threading.current_thread() is self.launching or what in NEVER:
                self.waits.append(what)
            self.finish(*place)
            self.drift()

    def turn(self) -> None:
        actor = getattr(self.local, "actor", None)
        if actor is not None:
            actor.step()

    def reached(self, place: tuple[Stream, int] | None) -> bool:
        return place is not None and place[0].done >= place[1]

    @property
    def device(self) -> int:
        """The calling thread's current one: GPU 0 in a new thread."""
        index: int = getattr(self.local, "device", 0)
        return index

    @device.setter
    def device(self, index: int) -> None:
        self.local.device = index

    def set_device(self, device: Any) -> None:
        self.device = self.index_of(device)

    def enter(self, index: int) -> None:
        """A call that goes to the thread's current device, and is about device ``index``."""
        if self.device != index:
            self.foreign.append(threading.current_thread().name)

    # ---- what the device does -------------------------------------------------------------------

    def drift(self) -> None:
        """The streams go on, as far as the seed says."""
        if self.calm:
            for stream in self.streams:
                self.finish(stream, stream.queued)
            return
        self.choose_pace()
        for stream in self.random.sample(self.streams, len(self.streams)):
            some = self.random.choice(stream.pace)
            while some and stream.done < stream.queued and self.ready(stream):
                self.run(stream)
                some -= 1

    def choose_pace(self) -> None:
        """Now and then a stream goes on faster, slower, or not at all."""
        if self.random.random() < 0.03:
            self.random.choice(self.streams).pace = self.random.choice(_PACES)

    def ready(self, stream: Stream) -> bool:
        operation = stream.operations[stream.done]
        return not isinstance(operation, tuple) or self.reached(operation)

    def finish(self, stream: Stream, place: int) -> None:
        """Run ``stream`` to ``place``, and of others what it waits for, no more."""
        while stream.done < place:
            operation = stream.operations[stream.done]
            if isinstance(operation, tuple):
                self.finish(*operation)
            self.run(stream)

    def run(self, stream: Stream) -> None:
        operation = stream.operations[stream.done]
        stream.operations[stream.done] = None
        if not isinstance(operation, tuple):
            try:
                with torch.inference_mode():
                    operation()
            except Exception as error:  # as an illegal address: the device tells later
                self.errors.append(error)
        stream.done += 1
        self.take_back()

    def take_back(self) -> None:
        kept = []
        for places, memory in self.freed:
            if all(self.reached(place) for place in places):
                with torch.inference_mode():
                    poison(memory)
            else:
                kept.append((places, memory))
        self.freed = kept

    # ---- streams and memory ------------------------------------------------------------------------

    def index_of(self, device: Any) -> int:
        if device is None:
            return self.device
        if isinstance(device, int):
            return device
        index: int | None = torch.device(device).index
        return self.device if index is None else index

    def stream_of(self, device: Any = None) -> Stream:
        """The calling thread's current stream."""
        index = self.index_of(device)
        found: Stream = getattr(self.local, f"stream{index}", None) or self.own[index]
        return found

    def set_stream(self, stream: Stream) -> None:
        setattr(self.local, f"stream{stream.index}", stream)

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``."""
        self.enter(stream.index)  # torch makes the device before it current again when it leaves
        before = self.stream_of(stream.index)
        self.set_stream(stream)
        yield
        self.set_stream(before)

    def is_locked(self, tensor: torch.Tensor) -> bool:
        return self.is_locked_at(tensor.data_ptr())

    def is_locked_at(self, start: int) -> bool:
        return any(first <= start < last for first, last in self.locked)

    def lock_pages(self, start: int, nbytes: int) -> None:
        if not hasattr(self.local, "device"):  # it would make a context on GPU 0
            self.foreign.append(threading.current_thread().name)
        self.locked.append((start, start + nbytes))

    def unlock_pages(self, start: int) -> None:
        self.locked = [pages for pages in self.locked if pages[0] != start]

    def launch(self, operation: Any, index: int) -> None:
        """A kernel of the tests' own, or a graph."""
        self.put(self.stream_of(index), operation)
