"""The writing side of a ring; the protocol and its argument are in :mod:`sipipe.ipc.ring.owner`."""

from __future__ import annotations

import time

from sipipe.ipc.errors import ChannelError, ChannelTimeout
from sipipe.ipc.locks import BoundedWait, Kind, Locks, deadline_after, remaining
from sipipe.ipc.memory import SharedMemory
from sipipe.ipc.ring import layout as at
from sipipe.ipc.ring.owner import ATTACH_POLL, Side

__all__ = ["RingWriter"]


class RingWriter(Side):
    """One rank's writer.

    Invariant: the exclusive lock of ``next % N`` is held from construction to close;
    that of ``(next + 1) % N`` while ``_ahead``.
    """

    def __init__(self, memory: SharedMemory, rank: int = 0, locks: Locks | None = None) -> None:
        super().__init__(memory, locks)
        self.rank = rank
        self.next = 0
        self._ahead = False
        self._table = -1
        self._absent: list[tuple[int, int, int]] = []  # reader, generation, start
        self._bounded = BoundedWait(self.locks, f"{self.channel}-writer")
        self.waits = self._bounded.waits
        self._own = self.layout.writer_word(rank)
        self.slots = self.layout.slots
        self._bytes = [place[0] + rank for place in self._places]
        self._own_headers = [headers[rank] for headers in self._headers]
        if self.words.load(self._own + at.W_ATTACHED) or not self.locks.try_lock(
            Kind.EXCLUSIVE, self._bytes[0]
        ):
            raise ChannelError(f"channel {self.channel}: rank {rank} has a writer already")
        self.words.store(self._own + at.W_ATTACHED, 1)

    def reserve(self, timeout: float | None) -> memoryview:
        """Claim the slot after next; returns the payload of the one that may be written now.

        Raises:
            ChannelTimeout: a late reader still holds it; ``late`` names all that do.
        """
        if not self._ahead:
            claim = self.next + 1
            if self._absent or self._table != self.words.load(at.TABLE):
                self._wait_attached(claim, timeout)
            byte = self._bytes[claim % self.slots]
            if not self._bounded.take_nowait(Kind.EXCLUSIVE, byte, 1):
                self._wait_late(claim, byte, timeout)
            self._ahead = True
        return self._views[self.next % self.slots]

    @property
    def ahead(self) -> memoryview:
        """The payload that the next message will have: by the invariant this writer's alone, so
        that it may be written before :meth:`reserve`."""
        return self._views[self.next % self.slots]

    def publish(self, stamps: tuple[int, int, int, int, int]) -> int:
        """Make the reserved slot visible; returns its use."""
        assert self._ahead
        use = self.next
        slot = use % self.slots
        header = self._own_headers[slot]
        self.words.stamp(header + at.S_STAMP, stamps)
        self.words.store(header + at.S_TICKET, use + 1)
        self.next, self._ahead = use + 1, False
        self.locks.unlock(self._bytes[slot])
        # From here on the readers run; what follows does not delay them.
        self.words.store(self._own + at.W_PUBLISHED, use + 1)
        return use

    def claim_nowait(self) -> None:
        """Claim the slot after next already now, if it is free, to have less to do at the next
        message."""
        if not self._ahead and not self._absent and self._table == self.words.load(at.TABLE):
            byte = self._bytes[(self.next + 1) % self.slots]
            self._ahead = self._bounded.take_nowait(Kind.EXCLUSIVE, byte, 1)

    def depth(self) -> int:
        """Messages that the slowest reader has not taken."""
        cursors = [self.cursor(k) for k, _ in self.readers()]
        return self.next - min(cursors, default=self.next)

    def _wait_late(self, claim: int, byte: int, timeout: float | None) -> None:
        if not self._bounded.wait(Kind.EXCLUSIVE, byte, 1, timeout):
            # A reader at use u holds slot u, and its cursor is u + 1.
            held = claim - self.layout.slots
            raise self._late([k for k, _ in self.readers() if self.cursor(k) <= held + 1], timeout)

    def _wait_attached(self, claim: int, timeout: float | None) -> None:
        """Wait for declared readers that have not come and would be overtaken by ``claim``."""
        deadline = deadline_after(timeout)
        began = None
        while True:
            if self._table != (table := self.words.load(at.TABLE)):
                self._table = table
                self._absent = [self._entry(k) for k, _ in self.readers(attached=False)]
            self._absent = [entry for entry in self._absent if self._still_absent(*entry[:2])]
            late = [
                k for k, _, start in self._absent if 0 <= start <= claim - self.layout.slots + 1
            ]
            over = (left := remaining(deadline)) is not None and left <= 0
            if began is not None and (over or not late):
                self.waits.add(time.monotonic() - began)
            if not late:
                return
            if over:
                raise self._late(late, timeout)
            began = began or time.monotonic()
            time.sleep(ATTACH_POLL)

    def _entry(self, reader: int) -> tuple[int, int, int]:
        base = self.layout.reader_word(reader)
        return (
            reader,
            self.words.load(base + at.R_GENERATION),
            self.words.load(base + at.R_START),
        )

    def _still_absent(self, reader: int, generation: int) -> bool:
        return self.words.load(self.layout.reader_word(reader) + at.R_ATTACHED) != generation

    def _late(self, late: list[int], timeout: float | None) -> ChannelTimeout:
        """The error that names the late readers, or the ranks that those wait for."""
        names: dict[str, None] = {}
        for k, name in self.readers():
            if k in late:
                cursor = self.cursor(k)
                ranks = [r for r in range(self.layout.ranks) if self._published(r) <= cursor]
                names |= dict.fromkeys([f"rank {r}" for r in ranks if r != self.rank] or [name])
        shown = ", ".join(names) or "a reader that was removed and still lives"
        return ChannelTimeout(
            f"channel {self.channel}: message {self.next} waited {timeout} s for the slot that "
            f"{shown} should have left; stuck or too slow",
            tuple(names),
        )

    def close(self) -> None:
        """Tell the readers that no more comes, after what was published."""
        if self.locks.fd >= 0:
            self.words.store(self._own + at.W_CLOSED, 1)
            self._bounded.close()
            super().close()

    def abandon(self) -> None:
        """Let go without closing: to the readers, the writer died."""
        self._bounded.close()
        super().close()
