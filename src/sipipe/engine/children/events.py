"""Interface through which the children of a host report to the engine."""

import socket
from typing import Any, Protocol

Poison = tuple[int, str]
"""Handle of a request that no sampler survives, and the error for its client."""


class Events(Protocol):
    """Receiver of what happens to a host's children. It is called by the host's events thread and by
    the threads that replace samplers."""

    def heard(self, name: str, message: Any) -> None:
        """Take a message of the child ``name``."""

    def turn(self) -> float:
        """Do what is due, after all messages and deaths; returns the seconds to sleep at most."""

    def started_again(self, index: int, tokens: socket.socket, poison: Poison | None) -> None:
        """Admit the successor of sampler ``index``, which waits for that and sends on ``tokens``. It
        must not draw for the request ``poison``."""

    def failed(self, error: BaseException) -> None:
        """End the engine, which cannot go on, with ``error``."""
