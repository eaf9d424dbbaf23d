"""Hidden states between the GPUs of two hosts: NCCL point to point, posted when both are ready.

**Untested on a GPU**: there was none where this was written. Everything but NCCL itself is tested
with gloo, whose process group has the same calls.

Records travel over TCP (:mod:`.tcp`), the data in a communicator of the link's own two ranks::

    sender                                  receiver
    host sleeps until the data are made
    packs them on a side stream
    DATA ──────────────────────────────►    thread reads it, posts recv into the slot
    posts send                              take: the current stream waits for it
                                            release: host thread sleeps until the forward that
    slot is free  ◄─────────────── RELEASE  read the slot is done

A NCCL kernel occupies multiprocessors and waits there for its peer. So neither is launched before
the data are made *and* the slot is free: what is left to wait for is the record's way to the
other host, never a stage's forward pass.

Who runs here: the sender's thread (:mod:`.sender`) transmits; in the receiver's process the thread
of :mod:`.tcp_receiving` posts, and one of ours sends the releases. Guarantees: one message for a
microbatch; nothing of the data is on the TCP connection. Relies on: TCP's end for a dead peer, at
which the communicator is aborted, so that no kernel waits for ever. The rendezvous (a
``TCPStore`` on a port that the receiver tells over the authenticated connection) is torch's, and
not authenticated: use a network that you trust.

Rejected: posting receives ahead, as one would on a CPU (each is a kernel that spins on the device
until the other stage gets there); the engine's own process group (stages share none).
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import socket
import threading
from typing import TYPE_CHECKING, Any, Protocol

from sipipe.errors import ResourceError, UnsupportedError
from sipipe.ipc.link.arena import Arena, PackedArena
from sipipe.ipc.link.errors import PeerDiedError
from sipipe.ipc.link.records import RECORD_BYTES, Kind, Record
from sipipe.ipc.link.structure import Structure
from sipipe.ipc.link.tcp import TcpSending
from sipipe.ipc.link.tcp_receiving import TcpReceiving
from sipipe.ipc.link.tcp_stream import read_exactly
from sipipe.ipc.link.transport import Arrival

if TYPE_CHECKING:
    import torch

    from sipipe.ipc.link.endpoint import LinkEndpoint

__all__ = ["Lane", "NcclReceiving", "NcclSending"]

_SENDER, _RECEIVER = 0, 1
_JOIN_SECONDS = 20.0
_FINISH_SECONDS = 2.0


class Lane(Protocol):
    """A stream of one process's device, and the group that sends on it."""

    def check(self, key: str, tensor: torch.Tensor, link: str) -> None:
        """Refuse a tensor that is elsewhere."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory as bytes [nbytes]."""

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, this lane's stream is the current one."""

    def finish(self) -> None:
        """Sleep until the lane's stream is done."""

    def event(self) -> Any:
        """An event behind what the caller's current stream was given so far."""

    def join(self, store: Any, rank: int, timeout: float) -> Any:
        """The process group of two ranks."""


class CudaLane:
    """The current CUDA device of the thread that makes it."""

    def __init__(self) -> None:
        import torch

        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)

    def check(self, key: str, tensor: torch.Tensor, link: str) -> None:
        if tensor.device != self._device:
            raise UnsupportedError(
                f"{link} carries tensors on {self._device} and {key!r} is on {tensor.device}; "
                'use transport "socket"'
            )

    def empty(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        import torch

        stream: contextlib.AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    def finish(self) -> None:
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()

    def event(self) -> Any:
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self, store: Any, rank: int, timeout: float) -> Any:
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=timeout)
        return ProcessGroupNCCL(store, rank, 2, options)


def _lane() -> Lane:
    return CudaLane()


def _store(host: str, port: int, *, serves: bool) -> Any:
    """Torch's rendezvous; both sides are there, so a bound that holds up no close for long."""
    from torch.distributed import TCPStore

    return TCPStore(
        host,
        port,
        2,
        serves,
        timeout=datetime.timedelta(seconds=_JOIN_SECONDS),
        wait_for_workers=False,
    )


