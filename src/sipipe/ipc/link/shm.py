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
"""Bytes of a frame that the caller's own thread copies, in 3 to 15 µs. Of more it is cheaper for the
caller to hand them to a thread."""
SCHEMAS_REMEMBERED = 64
"""Schemas that a receiver remembers: twice as many as a sender, so that it never forgets one in use."""
_MAX_PACKET = 1 << 16
MEMORY = b"m"
"""Packet with which the memfd comes. It has one of its own, because reading every packet in the way
that takes descriptors would cost each iteration some microseconds."""

# For copies of a few microseconds: a thread that gives the GIL away may wait milliseconds for it.
_move_holding_gil = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


class Announcement(msgspec.Struct, array_like=True, frozen=True):
    """Body of a SCHEMA packet."""

    schema: TensorSchema
    buffer_bytes: int
    """Bytes of a buffer from now on."""
    new_memory: bool
    """True if buffers are larger from the next frame on: in memory whose descriptor comes with the next
    packet, or in memory that the receiver has to make (:mod:`.nixl`)."""
    address: str = ""
    """Address from which the sender writes to the receiver's memory over TCP; empty within a host."""


Lost = Callable[[Exception], None]
"""Takes, from a thread of a link, the error that ends the link. An idle process would not see it
otherwise."""


