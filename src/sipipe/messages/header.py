"""The first part of every BIC-I message; needs nothing that takes time to import."""

import enum
import struct
from typing import NamedTuple

_FIELDS = struct.Struct("<BxxxIqqq")


class Kind(enum.IntEnum):
    """What a BIC-I message asks for."""

    SCHEDULE = 1
    """One iteration: samplers read a :class:`Step`, workers the scheduling output."""
    GRAMMAR = 2
    """The structured-output bitmask of an iteration already published: for who draws it."""
    CONTROL = 3
    """A call for the stage workers, in order with the iterations; samplers skip it."""
    PLAN = 4
    """The iteration that is published next, without its tokens, which are still to come: workers
    prepare and launch it up to them, samplers skip it. Its SCHEDULE brings workers nothing else."""


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
    return _FIELDS.pack(kind, slot, number, logits_row, logits_rows)


def decode_header(part: memoryview | bytes) -> Header:
    """The header; struct.error where it is cut off."""
    kind, *numbers = _FIELDS.unpack(part)
    return Header(Kind(kind), *numbers)
