"""The lock-ahead ring: writers that stay one slot ahead, readers that go hand over hand.

Who runs here: one writer per rank (one process, one thread at a time) and any number of readers,
each a thread of its own process. The owner, who made the memory, declares and removes readers.

The protocol (paper, section 5, with the reader's side made safe):

* A writer always holds the exclusive lock of the slot that is next in turn. To write use n it
  first claims slot n + 1, then writes slot n, then its ticket, then frees slot n.
* A reader always holds the shared lock of the last slot that it read. It takes the shared lock
  of the next slot *before* it frees that one; frees it when it lets the new message go, at the
  latest before it asks for another, and so never waits with two locks in hand.

Guarantees, each from those two rules alone:

* A reader that waits sleeps on a lock that the writer holds, so it wakes when the slot is
  published, and no other way but one: the writer's death or close frees the lock with the old
  ticket still there, which the reader tells from a message by the ticket.
* A late reader is never overtaken: use n + N needs the lock that a reader at n holds. The writer
  waits with a bound and names the reader by its cursor.
* What a reader need not do to have a message, and a writer to publish one, comes afterwards:
  freeing the slot before, statistics, looking for dead readers, and claiming the next slot if it
  happens to be free. Between the two system calls of a hand-over there is little else.
* A reader that waits without a bound looks at a ticket first, without a lock. That is a hint
  only: if it is missing, the reader goes to sleep at once, instead of trying a lock that would be refused;
  what it then reads, it reads with the lock, tickets included.
* A dead reader stops nobody: the kernel frees its locks.
* With N >= 3 nobody waits in a circle: a writer at n waits for readers at n + 1 - N, whose next
  slot is published; a reader at n waits for the writer at n + 1, which waits for no one at n.
* A reader that is declared but not attached yet counts as standing before its first message:
  the writer does not go further than a lap, and looks every millisecond whether it has come.
  That is the only wait that is not a lock; it happens at start and after a restart.

Relies on: :mod:`sipipe.ipc.locks` (kernel, memory order); aligned 8-byte loads and stores
that do not tear. All that a reader reads of a slot was written before the slot's lock was freed.
Cursor, attached and closed words are read without a lock: they only ever grow, a stale value makes
a wait longer or a report older, and the lock decides.

Rejected: cursors in memory instead of the reader's held lock (the writer would need a second kind
of wait, and a dead reader's cursor would need a guardian); one lock per reader and slot (the
writer would make a system call per reader and message); a futex as the fast path beside the locks
(it saves one microsecond of eight, and is a second protocol, whose waker's death wakes nobody).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from sipipe.ipc.errors import ChannelError
from sipipe.ipc.locks import Kind, Locks
from sipipe.ipc.memory import Endpoint, SharedMemory
from sipipe.ipc.ring import layout as at
from sipipe.ipc.ring.layout import Layout
from sipipe.ipc.statistics import ChannelStatistics, Waits

__all__ = ["RingOwner", "Side", "Words"]

_STAMPS = struct.Struct(f"<{at.STAMPS}q")
_RUN = struct.Struct(f"<{1 + at.STAMPS}q")
ATTACH_POLL = 0.001


class Words:
    """The 8-byte words of the header. Invariant: one writer per word (see the layout)."""

    def __init__(self, memory: SharedMemory, count: int) -> None:
        self._raw = memoryview(memory.map)[: count * 8]
        self._words = self._raw.cast("q")

    def load(self, word: int) -> int:
        return self._words[word]

    def store(self, word: int, value: int) -> None:
        self._words[word] = value

    def stamp(self, word: int, values: tuple[int, int, int, int, int]) -> None:
        """Write the stamp words of a slot."""
        _STAMPS.pack_into(self._raw, word * 8, *values)

    def run(self, word: int) -> tuple[int, ...]:
        """Six words: ticket and stamps of a slot, or the first of a reader."""
        return _RUN.unpack_from(self._raw, word * 8)

    def text(self, word: int, value: bytes | None = None) -> bytes:
        """A reader's name, zero-padded; with ``value``, write it."""
        place = slice(word * 8, word * 8 + at.NAME_BYTES)
        if value is not None:
            self._raw[place] = value.ljust(at.NAME_BYTES, b"\0")
        return bytes(self._raw[place]).rstrip(b"\0")

    def close(self) -> None:
        self._words.release()
        self._raw.release()


