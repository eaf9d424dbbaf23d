"""Hidden states between stages on different hosts, over a ZeroMQ connection of their own.

Who runs here: the threads of :mod:`.shm`, whose packets these are, and ZeroMQ's. A frame is one
message: its header, then the bytes of each tensor. Guarantees: those of
:mod:`sipipe.ipc.connection`. The receiver's buffers are there before the first frame. ZeroMQ reads
and decrypts a frame as it comes, and ``receive`` copies it to its buffer: one copy at either end.
Once the ends have met, only the receiver waits for the network: an iteration costs one way and no
round trip.

Rejected: a TCP protocol of our own (362 to 435 µs for 16 KB where ZeroMQ takes 190 to 226, and
twice the CPU time); receiving in a thread of our own (a wake-up more on the critical path).
"""

import ctypes
import time
from typing import Any

import msgspec
import torch

from sipipe.errors import StallError
from sipipe.ipc.connection import Connection
from sipipe.ipc.frames import Place
from sipipe.ipc.link.host_copies import Departures, map_memory
from sipipe.ipc.link.packets import Header, Kind, pack, unpack
from sipipe.ipc.link.schema import Buffers, TensorSchema, buffer_bytes
from sipipe.ipc.link.shm import Announcement, Lost, ShmReceiving, ShmSending
from sipipe.messages.link import LinkEndpoint

MEET_SECONDS = 30.0
"""Seconds for which the connecting end waits. The listening end is opened at the same time."""


class Packets:
    """A connection with the methods of :class:`.packets.PacketConnection`, which has a socket."""

    def __init__(self, connection: Connection, place: Place | None) -> None:
        self._connection = connection
        self._place = place
        self.send = connection.send
        self.died = connection.died
        self.interrupt = connection.interrupt
        self.close = connection.close

    @property
    def usable(self) -> bool:
        """True while packets pass, as :attr:`.Connection.usable`."""
        return self._connection.usable

    def receive(self, packet: bytearray, timeout: float) -> int | None:
        parts = self._connection.receive(timeout, self._place)
        if parts is None:
            return None
        packet[: len(parts[0])] = parts[0]
        return len(parts[0])

    def watch(self, pid: int) -> None:
        """Do nothing: the connection watches the peer."""


class ZeromqSending(ShmSending):
    """The sender's end, which connects."""

    def __init__(self, endpoint: LinkEndpoint, lost: Lost) -> None:
        self._endpoint = endpoint
        self._packet = bytearray(1 << 16)
        self._departures = Departures() if endpoint.by_host else None
        self._buffers: Buffers | None = None
        self._size = 0
        """Bytes of the buffer so far."""
        self._connection: Any = connect(endpoint, lost, listens=False)

    def announce(self, schema: TensorSchema) -> None:
        size = buffer_bytes(schema, self._endpoint.buffer_tokens)
        if self._departures is not None and size > self._size:
            # One buffer is enough: ZeroMQ has copied a frame when `send` returns.
            memory = map_memory(-1, size, locked_for=self._endpoint.describe())
            self._buffers = Buffers(memory, size, self._endpoint.buffer_tokens)
            self._size = size
        body = msgspec.msgpack.encode(Announcement(schema, size, new_memory=False))
        self._connection.send(pack(Header(Kind.SCHEMA, fingerprint=schema.fingerprint), body))

    def transmit(
        self, header: Header, schema: TensorSchema, parts: list[torch.Tensor], after: Any
    ) -> None:
        if self._departures is None:
            sources = [part.contiguous() for part in parts]
        else:
            assert self._buffers is not None, "announce comes first"
            sources = list(self._buffers.views(schema, 0, header.num_tokens).values())
            self._departures.fetch(parts, sources, after)
        views = [
            memoryview((ctypes.c_char * nbytes).from_address(part.data_ptr())) if nbytes else b""
            for part, nbytes in zip(sources, schema.at(header.num_tokens).sizes, strict=True)
        ]
        self._connection.send(pack(header), *views)


class ZeromqReceiving(ShmReceiving):
    """The receiver's end, which listens."""

    def __init__(self, endpoint: LinkEndpoint, lost: Lost) -> None:
        self._endpoint = endpoint
        self._packet = bytearray(1 << 16)
        self._view = memoryview(self._packet)
        self._buffers: Buffers | None = None
        self._size = 0
        """Bytes of a buffer so far."""
        self._schemas: dict[int, TensorSchema] = {}
        self._connection: Any = connect(endpoint, lost, listens=True, place=self._place)

    def _place(self, packet: bytes) -> list[memoryview]:
        """The buffer's memory for each part behind the header ``packet``; none if it is no frame's."""
        header = unpack(memoryview(packet))
        if header.kind != Kind.DATA or header.fingerprint not in self._schemas:
            return []
        sizes = self._schemas[header.fingerprint].at(header.num_tokens).sizes
        return [
            memoryview((ctypes.c_char * nbytes).from_address(view.data_ptr()))
            if nbytes
            else memoryview(bytearray())
            for view, nbytes in zip(self.tensors(header).values(), sizes, strict=True)
        ]

    def _learn(self, body: memoryview) -> None:
        super()._learn(body)
        size = msgspec.msgpack.decode(body, type=Announcement).buffer_bytes
        if size > self._size:  # frames that are held keep the old buffers alive
            self._size = size
            depth = self._endpoint.depth
            if self._endpoint.by_host:
                memory = map_memory(-1, size * depth, locked_for=self._endpoint.describe())
            else:
                memory = torch.empty(size * depth, dtype=torch.uint8)
            self._buffers = Buffers(memory, size, self._endpoint.buffer_tokens)


def connect(
    endpoint: LinkEndpoint, lost: Lost, *, listens: bool, place: Place | None = None
) -> Packets:
    """Open this end's connection; the connecting end waits for the other. Raises StallError: it was not
    reached."""
    neighbour = "previous" if listens else "next"
    who = f"{endpoint.describe()}: the {neighbour} stage"
    connection = Connection(
        endpoint.address, endpoint.port, listens=listens, who=who, token=endpoint.token, lost=lost
    )
    deadline = time.monotonic() + MEET_SECONDS
    # wait: 30 s (`MEET_SECONDS`); the next stage
    while not (listens or connection.wait_for_peer(max(0.0, deadline - time.monotonic()))):
        connection.refused = False
        if time.monotonic() >= deadline:
            connection.close()
            raise StallError(
                f"{who} was not reached at {endpoint.address}:{endpoint.port} within "
                f"{MEET_SECONDS:g} s: does a firewall close the port, and is it an address "
                "(VLLM_HOST_IP) that this host can reach?"
            )
    return Packets(connection, place)
