"""The writing side of a ring; the protocol and its argument are in :mod:`sipipe.ipc.ring.ring`."""

import time
from array import array

from sipipe.errors import StallError
from sipipe.ipc.errors import ChannelClosed
from sipipe.ipc.locks import EXCLUSIVE
from sipipe.ipc.ring import layout as at
from sipipe.ipc.ring.ring import ATTACH_POLL, Ring

FIRST_PAUSE = 50e-6
"""Seconds between two looks whether a late reader has gone on; they double up to ``ATTACH_POLL``."""


class RingWriter:
    """One rank's writer. Invariant: the exclusive lock of entry ``next % N`` is held from construction
    to close; that of ``(next + 1) % N`` while ``_claimed``."""

    def __init__(self, ring: Ring, rank: int = 0) -> None:
        self.ring = ring
        self.rank = rank
        self.next = 0
        self._claimed = False
        self._version = -1  # of the readers' records, when they were looked through
        self._absent = False  # whether a declared reader had not attached then
        self._words, self._locks = ring.words, ring.locks
        self._own = ring.layout.writer_word(rank)
        self._entries = ring.layout.entries
        self._lock_bytes = [e * ring.layout.ranks + rank for e in range(self._entries)]
        taken = self._locks.try_lock(EXCLUSIVE, self._lock_bytes[0])
        assert taken, f"channel {ring.channel}: rank {rank} has a writer already"

    def reserve(self, timeout: float, deadline: float | None = None) -> memoryview:
        """Claim the entry after next; returns the payload of the one that may be written now.
        Raises StallError: a late reader still holds it after ``timeout`` seconds; names all that do.
        ``deadline``: when those are over, where they are for several entries."""
        end = time.monotonic() + timeout if deadline is None else deadline
        pause = FIRST_PAUSE
        while not self._claim():
            if time.monotonic() >= end:
                raise self._late(timeout)
            # wait: the caller's `stall_timeout`, looking every millisecond; the late reader, its
            # removal when it dies, `close`
            time.sleep(pause)
            pause = min(2 * pause, ATTACH_POLL)
            if self.ring.closed:
                raise ChannelClosed(f"channel {self.ring.channel}: closed by its producer")
        return self.ring.views[self.next % self._entries]

    def publish(self, header: tuple[int, int, int, int, int]) -> None:
        """Make the reserved entry visible."""
        assert self._claimed
        use = self.next
        entry = use % self._entries
        word = self.ring.headers[entry][self.rank]
        self._words[word + at.E_HEADER : word + at.E_HEADER + at.HEADER_WORDS] = array("q", header)
        self._words[word + at.E_COMMIT] = use + 1
        self.next, self._claimed = use + 1, False
        self._locks.unlock(self._lock_bytes[entry])
        # From here on the readers run; what follows does not delay them.
        self._words[self._own + at.W_PUBLISHED] = use + 1

    def claim_nowait(self) -> None:
        """Claim the entry after next now, if it is free, to have less to do at the next message.
        Not while a reader is to come: it begins with the oldest entry that it finds."""
        if not self._absent and self._version == self._words[at.VERSION]:
            self._claim()

    def _claim(self) -> bool:
        """Whether the entry after next is claimed, which no reader is then at or could ask for."""
        if self._claimed:
            return True
        if self._absent or self._version != self._words[at.VERSION]:
            # The version first: a reader that is declared later is found at the next message.
            self._version = self._words[at.VERSION]
            absent = [k for k, _ in self.ring.readers(absent=True)]
            self._absent = bool(absent)
            if any(0 <= self.ring.cursor(k) <= self._oldest for k in absent):
                return False
        byte = self._lock_bytes[(self.next + 1) % self._entries]
        self._claimed = self._locks.try_lock(EXCLUSIVE, byte)
        return self._claimed

    @property
    def _oldest(self) -> int:
        """The cursor of the readers that the claim waits for: one at use u holds entry u, and its
        cursor is u + 1."""
        return self.next + 2 - self._entries

    def _late(self, timeout: float) -> StallError:
        """The error that names the late readers, or in place of each the ranks that it waits
        for."""
        names: dict[str, None] = {}
        ranks = [rank for rank in range(self.ring.layout.ranks) if rank != self.rank]
        for k, name in self.ring.readers():
            if 0 <= (cursor := self.ring.cursor(k)) <= self._oldest:
                behind = [f"rank {r}" for r in ranks if self.ring.published(r) <= cursor]
                names |= dict.fromkeys(behind or [name])
        shown = ", ".join(names) or "a reader that was removed and still lives"
        return StallError(
            f"channel {self.ring.channel}: message {self.next} waited {timeout:g} s for the entry "
            f"that {shown} should have left; stuck or too slow"
        )

    def close(self) -> None:
        """Tell the readers that no more comes, after what was published. Idempotent."""
        if not self.ring.closed:
            self._words[self._own + at.W_CLOSED] = 1
            self.ring.close()
