"""The lock-ahead ring: writers that stay one slot ahead, readers that go hand over hand.

Who runs here: one writer per rank (one process, one thread at a time) and any number of readers,
each a thread of its own process. The owner, who made the memory, declares and removes readers.

The protocol (paper, section 5, with the reader's side made safe):

* A writer always holds the exclusive lock of the slot that is next in turn. To write use n it
  first claims slot n + 1, then writes slot n, then its ticket, then frees slot n.
* A reader always holds the shared lock of the last slot that it read. It takes the shared lock
  of the next slot *before* it frees that one.

Guarantees, each from those two rules alone:

* A reader that waits sleeps on a lock that the writer holds, so it wakes when the slot is
  published, and no other way but one: the writer's death or close frees the lock with the old
  ticket still there, which the reader tells from a message by the ticket.
* A late reader is never overtaken: use n + N needs the lock that a reader at n holds. The writer
  waits with a bound and names the reader by its cursor.
* A dead reader stops nobody: the kernel frees its locks.
* With N >= 3 nobody waits in a circle: a writer at n waits for readers at n + 1 - N, whose next
  slot is published; a reader at n waits for the writer at n + 1, which waits for no one at n.
* A reader that is declared but not attached yet counts as standing before its first message:
  the writer does not go further than a lap, and looks every millisecond whether it has come.
  That is the only wait that is not a lock; it happens at start and after a restart.

Relies on: :mod:`sipipe.channels.locks` (kernel, memory order); aligned 8-byte loads and stores
that do not tear. All that a reader reads of a slot was written before the slot's lock was freed.
Cursor, attached and closed words are read without a lock: they only ever grow, a stale value makes
a wait longer or a report older, and the lock decides.

Rejected: cursors in memory instead of the reader's held lock (the writer would need a second kind
of wait, and a dead reader's cursor would need a guardian); one lock per reader and slot (the
writer would make a system call per reader and message).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

from sipipe.channels import layout as at
from sipipe.channels.errors import ChannelClosed, ChannelError, ChannelPeerDied, ChannelTimeout
from sipipe.channels.layout import Layout
from sipipe.channels.locks import BoundedWait, Kind, Locks, deadline_after, remaining
from sipipe.channels.memory import Endpoint, SharedMemory

__all__ = ["RingOwner", "RingReader", "RingWriter", "Words"]

_STAMPS = struct.Struct(f"<{at.STAMPS}q")
_ATTACH_POLL = 0.001


class Words:
    """The 8-byte words of the header. Invariant: one writer per word (see the layout)."""

    def __init__(self, memory: SharedMemory, count: int) -> None:
        self._raw = memoryview(memory.map)[: count * 8]
        self._words = self._raw.cast("q")

    def load(self, word: int) -> int:
        return self._words[word]

    def store(self, word: int, value: int) -> None:
        self._words[word] = value

    def stamp(self, word: int, values: tuple[int, ...]) -> None:
        """Write the stamp words of a slot, of which ``values`` are the first."""
        _STAMPS.pack_into(self._raw, word * 8, *values, *(0,) * (at.STAMPS - len(values)))

    def stamps(self, word: int) -> tuple[int, ...]:
        return _STAMPS.unpack_from(self._raw, word * 8)

    def text(self, word: int, value: bytes | None = None) -> bytes:
        """A reader's name, zero-padded; with ``value``, write it."""
        place = slice(word * 8, word * 8 + at.NAME_BYTES)
        if value is not None:
            self._raw[place] = value.ljust(at.NAME_BYTES, b"\0")
        return bytes(self._raw[place]).rstrip(b"\0")

    def close(self) -> None:
        self._words.release()
        self._raw.release()


class _Side:
    """What owner, writer and reader of a ring have in common."""

    def __init__(self, memory: SharedMemory, locks: Locks | None = None) -> None:
        self.memory = memory
        self.channel = memory.endpoint.channel
        words = Words(memory, at.FRAMING)
        self.layout = Layout(*(words.load(i) for i in (at.SLOTS, at.SLOT_BYTES, at.RANKS)))
        words.close()
        self.words = self._make_words()
        self.locks = locks or self._make_locks()
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

    def _make_words(self) -> Words:
        return Words(self.memory, self.layout.header_words)

    def _make_locks(self) -> Locks:
        return Locks(self.memory.endpoint.path)

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

    def close(self) -> None:
        """Free every lock and let go of the memory. Idempotent."""
        self.locks.close()
        self.memory.close()


class RingOwner(_Side):
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


