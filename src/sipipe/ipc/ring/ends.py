"""The two ends of a ring; the protocol and its argument are in :mod:`sipipe.ipc.ring.ring`."""

import time
from array import array

from sipipe.errors import StallError
from sipipe.ipc.errors import ChannelClosed, PeerDiedError
from sipipe.ipc.ring import layout as at
from sipipe.ipc.ring.ring import ATTACH_POLL, EXCLUSIVE, SHARED, Ring

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
        self._words = ring.words
        self._locks = ring.locks
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
            # wait: the caller's `stall_timeout`, by the millisecond; the late reader, its death, `close`
            time.sleep(pause)
            pause = min(2 * pause, ATTACH_POLL)
            if self.ring.closed or self._words[at.CLOSED]:
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
        self.next = use + 1
        self._claimed = False
        self._locks.unlock(self._lock_bytes[entry])
        # From here on the readers run; what follows does not delay them.
        self._words[self._own + at.W_PUBLISHED] = use + 1

    def claim_nowait(self) -> None:
        """Claim the entry after next now, if it is free, to have less to do at the next message.
        Not while a reader is to come: it begins with the oldest entry that it finds."""
        if not self._absent and self._version == self._words[at.VERSION]:
            self._claim()

    def _claim(self) -> bool:
        """Say if the entry after next is claimed, which no reader is then at or could ask for."""
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
        """Cursor of those the claim waits for: one at use u holds entry u with cursor u + 1."""
        return self.next + 2 - self._entries

    def _late(self, timeout: float) -> StallError:
        """The error that names the late readers, or for each the ranks that it waits for."""
        names: dict[str, None] = {}
        ranks = [rank for rank in range(self.ring.layout.ranks) if rank != self.rank]
        for k, name in self.ring.readers():
            if 0 <= (cursor := self.ring.cursor(k)) <= self._oldest:
                late_ranks = [f"rank {r}" for r in ranks if self.ring.published(r) <= cursor]
                names |= dict.fromkeys(late_ranks or [name])
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


