"""Hidden states through memory that two processes of one host share.

Who runs here: the sender's caller and thread (see :mod:`.sender`), and the receiver's thread in
``receive``. The data lie in a memfd of ``depth`` buffers, made by the sender and handed over on
the packet socket that also carries the headers (:mod:`.packets`).

Guarantees: one copy per hidden state, made by the sender; the receiver works in place. A header is
sent after the last byte of its frame has been copied. Memfd and socket vanish with their last
process, whatever ended it. Relies on: a system call on a socket to order memory, both ways.

Rejected: a futex on a word in shared memory (needs a thread that also watches for death, and wakes
no faster through the interpreter); eventfd (no end of file when the peer dies); a named segment in
/dev/shm (outlives kill -9, limited to 64 MB in containers); a header before the end of the copy
(saves up to 100 µs of a prefill that takes milliseconds).
"""

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from sipipe.errors import ResourceError
from sipipe.ipc.errors import LinkClosedError, PeerDiedError, TransferMismatchError
from sipipe.ipc.link.host_copies import Departures, map_memory
from sipipe.ipc.link.packets import HEADER_BYTES, Header, Kind, PacketConnection, pack, unpack
from sipipe.ipc.link.schema import Buffers, TensorSchema, buffer_bytes
from sipipe.linux import memfd_create
from sipipe.messages.link import LinkEndpoint

QUICK_BYTES = 256 << 10
"""Copied in 3 to 15 µs; more is cheaper to hand to a thread, as far as the caller goes."""
SCHEMAS_REMEMBERED = 64
"""By a receiver: twice as many as a sender remembers, so that it never forgets one in use."""
_MAX_PACKET = 1 << 16
MEMORY = b"m"
"""The packet that the memfd comes with. A packet of its own: reading every packet in the way that
takes descriptors would cost every iteration some microseconds."""

# For copies of a few microseconds: a thread that gives the GIL away may wait milliseconds for it.
_move_holding_gil = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


class Announcement(msgspec.Struct, array_like=True, frozen=True):
    """The body of a SCHEMA packet."""

    schema: TensorSchema
    buffer_bytes: int
    new_memory: bool
    """Whether a packet with a descriptor follows: larger buffers from the next frame on."""


Lost = Callable[[Exception], None]
"""Told by a thread of a link what ends it: an idle process asks for nothing."""


class ShmSending:
    """The sender's end, and what other transports inherit: it moves frames, and knows no
    iterations. Within a host the two ends are made in any order, and neither waits for the other.
    ``announce`` and ``transmit`` are called by one thread at a time, ``next_release`` by another at
    the same time, ``interrupt`` by any."""

    def __init__(self, endpoint: LinkEndpoint, sock: socket.socket) -> None:
        self._endpoint = endpoint
        self._connection = PacketConnection(sock, f"{endpoint.describe()}: the next stage")
        self._buffers: Buffers | None = None
        self._size = 0  # bytes of a buffer, so far
        self._packet = bytearray(HEADER_BYTES)
        self._departures = Departures() if endpoint.by_host else None
        _greet(self._connection)

    def prepare(self, schema: TensorSchema, parts: list[torch.Tensor]) -> Any:  # noqa: ARG002
        """What :meth:`transmit` has to wait for: an event, or None. A transport may replace ``parts``,
        the schema's tensors, by contiguous ones."""
        for part in parts:
            if not part.is_cpu:
                event = torch.cuda.Event(blocking=True)  # waiting for it does not spin
                event.record(torch.cuda.current_stream(part.device))
                return event
        return None

    def is_quick(self, nbytes: int) -> bool:
        """Whether a frame of ``nbytes`` bytes is quick enough for the caller's own thread."""
        return self._departures is None and nbytes <= QUICK_BYTES

    def announce(self, schema: TensorSchema) -> None:
        """Describe a schema to the receiver and make room for it; may wait for the receiver."""
        need = buffer_bytes(schema, self._endpoint.buffer_tokens)
        grow = need > self._size
        self._size = max(need, self._size)
        body = msgspec.msgpack.encode(Announcement(schema, self._size, grow))
        self._connection.send(pack(Header(Kind.SCHEMA, fingerprint=schema.fingerprint), body))
        if grow:
            self._make_room(self._size * self._endpoint.depth)

    def _make_room(self, total: int) -> None:
        endpoint, descriptor = self._endpoint, -1
        try:
            descriptor = memfd_create("sipipe-link")
            os.ftruncate(descriptor, total)
            locked_for = endpoint.describe() if endpoint.by_host else ""
            memory = map_memory(descriptor, total, locked_for=locked_for)
            self._connection.send(MEMORY, descriptor)
        except OSError as error:
            raise ResourceError(
                f"{endpoint.describe()}: no {total / 2**20:.0f} MiB of memory for "
                f"{endpoint.depth} buffers of {endpoint.buffer_tokens} tokens: {error}"
            ) from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._buffers = Buffers(memory, self._size, endpoint.buffer_tokens)

    def transmit(
        self, header: Header, schema: TensorSchema, parts: list[torch.Tensor], after: Any
    ) -> None:
        """Send one frame, after ``after``; its buffer is free, its schema announced. On return
        ``parts`` may be overwritten, on a device by work that is queued behind
        :meth:`order_after_copies`. Copied without an OpenMP team, as ``HostDevice.fetch`` does."""
        assert self._buffers is not None, "announce comes first"
        shape = schema.at(header.num_tokens)
        buffer = header.frame % self._endpoint.depth
        move = _move_holding_gil if shape.nbytes <= QUICK_BYTES else ctypes.memmove
        views = self._buffers.views(schema, buffer, header.num_tokens).values()
        if self._departures is not None:
            self._departures.fetch(parts, views, after)
            self._connection.send(pack(header))
            return
        for part, view, nbytes in zip(parts, views, shape.sizes, strict=True):
            if part.is_cpu and part.is_contiguous():
                move(view.data_ptr(), part.data_ptr(), nbytes)
            else:
                view.copy_(part)
        self._connection.send(pack(header))

    def order_after_copies(self) -> None:
        """Put what the caller's device does from now on behind the copies transmitted so far:
        nothing here, where a frame's bytes have been read when it is transmitted."""

    def next_release(self, timeout: float) -> int | None:
        """A frame whose buffer came back, or None when ``timeout`` seconds passed."""
        while (size := self._connection.receive(self._packet, timeout)) is not None:
            header = unpack(memoryview(self._packet)[:size])
            if header.kind == Kind.RELEASE:
                return header.frame
            if header.kind == Kind.BYE:
                raise LinkClosedError(f"{self._endpoint.describe()}: the next stage closed it")
            self._connection.watch(header.frame)  # HELLO
        return None

    def interrupt(self) -> None:
        """Say goodbye and end the connection; calls that wait raise."""
        self._connection.interrupt(pack(Header(Kind.BYE)))

    def close(self) -> None:
        self._connection.close()
        self._buffers = None


