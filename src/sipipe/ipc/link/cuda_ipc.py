"""Hidden states between the GPUs of one host: copies into the next stage's memory.

**Untested on a GPU** (:mod:`.cuda_device`). Records travel as they do for shared memory
(:mod:`.shm`); slots are memory of the receiver's GPU, which the sender maps::

    sender's stream   … forward ─┐ event
    sender's copies              └► wait freed[s] ─► copy to slot s ─► record filled[s]
    both hosts                                       DATA ─►  (the copy may still be under way)
    receiver's stream                    wait filled[s] ─► forward ─► record freed[s]
    both hosts                                                        ◄─ RELEASE

Who runs here: the threads of :mod:`.shm`. Guarantees: copies are made by a copy engine (between
GPUs; the driver may use a kernel inside one), so that they take no multiprocessor from a forward
pass; no host waits for a device, and no device for a host: a record is sent when its event has
been *recorded*, and the streams wait for each other. Relies on: CUDA's inter-process events, whose
last record counts when a wait is queued, and the records' socket, which puts that record first;
``record_stream`` for the tensors' memory. A dead stage is noticed on the socket; events of a dead
process count as complete, so no stream waits for it for ever.

The check word of a frame is its record's; no seal lies in the slot, as reading one would make the
host wait for the device. Rejected: slots in the sender's memory (the receiver's copy would start
only after its host has woken up); torch's sharing of storages (a counter file in /dev/shm that
``kill -9`` leaves behind).
"""

from __future__ import annotations

import contextlib
import socket
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from sipipe.errors import StallError
from sipipe.ipc.link.arena import Arena
from sipipe.ipc.link.cuda_device import CudaDevice, Device
from sipipe.ipc.link.errors import LinkClosedError, PeerDiedError
from sipipe.ipc.link.records import Record
from sipipe.ipc.link.shm import MEMORY, ShmReceiving, ShmSending
from sipipe.ipc.link.structure import Structure
from sipipe.ipc.link.transport import Arrival

if TYPE_CHECKING:
    import torch

    from sipipe.ipc.link.endpoint import LinkEndpoint

__all__ = ["CudaIpcReceiving", "CudaIpcSending"]

_MAX_MESSAGE = 1 << 16


class _SenderEvents(msgspec.Struct, array_like=True):
    filled: list[bytes]


class _Room(msgspec.Struct, array_like=True):
    uuid: str
    memory: bytes
    freed: list[bytes]


def _device() -> Device:
    return CudaDevice()


class CudaIpcSending(ShmSending):
    """The sender's end."""

    inline_bytes = sys.maxsize  # nothing is copied by the caller, only queued
    row_kind = None
    inline_rows = False
    on_device = True

    def __init__(self, endpoint: LinkEndpoint) -> None:
        super().__init__(endpoint)
        self._device = _device()
        self._base = 0  # address of slot 0 here
        self._filled: list[Any] = []
        self._freed: list[Any] = []
        self._talk: socket.socket | None = None

    def check(self, key: str, tensor: torch.Tensor) -> None:
        self._device.check(key, tensor, self._endpoint.describe())

    def _make_room(self, total: int) -> None:  # noqa: ARG002 - the receiver allocates
        """Swap handles with the receiver, on a socket of our own that goes along.

        It answers when it next takes; whoever collects releases meanwhile reads the other socket.
        """
        depth = self._endpoint.depth
        if self._base:
            self._device.unmap(self._base)
            self._base = 0
        events = [self._device.event() for _ in range(depth)]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            try:
                self._send(MEMORY, theirs.fileno())
            finally:
                theirs.close()
            self._talk = ours
            if self._closed.is_set():  # interrupt() may have looked before the line above
                raise LinkClosedError(f"{self._endpoint.describe()}: closed")
            ours.settimeout(self._endpoint.stall_timeout)
            try:
                ours.send(msgspec.msgpack.encode(_SenderEvents([handle for _, handle in events])))
                answer = ours.recv(_MAX_MESSAGE)
            except TimeoutError:
                raise StallError(
                    f"{self._endpoint.describe()}: the next stage gave no memory within "
                    f"{self._endpoint.stall_timeout:g} s; look at its log"
                ) from None
            except OSError:
                answer = b""
            finally:
                self._talk = None
        if not answer:
            raise self.failure(0)
        room = msgspec.msgpack.decode(answer, type=_Room)
        self._base = self._device.map(room.memory, room.uuid)
        self._filled = [event for event, _ in events]
        self._freed = [self._device.open_event(handle) for handle in room.freed]

    def transmit(
        self,
        record: Record,
        structure: Structure,
        parts: list[torch.Tensor],
        *,
        after: Any,
        wait: bool,  # noqa: ARG002 - nothing waits here
    ) -> bool:
        device, slot = self._device, record.slot
        if after is not None:
            device.hold_copies(after)
        device.hold_copies(self._freed[slot])
        start = self._base + slot * self._size
        offsets = structure.offsets(self._endpoint.max_tokens)
        for part, offset in zip(parts, offsets, strict=False):
            if part.nbytes:
                device.copy(start + offset, part)
        device.mark_copies(self._filled[slot])
        self._send(self._codec.pack(record))
        return True

    def settle(self) -> None:
        self._device.wait_for_copies()

    def interrupt(self, *, farewell: bool) -> None:
        super().interrupt(farewell=farewell)
        talk = self._talk
        if talk is not None:
            with contextlib.suppress(OSError):  # it ended meanwhile
                talk.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._base:
            self._device.unmap(self._base)
            self._base = 0
        super().close()


class CudaIpcReceiving(ShmReceiving):
    """The receiver's end."""

    def __init__(self, endpoint: LinkEndpoint) -> None:
        super().__init__(endpoint)
        self._device = _device()
        self._filled: list[Any] = []
        self._freed: list[Any] = []

    def complete(self, arrival: Arrival, timeout: float) -> None:  # noqa: ARG002 - no host waits
        self._device.wait(self._filled[arrival.record.slot])

    def release(self, slot: int) -> None:
        self._device.mark(self._freed[slot])
        super().release(slot)

    def _open_room(self, descriptor: int, size: int) -> Arena:
        endpoint = self._endpoint
        with socket.socket(fileno=socket.dup(descriptor)) as talk:
            talk.settimeout(endpoint.stall_timeout)
            try:
                message = talk.recv(_MAX_MESSAGE)
            except OSError:
                message = b""
            if not message:
                raise PeerDiedError(f"{endpoint.describe()}: the previous stage died at start-up")
            theirs = msgspec.msgpack.decode(message, type=_SenderEvents)
            memory, handle = self._device.allocate(size * endpoint.depth)
            events = [self._device.event() for _ in range(endpoint.depth)]
            self._filled = [self._device.open_event(event) for event in theirs.filled]
            self._freed = [event for event, _ in events]
            room = _Room(self._device.uuid, handle, [handle for _, handle in events])
            with contextlib.suppress(OSError):  # the next receive says that it is gone
                talk.send(msgspec.msgpack.encode(room))
        return Arena(memory, endpoint.depth, size, endpoint.max_tokens)
