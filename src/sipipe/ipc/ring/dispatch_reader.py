"""The reading end of a dispatch channel; the format is in :mod:`sipipe.ipc.ring.dispatch`."""

from __future__ import annotations

from sipipe.ipc.errors import ChannelError
from sipipe.ipc.locks import deadline_after, remaining
from sipipe.ipc.ring.ends import ReaderEnd
from sipipe.ipc.ring.message import Message, parts_in
from sipipe.ipc.ring.reader import RingReader

__all__ = ["DispatchReader"]

WHOLE, FIRST, MIDDLE, LAST = 0, 1, 2, 3


class DispatchReader(ReaderEnd):
    """One named reader of a dispatch channel. Not for two threads at once."""

    def __init__(self, ring: RingReader) -> None:
        """Use :meth:`open`."""
        super().__init__(ring)
        self._partial: bytearray | None = None
        self._filled = 0
        self._expected = -1

    def receive(self, timeout: float | None = None) -> Message:
        """Wait for the next message, asleep; use it in a ``with`` statement.

        None waits as long as the producer lives: its death or close ends the wait at once.

        Raises:
            ChannelTimeout: nothing within ``timeout`` seconds; call again.
            ChannelClosed: the producer closed. ChannelPeerDied: the producer died.
        """
        deadline = deadline_after(timeout) if timeout else timeout
        ring = self._ring
        _, sequence, form, payload, count, _ = words = ring.receive(timeout)
        view = ring.view
        if form != WHOLE:
            sequence, payload, view, count = self._receive_cut(words, deadline)
        elif self._partial is not None:
            self._drop()
        if self._expected not in (sequence, -1):
            raise ChannelError(
                f"message {sequence} came in place of {self._expected}; this is a bug of SiPipe"
            )
        self._expected = sequence + 1
        parts = parts_in(view, count)
        self._messages += 1
        self._bytes += payload
        return Message(sequence, parts, ring)

    def _receive_cut(
        self, words: tuple[int, ...], deadline: float | None
    ) -> tuple[int, int, memoryview, int]:
        """Put a cut message together, of which a piece was received.

        Returns its sequence, the bytes of its parts, its memory, and how many parts it has.
        """
        while True:
            _, sequence, form, size, count, total = words
            if form == WHOLE:
                self._drop()
                return sequence, size, self._ring.view, count
            if form == FIRST:
                self._drop()
                self._partial = bytearray(total)
            assert self._partial is not None, "a message begins in its middle"
            self._partial[self._filled : self._filled + size] = self._ring.view[:size]
            self._filled += size
            if form == LAST:
                assert self._filled == total
                self._ring.settle()
                whole = memoryview(self._partial).toreadonly()
                self._partial, self._filled = None, 0
                return sequence, sum(map(len, parts_in(whole, count))), whole, count
            words = self._ring.receive(remaining(deadline))

    def _drop(self) -> None:
        if self._partial is not None:
            self._partial, self._filled = None, 0
            self._dropped += 1
