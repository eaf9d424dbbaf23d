"""Questions of the engine to its stages, in order with iterations: CONTROL messages of BIC-I.

Calls that vLLM itself makes (``collective_rpc``) travel likewise, as the name of a method or a
function.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from sipipe.messages.link import LinkTrial, Pair, TrialReport
from sipipe.messages.measured import Measured
from sipipe.messages.start_records import ProjectionOffer, StageDescription

T = TypeVar("T")


class Request(msgspec.Struct, Generic[T], frozen=True):
    """A question; ``T`` is the answer."""

    def __str__(self) -> str:
        return type(self).__name__


class Describe(Request[StageDescription], frozen=True):
    """Say what the engine needs to make a rank's channels. The KV cache is set up by now."""


class TimeParts(Request[Measured], frozen=True):
    """Time the parts of a microbatch of ``sequences``, on all stages at once."""

    sequences: int


class TakeProjection(Request[None], frozen=True):
    """Take the rank's rows of the output projection from the last stage, which offers them."""

    offers: Sequence[ProjectionOffer]
    bounds: Sequence[int]
    """First column of each writer of logits, and V at the end."""


class OpenLinks(Request[list[TrialReport]], frozen=True):
    """Open and try the rank's ends of some links; the answer has a report of each of its ends. Ends
    of the same links that failed before are closed first."""

    trials: Sequence[LinkTrial]
    hung: frozenset[Pair] = frozenset()
    """Links whose earlier ends are left as they are: closing them might not come back."""


class OpenChannels(Request[None], frozen=True):
    """Begin to use the rank's ends of the links, which have been opened, and, where it writes logits, open
    its end of BIC-L."""

    logits: Any = None
    """Endpoint of BIC-L; None where no sampler draws."""


class Measure(Request[Measured], frozen=True):
    """Time a microbatch of ``sequences``, drawn on the device and by CPU samplers."""

    sequences: int


class ChooseDrawer(Request[None], frozen=True):
    """Have the tokens drawn as was measured to be quicker. No iteration has run yet."""

    draws: str
    """``"on"``, ``"off"`` or ``"per_row"``, as the setting ``cpu_sampling`` says it."""