class ShmReceiving:
    """The receiver's end. One thread at a time calls ``receive`` and ``tensors``; any the rest."""

    def __init__(self, endpoint: LinkEndpoint, sock: socket.socket) -> None:
        self._endpoint = endpoint
        self._connection = PacketConnection(sock, f"{endpoint.describe()}: the previous stage")
        self._buffers: Buffers | None = None
        self._schemas: dict[int, TensorSchema] = {}
        self._packet = bytearray(_MAX_PACKET)
        self._view = memoryview(self._packet)
        _greet(self._connection)

    def receive(self, timeout: float) -> Header | None:
        """The header of the next frame, or None when ``timeout`` seconds passed. Raises
        PeerDiedError, LinkClosedError: there will be none."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            if (size := self._connection.receive(self._packet, left)) is None:
                return None
            header = unpack(self._view[: max(size, HEADER_BYTES)])
            if header.kind == Kind.DATA:
                return header
            if header.kind == Kind.BYE:
                raise LinkClosedError(f"{self._endpoint.describe()}: the previous stage closed it")
            if header.kind == Kind.HELLO:
                self._connection.watch(header.frame)
            else:
                self._learn(self._view[HEADER_BYTES:size])

    def schema(self, header: Header) -> TensorSchema | None:
        """What the frame's tensors are; None if that was never announced."""
        return self._schemas.get(header.fingerprint)

    def tensors(self, header: Header) -> dict[str, torch.Tensor]:
        """The frame's tensors, complete and in place; the dictionary is not to be changed."""
        if (schema := self.schema(header)) is None or self._buffers is None:
            raise TransferMismatchError(
                f"{self._endpoint.describe()}: iteration {header.iteration} has a tensor schema "
                "that was never announced"
            )
        return self._buffers.views(schema, header.frame % self._endpoint.depth, header.num_tokens)

    def release(self, frame: int) -> None:
        """Give a frame's buffer back to the sender; does nothing if that is gone."""
        with contextlib.suppress(PeerDiedError):  # the next receive() says what became of it
            self._connection.send(pack(Header(Kind.RELEASE, frame)))

    def interrupt(self) -> None:
        self._connection.interrupt(pack(Header(Kind.BYE)))

    def close(self) -> None:
        self._connection.close()
        self._buffers = None

    def _learn(self, body: memoryview) -> None:
        """Take in a schema, which comes before its first frame, and the memory it brings."""
        news = msgspec.msgpack.decode(body, type=Announcement)
        if news.new_memory:
            descriptor = self._connection.receive_descriptor()
            try:
                self._buffers = self._open_room(descriptor, news.buffer_bytes)
            finally:
                os.close(descriptor)
        # Announced again: it becomes the newest, as it does for the sender.
        self._schemas.pop(news.schema.fingerprint, None)
        self._schemas[news.schema.fingerprint] = news.schema
        if len(self._schemas) > SCHEMAS_REMEMBERED:
            del self._schemas[next(iter(self._schemas))]

    def _open_room(self, descriptor: int, size: int) -> Buffers:
        endpoint = self._endpoint
        locked_for = endpoint.describe() if endpoint.by_host else ""
        memory = map_memory(descriptor, size * endpoint.depth, locked_for=locked_for)
        return Buffers(memory, size, endpoint.buffer_tokens)


def _greet(connection: PacketConnection) -> None:
    with contextlib.suppress(PeerDiedError):  # the first send or take says so
        connection.send(pack(Header(Kind.HELLO, os.getpid())))
