"""The small interface behind which hidden states travel.

A transport moves frames: it does not know tokens, checks or credit, which :mod:`.sender` and
:mod:`.receiver` do once for all transports. Its two ends are made in two processes, in any order;
neither constructor waits for the other side.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from sipipe.transfer.arena import Arena
from sipipe.transfer.records import Record
from sipipe.transfer.structure import Structure

if TYPE_CHECKING:
    import torch

__all__ = ["Arrival", "ReceivingTransport", "SendingTransport"]


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A frame that is complete in its slot."""

    record: Record
    structure: Structure
    arena: Arena


class SendingTransport(Protocol):
    """The sender's end. ``connect``, ``announce``, ``transmit`` and ``flush`` are called by one thread
    at a time; ``collect_releases`` by another, at the same time; ``interrupt`` by any."""

    inline_bytes: int
    """Up to this many bytes :meth:`transmit` is quick enough for the caller's own thread."""

    def connect(self, timeout: float) -> None:
        """Reach the receiver, which may start later; at most ``timeout`` seconds."""

    def announce(self, number: int, structure: Structure) -> None:
        """Describe structure ``number`` to the receiver and make room for it."""

    def transmit(
        self, record: Record, structure: Structure, parts: list[torch.Tensor], *, wait: bool
    ) -> bool:
        """Send one frame; on True ``parts`` may be overwritten.

        ``record.slot`` is free: the sender has seen its release. False, only without ``wait``:
        a part did not leave, and :meth:`flush` comes next.
        """

    def flush(self) -> None:
        """Send, however long it takes, what the last :meth:`transmit` left."""

    def collect_releases(self, timeout: float) -> list[int]:
        """Slots given back since the last call; waits up to ``timeout`` seconds for the first."""

    def interrupt(self) -> None:
        """End the connection, in good order if it can; calls that wait on it raise."""

    def close(self) -> None:
        """Give everything back; no other call is running or follows."""


class ReceivingTransport(Protocol):
    """The receiver's end. One thread at a time calls ``receive``; any calls the rest."""

    def receive(self, timeout: float) -> Arrival | None:
        """The next frame, or None when ``timeout`` seconds passed."""

    def release(self, slot: int) -> None:
        """Give a slot back to the sender."""

    def interrupt(self) -> None:
        """End the connection, in good order if it can; a ``receive`` that waits raises."""

    def close(self) -> None:
        """Give everything back; at most ``release`` is running or follows, and does nothing."""

    @property
    def metadata_messages(self) -> int:
        """Descriptions of structures that came in."""
