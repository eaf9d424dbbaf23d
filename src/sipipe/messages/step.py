"""What executor, stage workers and samplers say to each other on BIC-I and BIC-O.

A BIC-I message has a fixed header, the samplers' section (msgpack of the structs below) and, for
the stage workers, a pickle with its out-of-band buffers. A sampler decodes the first two only, so
that it needs neither vLLM nor torch. Token ids and row numbers travel as little-endian int32 bytes.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sipipe.messages.params import SequenceParams


class Added(msgspec.Struct, array_like=True, frozen=True):
    """A request is added to the state of its sampler."""

    handle: int
    sampler: int
    params: SequenceParams
    prompt: bytes
    outputs: bytes = b""
    error: str = ""
    """Why no sampler can draw for it: each of its rows is this error."""


class Step(msgspec.Struct, array_like=True, frozen=True):
    """The samplers' view of one iteration. State changes come first, then the rows to draw.

    ``appended``: handles, and ``tokens``: the one new output token of each, which the scheduler
    has accepted. ``rows``: handle of each row of the logits, ``owners``: its sampler.
    ``grammar``: a GRAMMAR message for this iteration follows.

    ``follows``: for each row the draft token that it stands behind, -1 for the first row of a
    request; empty: every row is one. A row is drawn if the row before it drew that token. ``worth``:
    how likely a draft of the next tokens has to be to be proposed.
    """

    iteration: int
    removed: bytes = b""
    added: list[Added] = msgspec.field(default_factory=list)
    appended: bytes = b""
    tokens: bytes = b""
    rows: bytes = b""
    owners: bytes = b""
    grammar: bool = False
    follows: bytes = b""
    worth: float = 1.0


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """Structured-output bitmask: one row of ``words`` int32 per handle in ``handles``."""

    iteration: int
    handles: bytes
    words: int
    bitmask: bytes


class Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """All that a restarted sampler needs: its sequences, and the iterations still to be drawn."""

    added: list[Added]
    steps: list[Step]
    grammars: list[Grammar]


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of one drawn token: the token itself first, then the top ones."""

    row: int
    rank: int
    token_ids: bytes
    values: bytes


class Sampled(msgspec.Struct, array_like=True, frozen=True):
    """A frame of one sampler's answer on BIC-O: rows of the logits, and the tokens drawn for them.
    ``errors``: (row, reason) for rows that have no distribution, such as all NaN; their token is
    -1. ``drafts``: (row, tokens) that may come behind the token of that row, a request's last. Rows
    behind a draft that was not drawn are left out."""

    iteration: int
    rows: bytes
    tokens: bytes
    logprobs: list[Logprobs] = msgspec.field(default_factory=list)
    errors: list[tuple[int, str]] = msgspec.field(default_factory=list)
    drafts: list[tuple[int, bytes]] = msgspec.field(default_factory=list)


decode_step = msgspec.msgpack.Decoder(Step).decode
decode_grammar = msgspec.msgpack.Decoder(Grammar).decode
decode_sampled = msgspec.msgpack.Decoder(Sampled).decode
encode = msgspec.msgpack.Encoder().encode


def int32_bytes(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Little-endian int32 bytes of a sequence of integers."""
    if type(values) is list:  # in half the time
        return array("i", values).tobytes()
    return np.asarray(values, dtype="<i4").tobytes()


def int32_view(data: bytes) -> npt.NDArray[np.int32]:
    """The array behind :func:`int32_bytes`, read-only, without a copy."""
    return np.frombuffer(data, dtype="<i4")
