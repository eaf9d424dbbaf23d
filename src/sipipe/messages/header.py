"""The first part of every BIC-I message; needs nothing that takes time to import."""

import enum
import struct
from typing import NamedTuple

_FIELDS = struct.Struct("<BxxxIqqq")


class Kind(enum.IntEnum):
    """Kinds of BIC-I messages."""

    SCHEDULE = 1
    """One iteration: samplers read a :class:`Step`, workers the scheduling output."""
    GRAMMAR = 2
    """The structured-output bitmask of an iteration already published, for whoever draws it."""
    CONTROL = 3
    """A call for the stage workers, in order with the iterations; samplers skip it."""
    PLAN = 4
    """The iteration that is published next, without its tokens, which are still to come: workers
    prepare and launch it up to them, samplers skip it. Its SCHEDULE brings workers nothing else."""


class Header(NamedTuple):
    """First part of each message."""

    kind: Kind
    slot: int
    number: int
    """The iteration, or the call of a CONTROL message."""
    logits_row: int = -1
    """First row of the iteration in BIC-L; -1 where nothing samples."""
    logits_rows: int = 0
    """Rows of the iteration in BIC-L."""


def encode_header(
    kind: Kind, slot: int, number: int, logits_row: int = -1, logits_rows: int = 0
) -> bytes:
    """Encode a :class:`Header` as bytes of a fixed length."""
    return _FIELDS.pack(kind, slot, number, logits_row, logits_rows)


def decode_header(part: memoryview | bytes) -> Header:
    """Decode a header. Raises struct.error where it is cut off."""
    kind, slot, number, logits_row, logits_rows = _FIELDS.unpack(part)
    return Header(
        kind=Kind(kind),
        slot=slot,
        number=number,
        logits_row=logits_row,
        logits_rows=logits_rows,
    )
