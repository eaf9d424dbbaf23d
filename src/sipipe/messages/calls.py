"""What the engine asks of its stages, in order with iterations: CONTROL messages of BIC-I.

What vLLM itself calls (``collective_rpc``) travels likewise, as the name of a method or a function.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from sipipe.messages.link import LinkEndpoint
from sipipe.messages.measured import Measured
from sipipe.messages.start_records import ProjectionOffer, StageDescription

T = TypeVar("T")


class Request(msgspec.Struct, Generic[T], frozen=True):
    """A question; ``T`` is the answer."""

    def __str__(self) -> str:
        return type(self).__name__


class Describe(Request[StageDescription], frozen=True):
    """What the engine needs to make a rank's channels; the KV cache is set up by now."""


class TimeParts(Request[Measured], frozen=True):
    """How long the parts of a microbatch of ``sequences`` take, all stages at once."""

    sequences: int


class TakeProjection(Request[None], frozen=True):
    """Take the rank's rows of the output projection from the last stage, which offers them."""

    offers: Sequence[ProjectionOffer]
    bounds: Sequence[int]
    """First column of each writer of logits, and V at the end."""


class OpenChannels(Request[None], frozen=True):
    """Open the rank's ends of the links and, where it writes logits, of BIC-L."""

    links: Sequence[LinkEndpoint]
    """By rank of the sender."""
    finals: Sequence[LinkEndpoint] = ()
    """From the last stage to each other, where the projection is shared out; by receiver's rank."""
    logits: Any = None
    """Endpoint of BIC-L; None where no sampler draws."""


class Measure(Request[Measured], frozen=True):
    """How long a microbatch of ``sequences`` takes, drawn on the device and by CPU samplers."""

    sequences: int


class Settle(Request[None], frozen=True):
    """Who draws, as ``cpu_sampling`` says it, now that it was measured; no iteration has run."""

    draws: str
