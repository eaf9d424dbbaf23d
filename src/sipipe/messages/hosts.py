"""What the main host and a host agent say to each other.

Pickles travel here, so only a peer that has the secret is listened to (:mod:`sipipe.ipc.secret`).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from sipipe.messages.calls import Request
from sipipe.messages.logits import LogitsShape
from sipipe.messages.step import Snapshot

# both ways


class End(msgspec.Struct, frozen=True):
    """The engine ends."""

    why: str
    """Empty in good order."""


class Clock(msgspec.Struct, frozen=True):
    """What is your wall clock? And the main host's answer."""

    nanoseconds: int = 0


# from the main host


class Refused(msgspec.Struct, frozen=True):
    """This host does not fit."""

    why: str


class Plan(msgspec.Struct, frozen=True):
    """What an agent is to do: the answer to its hello."""

    setup: bytes
    """The main host's ``Setup``, pickled by value."""
    samplers: int
    """Of the engine."""
    run: str
    """Names the engine in traces."""


class Start(Request[None], frozen=True):
    """Start all processes. Requests are answered by :class:`Done`, in their order."""


class WaitLoaded(Request[None], frozen=True):
    """Return when every worker has loaded its layers."""


class MakeLogits(Request[Any], frozen=True):
    """Make BIC-L; the answer is its endpoint."""

    shape: LogitsShape


class OpenSamplers(Request[dict[str, float]], frozen=True):
    """Return when all samplers have opened their channels."""


class EndSamplers(Request[None], frozen=True):
    """Go on without samplers."""


class Publish(msgspec.Struct, frozen=True):
    """A message of BIC-I."""

    parts: Sequence[Any]


class Admit(msgspec.Struct, frozen=True):
    """The successor of a sampler begins here in BIC-I's order."""

    sampler: int
    snapshot: Snapshot


class AskWorkers(msgspec.Struct, frozen=True):
    """Ask the workers what they do."""


# from the agent


class Hello(msgspec.Struct, frozen=True):
    """What an agent says of its host."""

    node: int
    address: str
    """Where the host before sends hidden states to."""
    agreed: dict[str, str]
    """Versions and settings that must be the main host's."""
    samplers: int


class Done(msgspec.Struct, frozen=True):
    """The oldest request that was not answered is done, or raised."""

    result: Any


class Heard(msgspec.Struct, frozen=True):
    """A child's message."""

    name: str
    message: Any


class Failed(msgspec.Struct, frozen=True):
    """The engine cannot go on."""

    error: BaseException


class Tokens(msgspec.Struct, frozen=True):
    """Bytes that a sampler sent on BIC-O."""

    sampler: int
    data: bytes
    """Empty: it is gone."""
    figures: bytes


class Successor(msgspec.Struct, frozen=True):
    """A sampler has a successor, which waits to be admitted."""

    sampler: int
    poison: tuple[int, str] | None
    """Handle of a request that it must not be asked for, and why."""


class HostFigures(msgspec.Struct, frozen=True):
    """This host's part of the statistics page."""

    data: bytes
