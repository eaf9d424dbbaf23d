"""Messages between executor, stage workers and samplers on BIC-I and BIC-O.

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
    """Number of the request in this engine, never used again."""
    sampler: int
    params: SequenceParams
    prompt: bytes
    """Token ids, int32."""
    outputs: bytes = b""
    """Token ids that it has generated before it joins, int32."""
    error: str = ""
    """Reason why no sampler can draw for it, which each of its rows then returns; else empty."""


class Step(msgspec.Struct, array_like=True, frozen=True):
    """The samplers' view of one iteration. State changes come first, then the rows to draw.

    Fields of bytes are little-endian int32 arrays (:func:`int32_view`).
    """

    iteration: int
    removed: bytes = b""
    """Handles of requests that leave."""
    added: list[Added] = msgspec.field(default_factory=list)
    """Requests that join."""
    appended: bytes = b""
    """Handles of requests that have a new output token, which the scheduler has accepted."""
    tokens: bytes = b""
    """New token of each of ``appended``."""
    rows: bytes = b""
    """Handle of each row of the logits."""
    owners: bytes = b""
    """Sampler that draws it, one for each of ``rows``."""
    grammar: bool = False
    """True where a GRAMMAR message for this iteration follows."""
    follows: bytes = b""
    """Draft token behind which each row stands, -1 for the first row of a request. A row is drawn if
    the row before it drew that token. Empty: every row is the first of its request."""
    worth: float = 1.0
    """Probability that a draft of the next tokens must have to be proposed."""


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """The structured-output bitmask of an iteration."""

    iteration: int
    handles: bytes
    """Handles of its requests, int32."""
    words: int
    """Words of 32 bits in a row."""
    bitmask: bytes
    """One row of ``words`` int32 for each handle; bit t of a row allows token t."""


class Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """State that a restarted sampler needs."""

    added: list[Added]
    """Its sequences."""
    steps: list[Step]
    """Iterations that it has not drawn yet, in order."""
    grammars: list[Grammar]
    """Bitmasks of those iterations."""


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities at one drawn token."""

    row: int
    rank: int
    """Rank of the drawn token: 1 is the most likely."""
    token_ids: bytes
    """The drawn token first, then the most likely ones, int32."""
    values: bytes
    """One float32 for each of ``token_ids``."""


class Sampled(msgspec.Struct, array_like=True, frozen=True):
    """A frame of one sampler's answer on BIC-O.

    Rows behind a draft that was not drawn are left out.
    """

    iteration: int
    rows: bytes
    """Rows of the logits that were drawn, int32."""
    tokens: bytes
    """Token of each of ``rows``, int32; -1 where the row has an error."""
    logprobs: list[Logprobs] = msgspec.field(default_factory=list)
    errors: list[tuple[int, str]] = msgspec.field(default_factory=list)
    """Row and reason, for rows that have no distribution, such as all NaN."""
    drafts: list[tuple[int, bytes]] = msgspec.field(default_factory=list)
    """First row of a request, and tokens (int32) that may come behind the last one drawn for it."""


decode_step = msgspec.msgpack.Decoder(Step).decode
decode_grammar = msgspec.msgpack.Decoder(Grammar).decode
decode_sampled = msgspec.msgpack.Decoder(Sampled).decode
encode = msgspec.msgpack.Encoder().encode


def int32_bytes(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Encode integers as little-endian int32 bytes."""
    if type(values) is list:  # the array module takes half of NumPy's time
        return array("i", values).tobytes()
    return np.asarray(values, dtype="<i4").tobytes()


def int32_view(data: bytes) -> npt.NDArray[np.int32]:
    """View the bytes of :func:`int32_bytes` as an array, read-only, without a copy."""
    return np.frombuffer(data, dtype="<i4")