class RingWriter(_Side):
    """One rank's writer.

    Invariant: the exclusive lock of ``next % N`` is held from construction to close;
    that of ``(next + 1) % N`` while ``_ahead``.
    """

    def __init__(self, memory: SharedMemory, rank: int = 0, locks: Locks | None = None) -> None:
        super().__init__(memory, locks)
        self.rank = rank
        self.next = 0
        self.waits = 0
        self.wait_seconds = 0.0
        self._ahead = False
        self._table = -1
        self._absent: list[tuple[int, int, int]] = []  # reader, generation, start
        self._bounded = BoundedWait(self.locks, f"{self.channel}-writer")
        self._own = self.layout.writer_word(rank)
        if self.words.load(self._own + at.W_ATTACHED) or not self.locks.try_lock(
            Kind.EXCLUSIVE, self._byte(0)
        ):
            raise ChannelError(f"channel {self.channel}: rank {rank} has a writer already")
        self.words.store(self._own + at.W_ATTACHED, 1)

    def _byte(self, use: int) -> int:
        return use % self.layout.slots * self.layout.ranks + self.rank

    def reserve(self, timeout: float | None) -> int:
        """Claim the slot after next; returns the slot that may be written now.

        Raises:
            ChannelTimeout: a late reader still holds it; ``late`` names all that do.
        """
        if not self._ahead:
            claim = self.next + 1
            if self._table != self.words.load(at.TABLE) or self._absent:
                self._wait_attached(claim, timeout)
            byte = self._byte(claim)
            if not self._bounded.take_nowait(Kind.EXCLUSIVE, byte, 1):
                self._wait_late(claim, byte, timeout)
            self._ahead = True
        return self.next % self.layout.slots

    def publish(self, *stamps: int) -> int:
        """Make the reserved slot visible; returns its use."""
        assert self._ahead
        use = self.next
        slot = self._headers[use % self.layout.slots][self.rank]
        self.words.stamp(slot + at.S_STAMP, stamps)
        self.words.store(slot + at.S_TICKET, use + 1)
        self.words.store(self._own + at.W_PUBLISHED, use + 1)
        self.next, self._ahead = use + 1, False
        self.locks.unlock(self._byte(use))
        return use

    def slot_view(self, slot: int) -> memoryview:
        """The payload of a slot."""
        return self._views[slot]

    def _wait_late(self, claim: int, byte: int, timeout: float | None) -> None:
        began = time.monotonic()
        self.waits += 1
        try:
            taken = self._bounded.wait(Kind.EXCLUSIVE, byte, 1, timeout)
        finally:
            self.wait_seconds += time.monotonic() - began
        if not taken:
            # A reader at use u holds slot u, and its cursor is u + 1.
            held = claim - self.layout.slots
            raise self._late([k for k, _ in self.readers() if self.cursor(k) <= held + 1], timeout)

    def _wait_attached(self, claim: int, timeout: float | None) -> None:
        """Wait for declared readers that have not come and would be overtaken by ``claim``."""
        deadline = deadline_after(timeout)
        began = 0.0
        while True:
            if self._table != (table := self.words.load(at.TABLE)):
                self._table = table
                self._absent = [self._entry(k) for k, _ in self.readers(attached=False)]
            self._absent = [entry for entry in self._absent if self._still_absent(*entry[:2])]
            late = [
                k for k, _, start in self._absent if 0 <= start <= claim - self.layout.slots + 1
            ]
            if not late:
                break
            if not began:
                began = time.monotonic()
                self.waits += 1
            if (left := remaining(deadline)) is not None and left <= 0:
                self.wait_seconds += time.monotonic() - began
                raise self._late(late, timeout)
            time.sleep(_ATTACH_POLL)
        if began:
            self.wait_seconds += time.monotonic() - began

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


class RingReader(_Side):
    """One reader. Invariant: once attached, the shared lock of slot ``(next - 1) % N`` is held."""

    def __init__(self, memory: SharedMemory, name: str, locks: Locks | None = None) -> None:
        super().__init__(memory, locks)
        self.name = name
        self._views = [view.toreadonly() for view in self._views]
        self.waits = 0
        self.wait_seconds = 0.0
        self._bounded = BoundedWait(self.locks, f"{self.channel}-{name}")
        self._writers_came = False
        self._again = False
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
                if not any(self._published(r) for r in range(self.layout.ranks)):
                    self.next = 0
                    return
                self.locks.unlock(*self._bytes(-1))

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
        if self._again:
            self._again = False
            return self.next - 1
        self._check_declared()
        if not self._writers_came:
            timeout = self._wait_writers(timeout)
        use = self.next
        place = self._bytes(use)
        if not self._bounded.take_nowait(Kind.SHARED, *place):
            self._wait(place, timeout)
        wrong = self._tickets(use)
        if wrong is not None:
            self.locks.unlock(*place)
            raise self._ended(wrong)
        self.next = use + 1
        self.words.store(self._base + at.R_CURSOR, self.next)
        self.locks.unlock(*self._bytes(use - 1))
        return use

    def stamps(self, use: int, rank: int = 0) -> tuple[int, ...]:
        return self.words.stamps(self._headers[use % self.layout.slots][rank] + at.S_STAMP)

    def slot_view(self, use: int) -> memoryview:
        """The payload of the slot of ``use``, read-only."""
        return self._views[use % self.layout.slots]

    def depth(self) -> int:
        """Complete messages that this reader has not received yet."""
        return min(self._published(r) for r in range(self.layout.ranks)) - self.next

    def _wait(self, place: tuple[int, int], timeout: float | None) -> None:
        began = time.monotonic()
        self.waits += 1
        try:
            taken = self._bounded.wait(Kind.SHARED, *place, timeout)
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
        pause = _ATTACH_POLL
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
