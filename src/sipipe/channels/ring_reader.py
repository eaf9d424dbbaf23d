"""The reading side of a ring; the protocol and its argument are in :mod:`sipipe.channels.ring`."""

from __future__ import annotations

import time

from sipipe.channels import layout as at
from sipipe.channels.errors import ChannelClosed, ChannelError, ChannelPeerDied, ChannelTimeout
from sipipe.channels.locks import BoundedWait, Kind, Locks, deadline_after, remaining
from sipipe.channels.memory import SharedMemory
from sipipe.channels.ring import ATTACH_POLL, Side

__all__ = ["RingReader"]


class RingReader(Side):
    """One reader. Invariant: once attached, the shared lock of slot ``(next - 1) % N`` is
    held, and that of ``(next - 2) % N`` while not ``_settled``."""

    def __init__(self, memory: SharedMemory, name: str, locks: Locks | None = None) -> None:
        super().__init__(memory, locks)
        self.name = name
        self._views = [view.toreadonly() for view in self._views]
        self.waits = 0
        self.wait_seconds = 0.0
        self._bounded = BoundedWait(self.locks, f"{self.channel}-{name}")
        self._writers_came = False
        self._again = False
        self._settled = True
        self.slots = self.layout.slots
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
                    if self._tickets(use) is None:
                        self.next, self._again = use + 1, True
                        return
                    self.locks.unlock(*self._bytes(use))
            if end == 0 and self._try_enter(-1):
                if self._tickets(-1) is None:  # never written: nobody is a lap ahead
                    self.next = 0
                    return
                self.locks.unlock(*self._bytes(-1))
            time.sleep(ATTACH_POLL)  # the ranks are amid a slot

    def _tickets(self, use: int) -> int | None:
        """The first rank whose ticket is not that of ``use``, or None."""
        for rank, word in enumerate(self._headers[use % self.layout.slots]):
            if self.words.load(word + at.S_TICKET) != use + 1:
                return rank
        return None

    def receive(self, timeout: float | None) -> int:
        """Wait for the next use; it stays readable until the next call.

        Raises:
            ChannelTimeout: nothing came in time. ChannelClosed: nothing more comes.
            ChannelPeerDied: the writer is gone.
        """
        self.settle()
        if self._again:
            self._again = False
            return self.next - 1
        self._check_declared()
        if not self._writers_came:
            timeout = self._wait_writers(timeout)
        use = self.next
        slot = use % self.slots
        first, count = self._places[slot]
        if not self._bounded.take_nowait(Kind.SHARED, first, count):
            self._wait(first, count, timeout)
        ticket = use + 1
        for rank, header in enumerate(self._headers[slot]):
            if self.words.load(header + at.S_TICKET) != ticket:
                self.locks.unlock(first, count)
                raise self._ended(rank)
        self.next, self._settled = ticket, False
        return use

    def settle(self) -> None:
        """Free the slot before the one that was received last. Idempotent."""
        if not self._settled:
            self._settled = True
            self.words.store(self._base + at.R_CURSOR, self.next)
            if self.locks.fd >= 0:
                self.locks.unlock(*self._places[(self.next - 2) % self.slots])

    def stamps(self, use: int, rank: int = 0) -> tuple[int, ...]:
        return self.words.stamps(self._headers[use % self.layout.slots][rank] + at.S_STAMP)

    def slot_view(self, use: int) -> memoryview:
        """The payload of the slot of ``use``, read-only."""
        return self._views[use % self.layout.slots]

    def depth(self) -> int:
        """Complete messages that this reader has not received yet."""
        return min(self._published(r) for r in range(self.layout.ranks)) - self.next

    def _wait(self, first: int, count: int, timeout: float | None) -> None:
        began = time.monotonic()
        self.waits += 1
        try:
            taken = self._bounded.wait(Kind.SHARED, first, count, timeout)
        finally:
            self.wait_seconds += time.monotonic() - began
        if not taken:
            raise ChannelTimeout(
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
        if (
            self.words.load(self._base + at.R_STATE) != at.DECLARED
            or self.words.load(self._base + at.R_GENERATION) != self._generation
        ):
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
