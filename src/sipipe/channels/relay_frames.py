"""What source and replica of a relay say to each other.

    frame: kind (1 byte), sequence (8), parts (4), bytes (8), then 8-byte lengths, then the parts
    replica → source: HELLO and ACKNOWLEDGE, with the sequence that is wanted next
    source → replica: MESSAGE; CLOSED or DIED, with the sequence after the last

Sizes and bytes only; nothing is unpickled, and every size is checked before it is believed.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from sipipe.channels.handshake import receive_exactly
from sipipe.channels.logits_shape import LogitsShape
from sipipe.channels.sockets import SocketEndpoint

__all__ = ["Frame", "RelayEndpoint", "receive_short", "send_all", "short"]

HEAD = struct.Struct("<BQIQ")
HELLO, ACKNOWLEDGE, MESSAGE, CLOSED, DIED = range(1, 6)
MAX_PARTS = 1 << 16
LOGITS_HEAD = struct.Struct("<qq")  # iteration, batch: the first part of a logits message


class RelayEndpoint(SocketEndpoint, frozen=True):
    """Where a source listens, and what it follows. Holds the secret: keep it off command lines."""

    slots: int
    """N of the original."""

    slot_bytes: int
    """Payload bytes of its slots."""

    logits: LogitsShape | None = None
    """The array of each slot of a logits channel; None: a dispatch channel."""


class Frame(NamedTuple):
    """A frame of the source, which is kept until it is acknowledged."""

    kind: int
    sequence: int
    data: list[bytes]

    def encode(self) -> list[memoryview]:
        lengths = struct.pack(f"<{len(self.data)}Q", *map(len, self.data))
        head = HEAD.pack(self.kind, self.sequence, len(self.data), sum(map(len, self.data)))
        return [memoryview(part) for part in (head + lengths, *self.data) if part]


def short(kind: int, sequence: int) -> bytes:
    """A frame without data."""
    return HEAD.pack(kind, sequence, 0, 0)


def send_all(sock: socket.socket, views: list[memoryview]) -> None:
    while views:
        sent = sock.sendmsg(views[:64])
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def receive_short(sock: socket.socket) -> tuple[int, int]:
    """A frame without data: its kind and sequence."""
    kind, sequence, count, size = HEAD.unpack(receive_exactly(sock, HEAD.size))
    if kind not in (HELLO, ACKNOWLEDGE) or count or size:
        raise EOFError
    return kind, sequence
