"""What the main host and a host agent say to each other, behind the kind that each message begins with.

Pickles travel here, so only a peer that has the secret is listened to (:mod:`sipipe.ipc.secret`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Both ways.
END = b"e"
"""The engine ends; why, as text: empty in good order."""
CLOCK = b"k"
"""What is your wall clock? And the main host's answer, in nanoseconds."""
# From the main host.
REFUSED = b"x"
"""This host does not fit; why, as text."""
PLAN = b"p"
"""A pickled :class:`Plan`, the answer to the hello."""
CALL = b"c"
"""The pickled name of a method of ``Host`` to call; answered by DONE."""
PUBLISH = b"i"
"""The parts of a message of BIC-I."""
ADMIT = b"a"
"""A sampler's index and the pickled snapshot that its successor begins with, in BIC-I's order."""
ASK = b"s"
"""Ask the workers what they do."""
# From the agent.
HELLO = b"h"
"""A pickled :class:`Hello`."""
DONE = b"d"
"""The pickled result of the oldest call that is not answered, or the exception that it raised."""
HEARD = b"m"
"""A child's name and its pickled message."""
FAILED = b"f"
"""A pickled exception: the engine cannot go on."""
TOKENS = b"t"
"""A sampler's index, bytes of BIC-O (empty: it is gone), and this host's figures."""
SUCCESSOR = b"n"
"""A sampler's index: it has a successor, which waits to be admitted."""
FIGURES = b"l"
"""This host's part of the statistics page."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What an agent says of its host."""

    node: int
    address: str
    """Where the host before sends hidden states to."""
    agreed: dict[str, str]
    """Versions and settings that must be the main host's."""
    samplers: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an agent is to do."""

    setup: Any
    """The main host's ``Setup``."""
    run: str
    """Names the engine in traces."""
