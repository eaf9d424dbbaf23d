"""What the engine asks of its stages, in order with iterations: CONTROL messages of BIC-I.

What vLLM itself calls (``collective_rpc``) travels likewise, as the name of a method or a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sipipe.messages.boots import HeadOffer, StageDescription
from sipipe.messages.link import LinkEndpoint
from sipipe.messages.measured import Measured

T = TypeVar("T")


class Request(Generic[T]):
    """A question; ``T`` is the answer."""

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, kw_only=True)
class Describe(Request[StageDescription]):
    """What the engine needs to make a rank's channels; the KV cache is set up by now."""


@dataclass(frozen=True, kw_only=True)
class TimeParts(Request[Measured]):
    """How long the parts of a microbatch of ``sequences`` take, all stages at once."""

    sequences: int


@dataclass(frozen=True, kw_only=True)
class TakeProjection(Request[None]):
    """Take the rank's rows of the output projection from the last stage, which offers them."""

    offers: Sequence[HeadOffer]
    bounds: Sequence[int]
    """First column of each writer of logits, and V at the end."""


@dataclass(frozen=True, kw_only=True)
class OpenChannels(Request[None]):
    """Open the rank's ends of the links and, where it writes logits, of BIC-L."""

    links: Sequence[LinkEndpoint]
    """By rank of the sender."""
    finals: Sequence[LinkEndpoint] = ()
    """From the last stage to each other, where the output projection is shared out; by rank of the
    receiver."""
    logits: Any = None
    """Endpoint of BIC-L; None on vLLM's own path."""


@dataclass(frozen=True, kw_only=True)
class Measure(Request[Measured]):
    """How long a microbatch of ``sequences`` takes, drawn on the device and by CPU samplers."""

    sequences: int


@dataclass(frozen=True, kw_only=True)
class Settle(Request[None]):
    """Who draws, as ``cpu_sampling`` says it, now that it was measured; no iteration has run."""

    draws: str