class Side:
    """What owner, writer and reader of a ring have in common."""

    waits: Waits  # of writers and readers

    def __init__(self, memory: SharedMemory, locks: Locks | None = None) -> None:
        self.memory = memory
        self.channel = memory.endpoint.channel
        words = Words(memory, at.FRAMING)
        self.layout = Layout(*(words.load(i) for i in (at.SLOTS, at.SLOT_BYTES, at.RANKS)))
        words.close()
        self.words = Words(memory, self.layout.header_words)
        self.locks = locks or Locks(memory.endpoint.path)
        self.payload = memoryview(memory.map)[self.layout.payload : self.layout.size]
        # Computed once, because every message asks for them.
        ranks, stride = self.layout.ranks, self.layout.stride
        self._places = [(slot * ranks, ranks) for slot in range(self.layout.slots)]
        self._headers = [
            [self.layout.slot_word(slot, rank) for rank in range(ranks)]
            for slot in range(self.layout.slots)
        ]
        self._views = [
            self.payload[slot * stride : slot * stride + self.layout.slot_bytes]
            for slot in range(self.layout.slots)
        ]

    def readers(self, *, attached: bool | None = None) -> Iterator[tuple[int, str]]:
        """Index and name of each declared reader that has not left."""
        for k in range(at.READERS):
            base = self.layout.reader_word(k)
            if self.words.load(base + at.R_STATE) != at.DECLARED:
                continue
            generation = self.words.load(base + at.R_GENERATION)
            if self.words.load(base + at.R_LEFT) == generation:
                continue
            here = self.words.load(base + at.R_ATTACHED) == generation
            if attached is None or attached is here:
                yield k, self.words.text(base + at.R_NAME).decode()

    def cursor(self, reader: int) -> int:
        """The use that a reader waits for or will ask for next."""
        base = self.layout.reader_word(reader)
        if self.words.load(base + at.R_ATTACHED) == self.words.load(base + at.R_GENERATION):
            return self.words.load(base + at.R_CURSOR)
        return max(0, self.words.load(base + at.R_START))

    def _published(self, rank: int) -> int:
        return self.words.load(self.layout.writer_word(rank) + at.W_PUBLISHED)

    def is_dead(self, reader: int) -> bool:
        """Whether an attached reader's life lock is gone without its having left."""
        base = self.layout.reader_word(reader)
        return not self.locks.held_elsewhere(at.LIFE + reader) and self.words.load(
            base + at.R_LEFT
        ) != self.words.load(base + at.R_GENERATION)

    def depth(self) -> int:
        """Complete messages that are not received yet."""
        raise NotImplementedError

    def statistics(self, messages: int, size: int, dropped: int = 0) -> ChannelStatistics:
        """What this side has done, with what its framing has counted."""
        return ChannelStatistics(
            messages=messages,
            bytes=size,
            waits=self.waits.count,
            wait_seconds=self.waits.seconds,
            longest_wait=self.waits.longest,
            depth=self.depth(),
            dropped=dropped,
        )

    def close(self) -> None:
        """Free every lock and let go of the memory. Idempotent."""
        self.locks.close()
        self.memory.close()


class RingOwner(Side):
    """Who made the ring: declares and removes readers, and may close the ring as a whole."""

    @classmethod
    def create(
        cls,
        channel: str,
        layout: Layout,
        readers: list[str],
        directory: str | None,
        framing: tuple[int, ...] = (),
    ) -> RingOwner:
        memory = SharedMemory.create(channel, layout.size, directory)
        words = Words(memory, layout.header_words)
        words.store(at.SLOTS, layout.slots)
        words.store(at.SLOT_BYTES, layout.slot_bytes)
        words.store(at.RANKS, layout.ranks)
        for i, value in enumerate(framing):
            words.store(at.FRAMING + i, value)
        words.close()
        owner = cls(memory)
        owner.locks.try_lock(Kind.EXCLUSIVE, at.OWNER)
        for name in readers:
            owner.add_reader(name, start=0)
        return owner

    @property
    def endpoint(self) -> Endpoint:
        return self.memory.endpoint

    def add_reader(self, name: str, start: int) -> None:
        """Declare a reader whose first message is use ``start``; -1: the oldest that is there."""
        data = name.encode()
        if not 0 < len(data) <= at.NAME_BYTES:
            raise ChannelError(f"channel {self.channel}: bad reader name {name!r}")
        free = None
        for k in range(at.READERS):
            base = self.layout.reader_word(k)
            state = self.words.load(base + at.R_STATE)
            same = self.words.text(base + at.R_NAME) == data
            if state == at.DECLARED and same and not self._gone(k):
                raise ChannelError(f"channel {self.channel}: reader {name!r} is there already")
            # A removed reader may still hold its life lock; its place is not free until then.
            if (same or state != at.DECLARED) and not self.locks.held_elsewhere(at.LIFE + k):
                free = k if free is None or same else free
        if free is None:
            raise ChannelError(f"channel {self.channel}: no place for a reader beyond {at.READERS}")
        base = self.layout.reader_word(free)
        self.words.store(base + at.R_STATE, at.FREE)
        self.words.text(base + at.R_NAME, data)
        self.words.store(base + at.R_START, start)
        self.words.store(base + at.R_GENERATION, self.words.load(base + at.R_GENERATION) + 1)
        self.words.store(base + at.R_STATE, at.DECLARED)
        self._changed()

    def remove_reader(self, name: str) -> None:
        """Forget a reader. One that still lives is let go at its next receive."""
        for k in range(at.READERS):
            base = self.layout.reader_word(k)
            declared = self.words.load(base + at.R_STATE) == at.DECLARED
            if declared and self.words.text(base + at.R_NAME).decode() == name:
                self.words.store(base + at.R_STATE, at.REMOVED)
                self._changed()
                return
        raise ChannelError(f"channel {self.channel}: no reader {name!r}")

    def _gone(self, reader: int) -> bool:
        base = self.layout.reader_word(reader)
        generation = self.words.load(base + at.R_GENERATION)
        attached = self.words.load(base + at.R_ATTACHED) == generation
        left = self.words.load(base + at.R_LEFT) == generation
        return left or (attached and not self.locks.held_elsewhere(at.LIFE + reader))

    def _changed(self) -> None:
        self.words.store(at.TABLE, self.words.load(at.TABLE) + 1)

    def mark_closed(self) -> None:
        self.words.store(at.CLOSED, 1)