class NcclSending(TcpSending):
    """The sender's end."""

    inline_bytes = -1  # its thread waits for the data
    row_kind = None

    def __init__(self, endpoint: LinkEndpoint) -> None:
        super().__init__(endpoint)
        self._lane = _lane()
        self._group: Any = None
        self._arena: PackedArena | None = None
        self._work: list[Any] = [None] * endpoint.depth

    def check(self, key: str, tensor: torch.Tensor) -> None:
        self._lane.check(key, tensor, self._endpoint.describe())

    def _dial(self) -> socket.socket:
        sock = super()._dial()
        try:
            record = bytearray(RECORD_BYTES)
            sock.settimeout(self._endpoint.start_timeout)
            if not read_exactly(sock, [memoryview(record)]):
                raise ConnectionError("it hung up before it told its rendezvous")
            sock.settimeout(None)
            hello = self._codec.unpack(record)
            if hello.kind != Kind.HELLO:
                raise ConnectionError("it closed before it told its rendezvous")
            store = _store(self._endpoint.address[0], hello.value, serves=False)
            self._group = self._lane.join(store, _SENDER, self._endpoint.stall_timeout)
        except BaseException:
            sock.close()
            raise
        return sock

    def announce(self, number: int, structure: Structure) -> None:
        size = structure.offsets(self._endpoint.max_tokens)[-1]
        if self._arena is None or size > self._arena.size:
            depth = self._endpoint.depth
            for work in self._work:  # sends out of the old memory
                if work is not None:
                    work.wait()
            self._work = [None] * depth
            memory = self._lane.empty(depth * size)
            self._arena = PackedArena(memory, depth, size, self._endpoint.max_tokens)
        super().announce(number, structure)

    def transmit(
        self,
        record: Record,
        structure: Structure,
        parts: list[torch.Tensor],
        *,
        after: Any,
        wait: bool,
    ) -> bool:
        assert wait, "inline_bytes keeps callers out"
        assert self._arena is not None, "announce comes first"
        if after is not None:
            after.synchronize()
        frame = self._arena.frame(structure, record.slot, record.num_tokens)
        with self._lane.stream():
            # Its last send is over, as the receiver has released the slot since.
            views = self._arena.views(structure, record.slot, record.num_tokens)
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.reshape(view.shape), non_blocking=True)
            self._lane.finish()
            self._left = [memoryview(self._codec.pack(record))]
            self.flush()
            if frame.numel():
                try:
                    self._work[record.slot] = self._group.send([frame], _RECEIVER, 0)
                except RuntimeError as error:
                    raise self.failure(0) from error
        return True

    def interrupt(self, *, farewell: bool) -> None:
        if farewell:
            self._finish_sends()
        super().interrupt(farewell=farewell)
        if not farewell:
            _abort(self._group)

    def _finish_sends(self) -> None:
        """Frames that were sent arrive, although the group goes: bounded, as the peer may hang."""
        bound = datetime.timedelta(seconds=_FINISH_SECONDS)
        with contextlib.suppress(RuntimeError), self._lane.stream():
            for work in self._work:
                if work is not None:
                    work.wait(bound)
        self._work = [None] * self._endpoint.depth

    def close(self) -> None:
        super().close()
        self._group = None


class NcclReceiving(TcpReceiving):
    """The receiver's end."""

    def __init__(self, endpoint: LinkEndpoint) -> None:
        self._lane = _lane()
        self._group: Any = None
        self._store: Any = None  # kept: it serves
        self._work: list[Any] = [None] * endpoint.depth
        self._read: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        super().__init__(endpoint)
        self._releaser = threading.Thread(
            target=self._release_read, name=f"sipipe-release-{endpoint.name}", daemon=True
        )
        self._releaser.start()

    def receive(self, timeout: float, expected: Arrival | None) -> Arrival | None:
        arrival = super().receive(timeout, expected)
        if arrival is None:
            return None
        slot = arrival.record.slot
        work, self._work[slot] = self._work[slot], None
        if work is not None:
            try:
                work.wait()  # the current stream's wait; gloo's is the host's
            except RuntimeError as error:
                raise PeerDiedError(
                    f"{self._endpoint.describe()}: the previous stage died or the network lost "
                    "it; its own log says why"
                ) from error
        return arrival

    def release(self, slot: int) -> None:
        self._read.put((slot, self._lane.event()))

    def _release_read(self) -> None:
        # No bound: an idle engine releases nothing for hours, and close() puts the None.
        while (item := self._read.get()) is not None:
            slot, event = item
            event.synchronize()
            super().release(slot)

    def interrupt(self) -> None:
        super().interrupt()
        _abort(self._group)

    def close(self) -> None:
        self._read.put(None)
        super().close()
        self._releaser.join()
        self._work.clear()
        self._group = self._store = None

    # -- the reading thread ----------------------------------------------------------------------

    def _welcome(self, sock: socket.socket) -> None:
        try:
            self._store = _store(self._endpoint.address[0], 0, serves=True)
        except RuntimeError as error:
            raise ResourceError(f"{self._endpoint.describe()}: no rendezvous: {error}") from error
        sock.sendall(self._codec.pack(Record(Kind.HELLO, value=self._store.port)))
        self._group = self._lane.join(self._store, _RECEIVER, self._endpoint.stall_timeout)

    def _make_arena(self, size: int) -> Arena:
        endpoint = self._endpoint
        memory = self._lane.empty(endpoint.depth * size)
        return PackedArena(memory, endpoint.depth, size, endpoint.max_tokens)

    def _read_body(
        self,
        sock: socket.socket,  # noqa: ARG002 - the data come another way
        record: Record,
        structure: Structure,
        arena: Arena,
    ) -> None:
        assert isinstance(arena, PackedArena)
        frame = arena.frame(structure, record.slot, record.num_tokens)
        if frame.numel():
            with self._lane.stream():
                self._work[record.slot] = self._group.recv([frame], _SENDER, 0)

    def _failed(self, error: Exception) -> None:
        _abort(self._group)  # or a posted receive waits on the device for a dead stage
        super()._failed(error)


def _abort(group: Any) -> None:
    with contextlib.suppress(Exception):  # it is broken already, or gloo's, which has none
        group.abort()