class RingReader:
    """One reader. Invariant: once attached, the shared lock of entry ``(next - 1) % N`` is held,
    and that of ``(next - 2) % N`` while ``_holds_previous``."""

    def __init__(self, ring: Ring, name: str) -> None:
        """Attach as the declared reader ``name``; closes ``ring`` when that fails."""
        self.ring = ring
        self._name = name
        self._words = ring.words
        self._locks = ring.locks
        self._entries = ring.layout.entries
        ranks = ring.layout.ranks
        self._lock_ranges = [(e * ranks, ranks) for e in range(self._entries)]
        self._views = [view.toreadonly() for view in ring.views]
        self.use = -1
        self.view = self._views[0]
        self._again = self._holds_previous = False
        try:
            self._attach()
        except BaseException:
            ring.close()
            raise

    def _attach(self) -> None:
        ring = self.ring
        places = [k for k, name in ring.readers() if name == self._name]
        assert places, f"channel {ring.channel}: no reader {self._name!r} is declared"
        base = self._base = ring.layout.reader_word(places[0])
        self._generation = self._words[base + at.R_GENERATION]
        taken = self._locks.try_lock(EXCLUSIVE, at.LIFE + places[0])
        assert taken, f"channel {ring.channel}: reader {self._name!r} is attached twice"
        if (start := self._words[base + at.R_START]) >= 0:
            taken = self._try_lock(start - 1)
            assert taken, "a declared reader was overtaken"
            self.next = start
        else:
            self._lock_oldest()
        self._words[base + at.R_CURSOR] = self.next - self._again
        self._words[base + at.R_ATTACHED] = self._generation
        self._check_declared()

    def _try_lock(self, use: int) -> bool:
        return self._locks.try_lock(SHARED, *self._lock_ranges[use % self._entries])

    def _lock_oldest(self) -> None:
        """Stand at the oldest use that is complete and still there; it is received first."""
        while True:
            end = min(self.ring.published(r) for r in range(self.ring.layout.ranks))
            for use in range(max(0, end - self._entries + 1), end):
                if self._try_lock(use):
                    if self._incomplete(use) is None:
                        self.next = use + 1
                        self._again = True
                        self.use = use
                        self.view = self._views[use % self._entries]
                        return
                    self._unlock(use)
            if end == 0 and self._try_lock(-1):
                if self._incomplete(-1) is None:  # never written: nobody is a lap ahead
                    self.next = 0
                    return
                self._unlock(-1)
            # wait: 1 ms, again and again; the ranks that write: one that dies ends the engine,
            # and this process with it
            time.sleep(ATTACH_POLL)  # the ranks are amid an entry

    def _incomplete(self, use: int) -> int | None:
        """The first rank whose commit word is not that of ``use``, or None."""
        for rank, word in enumerate(self.ring.headers[use % self._entries]):
            if self._words[word + at.E_COMMIT] != use + 1:
                return rank
        return None

    def receive(self) -> list[int]:
        """Wait for the next use, without a bound; returns commit word and header of its first rank.
        ``use`` is then its number and ``view`` its payload, read-only, until the next call. Raises
        ChannelClosed: nothing more comes. PeerDiedError: the writer is gone."""
        if self._again:
            self._again = False
            return self.header(0)
        self.unlock_previous()
        self._check_declared()
        use = self.next
        entry = use % self._entries
        first, count = self._lock_ranges[entry]
        word = self.ring.headers[entry][0]
        # Not tried first: it sleeps only where the lock would be refused.
        self._locks.wait_lock(SHARED, first, count)
        # From here to the return is what every reader does between its waking and its message.
        words = self._words[word : word + at.READ_WORDS].tolist()
        if words[0] != use + 1 or (count > 1 and self._incomplete(use) is not None):
            self._unlock(use)
            raise self._ended(self._incomplete(use) or 0)
        self.use = use
        self.view = self._views[entry]
        self.next = use + 1
        self._holds_previous = True
        return words

    def unlock_previous(self) -> None:
        """Unlock the entry before the one received last, once that has been read. Idempotent."""
        self._words[self._base + at.R_CURSOR] = self.next
        if self._holds_previous:
            self._holds_previous = False
            if not self.ring.closed:
                self._unlock(self.next - 2)

    def catch_up(self) -> None:
        """This reader wants nothing of what is there: until more comes, it is not behind."""
        ranks = range(self.ring.layout.ranks)
        self._words[self._base + at.R_CURSOR] = min(self.ring.published(r) for r in ranks)

    def _unlock(self, use: int) -> None:
        self._locks.unlock(*self._lock_ranges[use % self._entries])

    def header(self, rank: int) -> list[int]:
        """Commit word and header that a rank gave to the use that was received last."""
        word = self.ring.headers[self.use % self._entries][rank]
        return self._words[word : word + at.READ_WORDS].tolist()

    def _check_declared(self) -> None:
        if self.ring.closed:
            raise ChannelClosed(f"channel {self.ring.channel}: reader {self._name} is closed")
        declared = self._words[self._base + at.R_DECLARED]
        if not declared or self._words[self._base + at.R_GENERATION] != self._generation:
            self._locks.close()
            raise ChannelClosed(f"channel {self.ring.channel}: reader {self._name} was removed")

    def _ended(self, rank: int) -> ChannelClosed | PeerDiedError:
        base = self.ring.layout.writer_word(rank)
        if self._words[base + at.W_CLOSED] or self._words[at.CLOSED]:
            return ChannelClosed(f"channel {self.ring.channel}: closed by its producer")
        who = "producer" if self.ring.layout.ranks == 1 else f"rank {rank}"
        return PeerDiedError(
            f"channel {self.ring.channel}: its {who} died before message {self.next} was complete"
        )

    def close(self) -> None:
        """Leave: the writers no longer wait for this reader. Idempotent."""
        if not self.ring.closed:
            self._words[self._base + at.R_LEFT] = self._generation
            self.ring.close()
