"""What a channel's side has done so far."""

from __future__ import annotations

import dataclasses

__all__ = ["ChannelStatistics", "Waits"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatistics:
    """A snapshot of one side of one channel; counts start at 0 when the side is opened."""

    messages: int = 0
    """Messages published, sent, received or collected."""

    bytes: int = 0
    """Payload bytes of those messages."""

    waits: int = 0
    """Calls that had to sleep: a producer for a late reader, a reader for a message."""

    wait_seconds: float = 0.0
    """Seconds slept in those waits."""

    longest_wait: float = 0.0
    """Seconds of the longest of them."""

    depth: int = 0
    """Producer: messages that the slowest reader has not taken. Reader: messages it may take
    now. Gather: iterations expected and not complete."""

    dropped: int = 0
    """Gather: sub-slots dropped because they were duplicates or stale. Reader: partial messages
    dropped because the producer gave them up."""


@dataclasses.dataclass(slots=True)
class Waits:
    """How often one side of a channel slept, and for how long; counted by the thread that sleeps."""

    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a wait that lasted ``seconds``."""
        self.count += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
