"""The fixed header that every packet of a link begins with.

``DATA`` announces one frame and is the only packet of a steady iteration. ``SCHEMA`` precedes the
first frame of a new tensor schema and has its description as body. ``RELEASE`` flows backwards
and gives a frame's buffer back. ``HELLO`` comes first, from both sides. ``BYE`` ends the link in
good order: an end of the connection without it is a dead peer.

Rejected: a checksum (a socket of the kernel's, or an authenticated connection, damages nothing).
That both ends mean the same iteration, tokens and schema is what :mod:`.receiver` checks.
"""

import enum
import struct
from typing import NamedTuple

_FIELDS = struct.Struct("<BQQIQ")
HEADER_BYTES = _FIELDS.size


class Kind(enum.IntEnum):
    """What a packet says."""

    SCHEMA = 1
    DATA = 2
    RELEASE = 3
    HELLO = 4
    BYE = 5


class Header(NamedTuple):
    """One header; fields that a kind does not need are 0."""

    kind: int
    frame: int = 0
    """Counts the frames of a link from 0. Frame f lies in buffer f modulo ``depth``.
    HELLO: the process that speaks."""
    iteration: int = 0
    num_tokens: int = 0
    fingerprint: int = 0


def pack(header: Header, body: bytes = b"") -> bytes:
    """A packet."""
    return _FIELDS.pack(*header) + body


def unpack(packet: memoryview) -> Header:
    """The header of a whole packet; the body is ``packet[HEADER_BYTES:]``."""
    return Header(*_FIELDS.unpack_from(packet))
