"""Hidden states between the GPUs of one host: copies into the next stage's memory.

**Untested between GPUs** (:mod:`.cuda_device`). Headers travel as they do for shared memory
(:mod:`.shm`); buffers are memory of the receiver's GPU, which the sender maps::

    sender's stream   … forward ─┐ event
    sender's copies              └► wait freed[b] ─► copy to buffer b ─► record filled[b]
    both hosts                                         DATA ─►  (the copy may be under way)
    receiver's stream                      wait filled[b] ─► forward ─► record freed[b]
    both hosts                                                          ◄─ RELEASE

Who runs here: the threads of :mod:`.shm`. Guarantees: copies are made by a copy engine (between
GPUs; the driver may use a kernel inside one), so that they take no multiprocessor from a forward
pass; no host waits for a device, and no device for a host: a header is sent when its event has
been *recorded*, and the streams wait for each other. Relies on: CUDA's inter-process events, whose
last record counts when a wait is queued, and the headers' socket, which puts that record first;
``record_stream`` for the tensors' memory. A dead stage is noticed on the socket; events of a dead
process count as complete, so no stream waits for it for ever.

Rejected: buffers in the sender's memory (the receiver's copy would start only after its host has
woken up); torch's sharing of storages (a counter file in /dev/shm that ``kill -9`` leaves behind).
"""

import contextlib
import socket
from typing import Any

import msgspec
import torch

from sipipe.errors import StallError
from sipipe.ipc.errors import LinkClosedError, PeerDiedError
from sipipe.ipc.link.cuda_device import CudaDevice
from sipipe.ipc.link.packets import Header, pack
from sipipe.ipc.link.schema import Buffers, TensorSchema
from sipipe.ipc.link.shm import MEMORY, ShmReceiving, ShmSending
from sipipe.messages.link import LinkEndpoint

_MAX_MESSAGE = 1 << 16


class _Room(msgspec.Struct, array_like=True):
    """The receiver's answer to the handles of the sender's events."""

    uuid: str
    memory: bytes
    freed: list[bytes]


class CudaIpcSending(ShmSending):
    """The sender's end."""

    def __init__(self, endpoint: LinkEndpoint, sock: socket.socket) -> None:
        super().__init__(endpoint, sock)
        self._device = CudaDevice()
        self._base = 0
        """Address of buffer 0 in this process; 0 while there is none."""
        self._filled: list[Any] = []
        """This process's events, recorded when a buffer has been written."""
        self._freed: list[Any] = []
        """The receiver's events, recorded when a buffer has been read."""
        self._talk: socket.socket | None = None
        """Socket on which handles are swapped, while they are."""
        self._closed = False

    def prepare(self, schema: TensorSchema, parts: list[torch.Tensor]) -> Any:
        for index, (spec, part) in enumerate(zip(schema.specs, parts, strict=True)):
            self._device.check(spec.key, part, self._endpoint.describe())
            parts[index] = part.contiguous()
        return self._device.now().record_event()

    def is_quick(self, nbytes: int) -> bool:  # noqa: ARG002
        return True  # nothing is copied by the caller, only queued

    def _make_room(self, total: int) -> None:  # noqa: ARG002 - the receiver allocates
        """Swap handles with the receiver, on a socket that is sent along. The receiver answers when it
        takes next. A thread that waits for releases meanwhile reads the link's own socket."""
        endpoint = self._endpoint
        self._unmap()
        events = [self._device.event() for _ in range(endpoint.depth)]
        talk, receiver_talk = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with talk:
            with receiver_talk:
                self._connection.send(MEMORY, receiver_talk.fileno())
            self._talk = talk
            if self._closed:  # interrupt() may have looked before the line above
                raise LinkClosedError(f"{endpoint.describe()}: closed")
            talk.settimeout(endpoint.stall_timeout)
            try:
                # wait: the link's `stall_timeout`; the next stage, its death, `interrupt`
                talk.send(msgspec.msgpack.encode([handle for _, handle in events]))
                # wait: the link's `stall_timeout`; the next stage, its death, `interrupt`
                answer = talk.recv(_MAX_MESSAGE)
            except TimeoutError:
                raise StallError(
                    f"{endpoint.describe()}: the next stage gave no memory within "
                    f"{endpoint.stall_timeout:g} s; look at its log"
                ) from None
            except OSError:
                answer = b""
            finally:
                self._talk = None
        if not answer:
            raise self._connection.died()
        room = msgspec.msgpack.decode(answer, type=_Room)
        self._base = self._device.map(room.memory, room.uuid)
        self._filled = [event for event, _ in events]
        self._freed = [self._device.open_event(handle) for handle in room.freed]

    def transmit(
        self, header: Header, schema: TensorSchema, parts: list[torch.Tensor], after: Any
    ) -> None:
        assert self._base, "announce comes first"
        device = self._device
        buffer = header.frame % self._endpoint.depth
        device.copies.wait_event(after)
        device.copies.wait_event(self._freed[buffer])
        start = self._base + buffer * self._size
        offsets = schema.offsets(self._endpoint.buffer_tokens)
        for part, offset in zip(parts, offsets, strict=False):  # the last offset is the end
            if part.nbytes:
                device.copy(start + offset, part)
        self._filled[buffer].record(device.copies)
        self._connection.send(pack(header))

    def order_after_copies(self) -> None:
        self._device.now().wait_stream(self._device.copies)

    def interrupt(self) -> None:
        self._closed = True
        super().interrupt()
        talk = self._talk
        if talk is not None:
            with contextlib.suppress(OSError):  # it ended meanwhile
                talk.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._unmap()
        super().close()

    def _unmap(self) -> None:
        """Unmap the receiver's buffers, if they are mapped."""
        if self._base:
            self._device.unmap(self._base)
            self._base = 0


class CudaIpcReceiving(ShmReceiving):
    """The receiver's end."""

    def __init__(self, endpoint: LinkEndpoint, sock: socket.socket) -> None:
        super().__init__(endpoint, sock)
        self._device = CudaDevice()
        self._filled: list[Any] = []
        self._freed: list[Any] = []

    def tensors(self, header: Header) -> dict[str, torch.Tensor]:
        tensors = super().tensors(header)
        self._device.now().wait_event(self._filled[header.frame % self._endpoint.depth])
        return tensors

    def release(self, frame: int) -> None:
        self._freed[frame % self._endpoint.depth].record(self._device.now())
        super().release(frame)

    def _open_room(self, descriptor: int, size: int) -> Buffers:
        endpoint = self._endpoint
        with socket.socket(fileno=socket.dup(descriptor)) as talk:
            talk.settimeout(endpoint.stall_timeout)
            try:
                # wait: the link's `stall_timeout`; the previous stage or its death
                message = talk.recv(_MAX_MESSAGE)
            except OSError:
                message = b""
            if not message:
                raise PeerDiedError(f"{endpoint.describe()}: the previous stage died at start-up")
            filled = msgspec.msgpack.decode(message, type=list[bytes])
            memory, handle = self._device.allocate(size * endpoint.depth)
            events = [self._device.event() for _ in range(endpoint.depth)]
            self._filled = [self._device.open_event(event) for event in filled]
            self._freed = [event for event, _ in events]
            room = _Room(self._device.uuid, handle, [handle for _, handle in events])
            with contextlib.suppress(OSError):  # the next receive says that it is gone
                # wait: the link's `stall_timeout`; the previous stage or its death
                talk.send(msgspec.msgpack.encode(room))
        return Buffers(memory, size, endpoint.buffer_tokens)