class ShmSending:
    """The sender's end, from which other transports inherit. It moves frames, and knows no iterations.

    Within a host the two ends are made in any order, and neither waits for the other. One thread at a
    time calls ``announce`` and ``transmit``; another may call ``next_release`` at the same time, and
    any ``interrupt``."""

    def __init__(self, endpoint: LinkEndpoint, sock: socket.socket) -> None:
        self._endpoint = endpoint
        self._connection = PacketConnection(sock, f"{endpoint.describe()}: the next stage")
        self._buffers: Buffers | None = None
        self._size = 0
        """Bytes of a buffer so far."""
        self._packet = bytearray(HEADER_BYTES)
        self._departures = Departures() if endpoint.by_host else None
        _greet(self._connection)

    def prepare(self, schema: TensorSchema, parts: list[torch.Tensor]) -> Any:  # noqa: ARG002
        """The event for which :meth:`transmit` has to wait, or None. A transport may replace ``parts``,
        the schema's tensors, by contiguous ones."""
        for part in parts:
            if not part.is_cpu:
                event = torch.cuda.Event(blocking=True)  # waiting for it does not spin
                event.record(torch.cuda.current_stream(part.device))
                return event
        return None

    def is_quick(self, nbytes: int) -> bool:
        """True if a frame of ``nbytes`` bytes is quick enough for the caller's own thread."""
        return self._departures is None and nbytes <= QUICK_BYTES

    def announce(self, schema: TensorSchema) -> None:
        """Describe a schema to the receiver and make room for it; may wait for the receiver."""
        size = buffer_bytes(schema, self._endpoint.buffer_tokens)
        grows = size > self._size
        self._size = max(size, self._size)
        announcement = Announcement(schema, self._size, new_memory=grows)
        header = Header(Kind.SCHEMA, fingerprint=schema.fingerprint)
        self._connection.send(pack(header, msgspec.msgpack.encode(announcement)))
        if grows:
            self._make_room(self._size * self._endpoint.depth)

    def _make_room(self, total: int) -> None:
        """Make ``total`` bytes of buffers, and hand them to the receiver. Raises ResourceError: there is
        not that much memory."""
        endpoint = self._endpoint
        descriptor = -1
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
        """Send one frame once the event ``after`` is reached. Its buffer is free, and its schema
        announced. On return ``parts`` may be overwritten, on a device by work that is queued behind
        :meth:`order_after_copies`."""
        self._fill(header.frame % self._endpoint.depth, header, schema, parts, after)
        self._connection.send(pack(header))

    def _fill(
        self,
        buffer: int,
        header: Header,
        schema: TensorSchema,
        parts: list[torch.Tensor],
        after: Any,
    ) -> list[torch.Tensor]:
        """Copy a frame's tensors to a buffer; returns them there.

        Memory is moved and not copied by torch, whose OpenMP team would slow the forward pass down, as
        ``Device.fetch`` explains."""
        assert self._buffers is not None, "announce comes first"
        shape = schema.at(header.num_tokens)
        move = _move_holding_gil if shape.nbytes <= QUICK_BYTES else ctypes.memmove
        views = list(self._buffers.views(schema, buffer, header.num_tokens).values())
        if self._departures is not None:
            self._departures.fetch(parts, views, after)
            return views
        for part, view, nbytes in zip(parts, views, shape.sizes, strict=True):
            if part.is_cpu and part.is_contiguous():
                move(view.data_ptr(), part.data_ptr(), nbytes)
            else:
                view.copy_(part)
        return views

    def order_after_copies(self) -> None:
        """Order what the caller's device does from now on behind the copies so far. Here nothing is to
        be done: a frame's bytes have been read when ``transmit`` returns."""

    def next_release(self, timeout: float) -> int | None:
        """Wait for a frame whose buffer the receiver gives back; None after ``timeout`` seconds. Raises
        PeerDiedError, LinkClosedError: none will come back."""
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
        """Wait for the header of the next frame; None after ``timeout`` seconds. Raises PeerDiedError,
        LinkClosedError: there will be none."""
        deadline = time.monotonic() + timeout
        while True:
            seconds = max(0.0, deadline - time.monotonic())
            size = self._connection.receive(self._packet, seconds)
            if size is None:
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
        """The schema of the frame's tensors; None if it was never announced."""
        return self._schemas.get(header.fingerprint)

    def tensors(self, header: Header) -> dict[str, torch.Tensor]:
        """The frame's tensors, complete and in place. The caller must not change the dictionary. Raises
        TransferMismatchError: their schema was never announced."""
        schema = self.schema(header)
        if schema is None or self._buffers is None:
            raise TransferMismatchError(
                f"{self._endpoint.describe()}: iteration {header.iteration} has a tensor schema "
                "that was never announced"
            )
        return self._buffers.views(schema, header.frame % self._endpoint.depth, header.num_tokens)

    def release(self, frame: int) -> None:
        """Give a frame's buffer back to the sender, if that is still there."""
        with contextlib.suppress(PeerDiedError):  # the next receive() raises it
            self._connection.send(pack(Header(Kind.RELEASE, frame)))

    def interrupt(self) -> None:
        self._connection.interrupt(pack(Header(Kind.BYE)))

    def close(self) -> None:
        self._connection.close()
        self._buffers = None

    def _learn(self, body: memoryview) -> None:
        """Take in a schema, which comes before its first frame, and the memory that comes with it."""
        news = msgspec.msgpack.decode(body, type=Announcement)
        if news.new_memory:
            self._buffers = self._take_room(news)
        # A schema that is announced again becomes the newest, as it does for the sender.
        self._schemas.pop(news.schema.fingerprint, None)
        self._schemas[news.schema.fingerprint] = news.schema
        if len(self._schemas) > SCHEMAS_REMEMBERED:
            del self._schemas[next(iter(self._schemas))]

    def _take_room(self, news: Announcement) -> Buffers:
        """The buffers that were announced."""
        descriptor = self._connection.receive_descriptor()
        try:
            return self._open_room(descriptor, news.buffer_bytes)
        finally:
            os.close(descriptor)

    def _open_room(self, descriptor: int, size: int) -> Buffers:
        """The buffers, each of ``size`` bytes, in the memory that came as ``descriptor``."""
        endpoint = self._endpoint
        locked_for = endpoint.describe() if endpoint.by_host else ""
        memory = map_memory(descriptor, size * endpoint.depth, locked_for=locked_for)
        return Buffers(memory, size, endpoint.buffer_tokens)


def _greet(connection: PacketConnection) -> None:
    """Tell the peer this process's id."""
    with contextlib.suppress(PeerDiedError):  # the first send or take raises it
        connection.send(pack(Header(Kind.HELLO, os.getpid())))
