"""The lock-ahead ring: writers that stay one entry ahead, readers that go hand over hand.

Who runs here
    One writer per rank (one process, one thread at a time) and any number of readers, each a
    thread of its own process. The owner, who made the memory, declares and removes readers.
Protocol (paper, section 5, with the reader's side made safe)
    * A writer always holds the exclusive lock of the entry that is next in turn. To write use n it
      first claims entry n + 1, then writes entry n, then its commit word, then unlocks entry n.
    * A reader always holds the shared lock of the last entry that it read. It takes the shared
      lock of the next entry *before* it unlocks that one; unlocks it when the new message is
      released, at the latest before it asks for another, and so never waits with two locks.
Guarantees, each from those two rules alone
    * A reader that waits sleeps on a lock that the writer holds, so it wakes when the entry is
      published, and no other way but one: the writer's death or close frees the lock with the old
      commit word still there, by which the reader tells it from a message.
    * A late reader is never overtaken: use n + N needs the lock that a reader at n holds. The
      writer tries again every millisecond, with a bound, and names the reader by its cursor. An
      engine's rings have room for all that it has in flight, so that this reader is stuck.
    * A dead reader stops nobody: the kernel frees its locks.
    * With N >= 3 nobody waits in a circle: a writer at n waits for readers at n + 1 - N, whose
      next entry is published; a reader at n waits for the writer at n + 1, who waits for none at n.
    * A reader that is declared but not attached counts as standing before its first message: the
      writer does not go further than a lap, and checks every millisecond whether it has come.
Relies on
    :class:`Locks` (kernel, memory order); aligned 8-byte loads and stores that do not tear. Cursor,
    attached and closed words are read without a lock: they only ever grow, a stale value makes a
    wait longer or a report older, and the lock decides.

Rejected: cursors in memory instead of the reader's held lock (the writer would need a second kind
of wait, and a dead reader's cursor would need a guardian); one lock per reader and entry (the
writer would make a system call per reader and message); a futex as the fast path beside the locks
(it saves one microsecond of eight, and is a second protocol, whose waker's death wakes nobody).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import Self

from sipipe.ipc.errors import ChannelError
from sipipe.ipc.memory import SharedMemory
from sipipe.ipc.ring import layout as at
from sipipe.ipc.ring.layout import Layout, RingEndpoint
from sipipe.linux import set_lock

# F_OFD_*, absent from Python's fcntl before 3.14
_SETLK = 37
_SETLKW = 38
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid

SHARED = fcntl.F_RDLCK
EXCLUSIVE = fcntl.F_WRLCK
_UNLOCK = fcntl.F_UNLCK
"""The kinds of a lock: many may hold a byte shared, or one exclusively."""

ATTACH_POLL = 0.001


@functools.lru_cache(maxsize=4096)
def _flock(kind: int, first: int, count: int) -> bytes:
    return _FLOCK.pack(kind, 0, first, count, 0)


class Locks:
    """The locks of one open file description, on bytes that need not exist in the file.

    Guarantees: two ``Locks`` on one file exclude each other even within a process. When the process
    ends, however it ends, the kernel frees its locks and wakes whoever waits for them, asleep.

    Relies on: ``F_OFD_SETLK`` and ``F_OFD_SETLKW`` (Linux 3.15), the same ``struct flock`` on all
    64-bit Linux; that nobody else holds the same description: it is opened anew, never duplicated,
    close-on-exec, and closed in a forked child. The mapped file is a second description, because a
    mapping keeps its own, and the locks, alive. The kernel's spinlock of the file orders memory:
    what was written before a lock was freed is read by whoever takes it afterwards, on any CPU.

    The kernel has no time-out for these locks; the peer's death or close ends a wait. Who needs a
    bound tries again and again (:mod:`sipipe.ipc.ring.ends`).

    Rejected: a timer signal (only a process's main thread can handle one in Python, and the signal
    would be taken from whoever embeds us); a helper thread that sleeps for the one that may not (60
    lines for a wait that happens when a reader is stuck); ``FUTEX_WAIT`` (has a time-out, but nobody
    wakes it when its waker is killed).
    """

    def __init__(self, path: str) -> None:
        """Open ``path`` anew. Raises OSError."""
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _open.add(self)

    def try_lock(self, kind: int, first: int, count: int = 1) -> bool:
        """Take bytes ``first`` to ``first + count - 1`` if nobody stands against it."""
        try:
            set_lock(self.fd, _SETLK, _flock(kind, first, count))
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX has it
            return False
        return True

    def wait_lock(self, kind: int, first: int, count: int = 1) -> None:
        """Sleep in the kernel until the bytes are ours. All of them at once, or none yet."""
        # wait: none, as an idle engine publishes nothing; the writer's next message, its death or
        # close, for which the kernel frees its lock
        fcntl.fcntl(self.fd, _SETLKW, _flock(kind, first, count))

    def unlock(self, first: int, count: int = 1) -> None:
        """Free the bytes; all that wait wake up, while another thread of this process may go on."""
        fcntl.fcntl(self.fd, _SETLK, _flock(_UNLOCK, first, count))

    def close(self) -> None:
        """Free all locks and the descriptor. Idempotent."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            # Unlock first: another thread may still be inside the kernel with this description.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, _SETLK, _flock(_UNLOCK, 0, 0))
            os.close(fd)


