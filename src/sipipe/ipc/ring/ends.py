"""What the ends of the channels have in common, whatever travels on them."""

from __future__ import annotations

from typing import Self

from sipipe.ipc.memory import Endpoint, SharedMemory
from sipipe.ipc.ring.layout import Layout
from sipipe.ipc.ring.reader import RingReader
from sipipe.ipc.statistics import ChannelStatistics

__all__ = ["End", "ReaderEnd"]


class End:
    """Something that is closed; a context manager that does it."""

    def close(self) -> None:
        """Leave in good order. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReaderEnd(End):
    """One named reader of a ring. Not for two threads at once, but for ``abandon``."""

    def __init__(self, ring: RingReader) -> None:
        """Use :meth:`open`."""
        self._ring = ring
        self._messages = 0
        self._bytes = 0
        self._dropped = 0

    @classmethod
    def open(cls, endpoint: Endpoint, name: str) -> Self:
        """Attach as the declared reader ``name``.

        Raises:
            ChannelPeerDied: the producer is gone. ChannelError: ``name`` is not declared, or
                somebody else has attached as it.
        """
        return cls(RingReader(SharedMemory.open(endpoint), name))

    @property
    def layout(self) -> Layout:
        """The ring's sizes."""
        return self._ring.layout

    def statistics(self) -> ChannelStatistics:
        """Messages, bytes, waits for messages, and messages that are there now."""
        return self._ring.statistics(self._messages, self._bytes, self._dropped)

    def close(self) -> None:
        """Leave; the writers no longer wait for this reader. Idempotent."""
        self._ring.close()

    def abandon(self) -> None:
        """Go away as if killed; any thread. The writers' side sees a death."""
        self._ring.abandon()
