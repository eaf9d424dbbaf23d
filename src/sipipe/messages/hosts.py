"""What the main host and a host agent say to each other.

Pickles travel here, so only a peer that has the secret is listened to (:mod:`sipipe.ipc.secret`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sipipe.messages.calls import Request
from sipipe.messages.logits import LogitsShape
from sipipe.messages.step import Snapshot

# ---- both ways --------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """The engine ends."""

    why: str
    """Empty in good order."""


@dataclass(frozen=True)
class Clock:
    """What is your wall clock? And the main host's answer."""

    nanoseconds: int = 0


# ---- from the main host -----------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """This host does not fit."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an agent is to do: the answer to its hello."""

    setup: bytes
    """The main host's ``Setup``, pickled by value."""
    samplers: int
    """Of the engine."""
    run: str
    """Names the engine in traces."""


class Start(Request[None]):
    """Start all processes. Requests are answered by :class:`Done`, in their order."""


class WaitLoaded(Request[None]):
    """Return when every worker has loaded its layers."""


@dataclass(frozen=True)
class MakeLogits(Request[Any]):
    """Make BIC-L; the answer is its endpoint."""

    shape: LogitsShape


class OpenSamplers(Request[dict[str, float]]):
    """Return when all samplers have opened their channels."""


class EndSamplers(Request[None]):
    """Go on without samplers."""


@dataclass(frozen=True)
class Publish:
    """A message of BIC-I."""

    parts: Sequence[Any]
    """Buffers."""


@dataclass(frozen=True)
class Admit:
    """The successor of a sampler begins here in BIC-I's order."""

    sampler: int
    snapshot: Snapshot


@dataclass(frozen=True)
class AskWorkers:
    """Ask the workers what they do."""


# ---- from the agent ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What an agent says of its host."""

    node: int
    address: str
    """Where the host before sends hidden states to."""
    agreed: dict[str, str]
    """Versions and settings that must be the main host's."""
    samplers: int


@dataclass(frozen=True)
class Done:
    """The oldest request that was not answered is done, or raised."""

    result: Any


@dataclass(frozen=True)
class Heard:
    """A child's message."""

    name: str
    message: Any


@dataclass(frozen=True)
class Failed:
    """The engine cannot go on."""

    error: BaseException


@dataclass(frozen=True)
class Tokens:
    """Bytes that a sampler sent on BIC-O."""

    sampler: int
    data: bytes
    """Empty: it is gone."""
    figures: bytes
    """This host's, with the tokens."""


@dataclass(frozen=True)
class Successor:
    """A sampler has a successor, which waits to be admitted."""

    sampler: int
    poison: tuple[int, str] | None
    """Handle of a request that it must not be asked for, and why."""


@dataclass(frozen=True)
class HostFigures:
    """This host's part of the statistics page."""

    data: bytes
