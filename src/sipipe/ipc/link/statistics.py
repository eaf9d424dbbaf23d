"""What the ends of a link have done so far."""

from __future__ import annotations

import dataclasses

__all__ = ["ReceiverStatistics", "SenderStatistics"]


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiverStatistics:
    """What a receiver has done so far."""

    data_messages: int
    """Microbatches taken."""
    metadata_messages: int
    """Descriptions of structures that came in."""
    bytes_received: int
    """Bytes of hidden states taken."""
    waited_seconds: float
    """Seconds that ``take`` waited for data."""
    posted: int
    """Iterations posted and not yet taken."""
    held: int
    """Iterations taken and not yet released."""


@dataclasses.dataclass(frozen=True, slots=True)
class SenderStatistics:
    """What a sender has done so far."""

    data_messages: int
    """Microbatches sent, one message each."""
    metadata_messages: int
    """Descriptions sent: one per structure, the first iteration's included."""
    bytes_sent: int
    """Bytes of hidden states."""
    inline_messages: int
    """Microbatches small enough to be sent by the caller's own thread."""
    prepared_messages: int
    """Microbatches that ``post`` had prepared."""
    waits: int
    """Calls of ``send`` that found the receiver ``depth`` iterations behind."""
    waited_seconds: float
    """Seconds spent in these."""
    in_flight: int
    """Iterations sent and not yet released."""
