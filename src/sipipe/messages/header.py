"""The first part of every BIC-I message; needs nothing that takes time to import."""

import enum
import struct
import zlib
from typing import NamedTuple

from sipipe.errors import DamagedError

_FIELDS = struct.Struct("<BxxxIqqq")
_SUM = struct.Struct("<I")


class Kind(enum.IntEnum):
    """What a BIC-I message asks for."""

    SCHEDULE = 1
    """One iteration: samplers read a :class:`Step`, workers the scheduling output."""
    GRAMMAR = 2
    """The structured-output bitmask of an iteration already published; workers skip it."""
    CONTROL = 3
    """A call for the stage workers, in order with the iterations; samplers skip it."""


class Header(NamedTuple):
    """First part of each message. ``number`` is the iteration, or the call of a CONTROL;
    ``logits_row`` where the iteration's rows of BIC-L begin, -1 if nothing samples, and
    ``logits_rows`` how many it has."""

    kind: Kind
    slot: int
    number: int
    logits_row: int = -1
    logits_rows: int = 0


def encode_header(
    kind: Kind, slot: int, number: int, logits_row: int = -1, logits_rows: int = 0
) -> bytes:
    fields = _FIELDS.pack(kind, slot, number, logits_row, logits_rows)
    return fields + _SUM.pack(zlib.crc32(fields))


def decode_header(part: memoryview | bytes) -> Header:
    """Raises DamagedError: a wrong number here would have others' logits read."""
    fields = part[: _FIELDS.size]
    if bytes(part[_FIELDS.size :]) != _SUM.pack(zlib.crc32(fields)):
        raise DamagedError("channel bic-i: the header of a message is damaged")
    kind, *numbers = _FIELDS.unpack(fields)
    return Header(Kind(kind), *numbers)
