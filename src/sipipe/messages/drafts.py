"""Drafts of a head on the last stage: the engine's requests and the stage's answers.

A request travels on the control pipe of each of the last stage's workers, not on BIC-I: there it would
stand behind all iterations that earlier stages still compute. :data:`URGENT` marks it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

URGENT = b"urgent "
"""Beginning of a message to a running worker that its thread on the pipe hands on at once."""

LEFT_OUT = -1
"""Tokens drawn of a request that is not there any more, or has failed: its blocks are not written."""


class DraftRequest(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The tokens of one iteration, for the head to propose drafts behind them.

    Fields of bytes are little-endian int32 arrays, one number for each request that got a token in the
    iteration, in the order of its scheduling output.
    """

    number: int
    """Place among the engine's requests for drafts, from 1."""
    iteration: int
    steps: int
    """Drafts to make of each request, 1 or more."""
    drawn: bytes
    """Tokens drawn of each request, or :data:`LEFT_OUT`."""
    last: bytes
    """The last of these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """The last stage has run a :class:`DraftRequest`."""

    iteration: int
    steps: int
    """Drafts of each request."""
    drafts: bytes
    """Drafts as int32, ``steps`` of each request in the order of the request; empty where it failed."""
    seconds: float = 0.0
    """Seconds that the head took for them; 0 where they are not known."""


encode_request = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(DraftRequest).decode
