"""Messages between the main host and a host agent.

Pickles travel here, so only a peer that has the secret is listened to (:mod:`sipipe.ipc.secret`).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from sipipe.messages.calls import Request
from sipipe.messages.logits import LogitsShape
from sipipe.messages.step import Snapshot

# ---- both ways


class End(msgspec.Struct, frozen=True):
    """The engine ends."""

    why: str
    """Reason of the end; empty where the engine was told to end."""


class Clock(msgspec.Struct, frozen=True):
    """A question for the peer's wall clock, and the main host's answer."""

    nanoseconds: int = 0
    """Time since the epoch; 0 in a question."""


# ---- from the main host to an agent


class Refused(msgspec.Struct, frozen=True):
    """The agent's host does not fit into the engine, and ends."""

    why: str
    """The line that its user reads."""


class Plan(msgspec.Struct, frozen=True):
    """The agent's part of the engine: the answer to its :class:`Hello`."""

    setup: bytes
    """The main host's ``Setup``, pickled by value."""
    samplers: int
    """Samplers of the whole engine."""
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
    """Bytes-like parts, as the ring takes them."""


class Admit(msgspec.Struct, frozen=True):
    """The successor of a sampler begins here in BIC-I's order."""

    sampler: int
    snapshot: Snapshot


class Draft(msgspec.Struct, frozen=True):
    """A request for drafts, for the workers of the last stage."""

    message: bytes


class AskWorkers(msgspec.Struct, frozen=True):
    """Ask the workers what they do."""


# ---- from an agent to the main host


class Hello(msgspec.Struct, frozen=True):
    """Introduction of an agent: its host and the settings that must agree."""

    node: int
    address: str
    """Address to which the host of the stages before sends hidden states."""
    agreed: dict[str, str]
    """Versions and settings, by name, that must equal the main host's."""
    samplers: int
    """Samplers that this host will start."""


class Done(msgspec.Struct, frozen=True):
    """The oldest request without an answer is done, or has raised."""

    result: Any
    """Its answer, or the exception."""


class Heard(msgspec.Struct, frozen=True):
    """A child process of the agent's host has sent a message on its control pipe."""

    name: str
    message: Any


class Failed(msgspec.Struct, frozen=True):
    """The engine cannot go on."""

    error: BaseException


class Tokens(msgspec.Struct, frozen=True):
    """Bytes that a sampler sent on BIC-O."""

    sampler: int
    data: bytes
    """A piece of the stream; empty: the sampler is gone."""
    figures: bytes
    """The host's part of the page of live figures; empty: it could not be read."""


class Successor(msgspec.Struct, frozen=True):
    """A sampler has a successor, which waits to be admitted."""

    sampler: int
    poison: tuple[int, str] | None
    """Handle of a request that it must not be asked for, and why."""


class HostFigures(msgspec.Struct, frozen=True):
    """This host's part of the statistics page."""

    data: bytes
