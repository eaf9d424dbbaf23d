"""The fixed-size records that two ends of a link exchange.

Every message begins with one record. A ``DATA`` record announces one microbatch; it is the only
message of a steady iteration. ``STRUCTURE`` precedes the first microbatch of a new structure and
is followed by its description. ``RELEASE`` flows backwards and gives a slot back. ``HELLO`` opens
a connection and ``BYE`` ends it in good order: an end of file without it is a dead peer.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import NamedTuple

__all__ = ["KIND_AT", "LAYOUT", "RECORD_BYTES", "Kind", "Record", "RecordCodec", "RecordError"]

LAYOUT = "IBBHIQQQQI"
"""A record as :mod:`struct` sees it, little-endian and without gaps."""
_LAYOUT = struct.Struct(f"<{LAYOUT}")
_MAGIC = 0x54535053  # "SPST"
RECORD_BYTES = _LAYOUT.size
"""Bytes of one record."""
KIND_AT = struct.calcsize("<IB")
"""Where in a record its kind is."""


class Kind(enum.IntEnum):
    """What a record says."""

    HELLO = 1
    STRUCTURE = 2
    DATA = 3
    RELEASE = 4
    BYE = 5


class Record(NamedTuple):
    """One record; fields that a kind does not need are 0."""

    kind: int
    slot: int = 0
    """Slot index of the data, or the slot given back."""
    structure: int = 0
    """Number of the structure, counted by the sender from 1."""
    sequence: int = 0
    """Counts the data records of a link from 0."""
    iteration: int = 0
    num_tokens: int = 0
    value: int = 0
    """DATA: the structure's fingerprint. STRUCTURE: bytes of the description that follows."""


class RecordError(Exception):
    """Bytes that are no record of this link."""


class RecordCodec:
    """Packs and checks records of one link.

    The check word is a CRC-32 of the record that starts from the link's secret, so that a record
    of another link, another version, or a frame boundary that slipped is never taken for data.
    """

    def __init__(self, secret: bytes) -> None:
        self._seed = zlib.crc32(secret)

    def pack(self, record: Record) -> bytes:
        """The record as bytes; its last four are the check word."""
        kind, slot, structure, sequence, iteration, num_tokens, value = record
        body = _LAYOUT.pack(
            _MAGIC, 1, kind, slot, structure, sequence, iteration, num_tokens, value, 0
        )[:-4]
        return body + zlib.crc32(body, self._seed).to_bytes(4, "little")

    def fields(
        self, slot: int, structure: int, sequence: int, iteration: int, tokens: int, value: int
    ) -> tuple[int, ...]:
        """A DATA record as the numbers of :data:`LAYOUT`, the check word's seed in its place."""
        return (
            _MAGIC, 1, 3, slot, structure, sequence, iteration, tokens, value, self._seed
        )  # fmt: skip

    def unpack(self, data: bytes | bytearray | memoryview) -> Record:
        """The record in the first :data:`RECORD_BYTES` bytes.

        Raises:
            RecordError: wrong length, wrong magic number or wrong check word.
        """
        if len(data) < RECORD_BYTES:
            raise RecordError(f"{len(data)} bytes are no record")
        magic, version, kind, slot, structure, sequence, iteration, tokens, value, check = (
            _LAYOUT.unpack_from(data)
        )
        if magic != _MAGIC or version != 1:
            raise RecordError("the bytes do not begin with a record")
        if zlib.crc32(data[: RECORD_BYTES - 4], self._seed) != check:
            raise RecordError("the check word of a record is wrong")
        return Record(kind, slot, structure, sequence, iteration, tokens, value)
