"""What becomes of children, as whoever drives the engine hears it."""

import socket
from typing import Any, Protocol

Poison = tuple[int, str]
"""Handle of a request that no sampler survives, and what the client is told."""


class Events(Protocol):
    """What a host tells the engine; called by its events thread and those that replace samplers."""

    def heard(self, name: str, message: Any) -> None:
        """A child said something."""

    def turn(self) -> float:
        """After all that was heard; returns the seconds to sleep at most."""

    def started_again(self, index: int, tokens: socket.socket, poison: Poison | None) -> None:
        """Sampler ``index`` has a successor, which sends on ``tokens`` and waits to be admitted; it
        must not be asked for ``poison``."""

    def failed(self, error: BaseException) -> None:
        """The engine cannot go on."""