_open: weakref.WeakSet[Locks] = weakref.WeakSet()


def _close_in_child() -> None:
    for locks in list(_open):
        if locks.fd >= 0:
            os.close(locks.fd)  # without unlocking: the locks are the parent's
            locks.fd = -1


os.register_at_fork(after_in_child=_close_in_child)


def words_of(memory: SharedMemory, count: int) -> memoryview[int]:
    """The 8-byte words before the payload. Invariant: one writer per word (see the layout)."""
    return memoryview(memory.map)[: count * 8].cast("q")


class Ring:
    """One process's mapping of a ring, with locks of its own: what owner, writer and reader use.
    Declaring and removing readers is for the owner, which made the ring."""

    def __init__(self, memory: SharedMemory, layout: Layout, names: Sequence[str]) -> None:
        """Use :meth:`create` or :meth:`attach`."""
        self.endpoint = RingEndpoint(memory.endpoint, layout, tuple(names))
        self.layout = layout
        self.channel = memory.endpoint.channel
        self.words = words_of(memory, layout.words)
        self.locks = Locks(memory.endpoint.path)
        self._memory = memory
        entries = range(layout.entries)
        ranks = layout.ranks
        stride = layout.stride
        self.payload = memoryview(memory.map)[layout.payload :][: layout.payload_bytes]
        # Computed once, because every message asks for them: by entry, and by rank.
        self.headers = [[layout.entry_word(e, rank) for rank in range(ranks)] for e in entries]
        self.views = [self.payload[e * stride :][: layout.entry_bytes] for e in entries]

    @classmethod
    def create(cls, channel: str, layout: Layout, readers: Sequence[str]) -> Self:
        """Make the memory and declare the readers, which will see every message. Raises
        ChannelError: more than 256 readers. ResourceError: not enough memory."""
        if len(readers) > at.READERS:
            raise ChannelError(f"channel {channel}: no room for a reader beyond {at.READERS}")
        ring = cls(SharedMemory.create(channel, layout.size), layout, readers)
        for name in readers:
            ring.add_reader(name, start=0)
        return ring

    @classmethod
    def attach(cls, endpoint: RingEndpoint) -> Self:
        """Map what another process (or this one) made. PeerDiedError: its creator is gone."""
        return cls(SharedMemory.attach(endpoint.memory), endpoint.layout, endpoint.readers)

    @property
    def closed(self) -> bool:
        return self.locks.fd < 0

    def readers(self, *, absent: bool = False) -> Iterator[tuple[int, str]]:
        """Index and name of each declared reader that has not left, or only of those absent yet."""
        for k, name in enumerate(self.endpoint.readers):
            base = self.layout.reader_word(k)
            generation = self.words[base + at.R_GENERATION]
            left = self.words[base + at.R_LEFT] == generation
            if left or not self.words[base + at.R_DECLARED]:
                continue
            if not absent or self.words[base + at.R_ATTACHED] != generation:
                yield k, name

    def cursor(self, reader: int) -> int:
        """The use that a reader waits for or will ask for next; -1: not known before it attaches."""
        base = self.layout.reader_word(reader)
        if self.words[base + at.R_ATTACHED] == self.words[base + at.R_GENERATION]:
            return self.words[base + at.R_CURSOR]
        return self.words[base + at.R_START]

    def published(self, rank: int) -> int:
        """Uses that a rank has published."""
        return self.words[self.layout.writer_word(rank) + at.W_PUBLISHED]

    def add_reader(self, name: str, start: int) -> None:
        """Declare a reader whose first message is use ``start``; -1: the oldest that is there."""
        base = self._record(name)
        assert not self.words[base + at.R_DECLARED], name
        self.words[base + at.R_START] = start
        self.words[base + at.R_GENERATION] = self.words[base + at.R_GENERATION] + 1
        self._declare(base, 1)

    def remove_reader(self, name: str) -> None:
        """Forget a reader. One that still lives is let go at its next receive. Idempotent."""
        base = self._record(name)
        if self.words[base + at.R_DECLARED]:
            self._declare(base, 0)

    def _record(self, name: str) -> int:
        """The first word of a reader's record."""
        return self.layout.reader_word(self.endpoint.readers.index(name))

    def _declare(self, base: int, declared: int) -> None:
        # The version last: who has seen it sees the record too, or finds a later version.
        self.words[base + at.R_DECLARED] = declared
        self.words[at.VERSION] = self.words[at.VERSION] + 1

    def mark_closed(self) -> None:
        """The owner: tell every reader that no more comes."""
        self.words[at.CLOSED] = 1

    def close(self) -> None:
        """Free every lock and let go of the memory. Idempotent."""
        self.locks.close()
        self._memory.close()
