"""The reading side of a ring; the protocol and its argument are in :mod:`sipipe.ipc.ring.owner`."""

from __future__ import annotations

import time

from sipipe.ipc.errors import ChannelClosed, ChannelError, ChannelPeerDied, ChannelTimeout
from sipipe.ipc.locks import BoundedWait, Kind, Locks, deadline_after, remaining
from sipipe.ipc.memory import SharedMemory
from sipipe.ipc.ring import layout as at
from sipipe.ipc.ring.owner import ATTACH_POLL, Side

__all__ = ["RingReader"]


class RingReader(Side):
    """One reader. Invariant: once attached, the shared lock of slot ``(next - 1) % N`` is
    held, and that of ``(next - 2) % N`` while not ``_settled``."""

    def __init__(self, memory: SharedMemory, name: str, locks: Locks | None = None) -> None:
        super().__init__(memory, locks)
        self.name = name
        self._views = [view.toreadonly() for view in self._views]
        self.slots = self.layout.slots
        self._bounded = BoundedWait(self.locks, f"{self.channel}-{name}")
        self.waits = self._bounded.waits
        self.use = -1
        self.view = self._views[0]
        self._writers_came = False
        self._again = False
        self._settled = True
        self._slept: float | None = None  # a wait that settle() counts
        try:
            self._attach()
        except BaseException:
            super().close()
            raise

    def _attach(self) -> None:
        found = [k for k, name in self.readers() if name == self.name]
        if not found:
            raise ChannelError(
                f"channel {self.channel}: no reader {self.name!r} is declared "
                f"(declared: {', '.join(name for _, name in self.readers()) or 'none'})"
            )
        self.index = found[0]
        base = self._base = self.layout.reader_word(self.index)
        self._generation = self.words.load(base + at.R_GENERATION)
        if not self.locks.try_lock(Kind.EXCLUSIVE, at.LIFE + self.index):
            raise ChannelError(
                f"channel {self.channel}: reader {self.name!r} is attached by another process"
            )
        start = self.words.load(base + at.R_START)
        if start >= 0:
            taken = self._try_enter(start - 1)
            assert taken, "a declared reader was overtaken"
            self.next = start
        else:
            self._join_oldest()
        self.words.store(base + at.R_CURSOR, self.next)
        self.words.store(base + at.R_ATTACHED, self._generation)
        self._check_declared()

    def _bytes(self, use: int) -> tuple[int, int]:
        return self._places[use % self.layout.slots]

    def _try_enter(self, use: int) -> bool:
        return self.locks.try_lock(Kind.SHARED, *self._bytes(use))

    def _join_oldest(self) -> None:
        """Stand at the oldest use that is complete and still there; it is received first."""
        while True:
            end = min(self._published(r) for r in range(self.layout.ranks))
            for use in range(max(0, end - self.layout.slots + 1), end):
                if self._try_enter(use):
                    if self._incomplete(use) is None:
                        self.next, self._again = use + 1, True
                        self.use, self.view = use, self._views[use % self.slots]
                        return
                    self.locks.unlock(*self._bytes(use))
            if end == 0 and self._try_enter(-1):
                if self._incomplete(-1) is None:  # never written: nobody is a lap ahead
                    self.next = 0
                    return
                self.locks.unlock(*self._bytes(-1))
            time.sleep(ATTACH_POLL)  # the ranks are amid a slot

    def _incomplete(self, use: int) -> int | None:
        """The first rank whose ticket is not that of ``use``, or None."""
        for rank, word in enumerate(self._headers[use % self.layout.slots]):
            if self.words.load(word + at.S_TICKET) != use + 1:
                return rank
        return None

    def receive(self, timeout: float | None) -> tuple[int, ...]:
        """Wait for the next use; returns ticket and stamps of its first rank. ``use`` is then its
        number and ``view`` its payload, read-only, until the next call.

        Raises:
            ChannelTimeout: nothing came in time. ChannelClosed: nothing more comes.
            ChannelPeerDied: the writer is gone.
        """
        if not self._settled:
            self.settle()
        if self._again:
            self._again = False
            return self.slot_words(0)
        self._check_declared()
        if not self._writers_came:
            timeout = self._wait_writers(timeout)
        use = self.next
        slot = use % self.slots
        first, count = self._places[slot]
        bounded = self._bounded
        header = self._headers[slot][0]
        waiting = self.words.load(header + at.S_TICKET) != use + 1
        if waiting and timeout is None and bounded.pending is None:
            # The usual case, with as little as can be between the waking and the return. The lock
            # is not tried first: its ticket is not there, so it would be refused.
            began = time.monotonic()
            self.locks.wait_lock(Kind.SHARED, first, count)
            self._slept = time.monotonic() - began
        elif not (
            bounded.take_nowait(Kind.SHARED, first, count)
            or bounded.wait(Kind.SHARED, first, count, timeout)
        ):
            raise self._silent(timeout)
        # From here to the return is what every reader does between its waking and its message.
        words = self.words.run(header)
        if words[0] != use + 1 or (count > 1 and self._incomplete(use) is not None):
            self.locks.unlock(first, count)
            raise self._ended(self._incomplete(use) or 0)
        self.use, self.view = use, self._views[slot]
        self.next, self._settled = use + 1, False
        return words

    def settle(self) -> None:
        """Free the slot before the one that was received last, and do what else could wait until
        its message was read. Idempotent."""
        if not self._settled:
            self._settled = True
            if self._slept is not None:
                self.waits.add(self._slept)
                self._slept = None
            self.words.store(self._base + at.R_CURSOR, self.next)
            if self.locks.fd >= 0:
                self.locks.unlock(*self._places[(self.next - 2) % self.slots])

    def slot_words(self, rank: int) -> tuple[int, ...]:
        """Ticket and stamps that a rank gave to the use that was received last."""
        return self.words.run(self._headers[self.use % self.slots][rank])

    def depth(self) -> int:
        """Complete messages that this reader has not received yet."""
        published = min(self._published(r) for r in range(self.layout.ranks))
        return max(0, published - self.next)

    def _silent(self, timeout: float | None) -> ChannelTimeout:
        return ChannelTimeout(
            f"channel {self.channel}: {self.name} got no message {self.next} within "
            f"{timeout} s; the producer is alive but silent",
            ("producer",),
        )

    def _wait_writers(self, timeout: float | None) -> float | None:
        """Wait until every rank's writer has come; returns what is left of ``timeout``."""
        deadline = deadline_after(timeout)
        pause = ATTACH_POLL
        while absent := [
            r
            for r in range(self.layout.ranks)
            if not self.words.load(self.layout.writer_word(r) + at.W_ATTACHED)
        ]:
            if self.words.load(at.CLOSED) or not self.locks.held_elsewhere(at.OWNER):
                raise self._ended(absent[0])
            if (left := remaining(deadline)) is not None and left <= 0:
                raise ChannelTimeout(
                    f"channel {self.channel}: no writer of rank {absent[0]} within {timeout} s",
                    (f"rank {absent[0]}",),
                )
            time.sleep(pause)
            pause = min(pause * 2, 0.02)
        self._writers_came = True
        return remaining(deadline)

    def _check_declared(self) -> None:
        if self.locks.fd < 0:
            raise ChannelClosed(f"channel {self.channel}: reader {self.name} is closed")
        words = self.words.run(self._base)
        if words[at.R_STATE] != at.DECLARED or words[at.R_GENERATION] != self._generation:
            self.locks.close()
            raise ChannelClosed(f"channel {self.channel}: reader {self.name} was removed")

    def _ended(self, rank: int) -> ChannelError:
        base = self.layout.writer_word(rank)
        if self.words.load(base + at.W_CLOSED) or self.words.load(at.CLOSED):
            return ChannelClosed(f"channel {self.channel}: closed by its producer")
        who = "producer" if self.layout.ranks == 1 else f"rank {rank}"
        return ChannelPeerDied(
            f"channel {self.channel}: its {who} died before message {self.next} was complete", who
        )

    def close(self) -> None:
        """Leave: the writer no longer waits for this reader. Idempotent."""
        if self.locks.fd >= 0:
            self.words.store(self._base + at.R_LEFT, self._generation)
            self._bounded.close()
            super().close()

    def abandon(self) -> None:
        """Go away as if killed, from any thread; a receive in another ends with OSError."""
        self._bounded.close()
        super().close()
