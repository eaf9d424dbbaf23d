"""BIC-I: one producer's messages to every reader of this host, in order, without a copy.

Who runs here: the producer's threads, one at a time; each reader in a process (or thread) of its own. The ring
below does all synchronization; this module only lays messages out in slots.

A message is a sequence of parts. It is written once, whatever the number of readers::

    slot     ┌ 8-byte length of each part ┬ part 0 ┬ part 1 ┬ …   parts start at multiples of 16
    stamps     sequence, form, bytes here, parts, total bytes

A message that does not fit one slot is cut into consecutive slots (form FIRST, MIDDLE, LAST), and
each reader puts it together in memory of its own; one that fits (form WHOLE) is read in place.
A producer whose time is up amid a cut message gives it up: the next message begins with WHOLE or
FIRST, and the readers drop what they have of the old one.

Deltas against the last message of a microbatch's slot were measured and rejected: a part of 4 KB
that need not be copied saves a tenth of a microsecond of forty (docs/log.md).
"""

from __future__ import annotations

import functools
import struct
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from sipipe.channels.errors import ChannelClosed, ChannelError, ChannelPeerDied
from sipipe.channels.layout import Layout
from sipipe.channels.locks import deadline_after, remaining
from sipipe.channels.memory import Endpoint, SharedMemory
from sipipe.channels.ring import RingOwner
from sipipe.channels.ring_reader import RingReader
from sipipe.channels.ring_writer import RingWriter
from sipipe.channels.statistics import ChannelStatistics

__all__ = ["DispatchProducer", "DispatchReader", "Message", "Part"]

Part = bytes | bytearray | memoryview
"""What a part may be: any C-contiguous buffer, a NumPy array too."""

WHOLE, FIRST, MIDDLE, LAST = 0, 1, 2, 3
_MASK = -16  # parts begin at multiples of 16: & _MASK rounds down
# Seconds since the last look at the readers after which one looks at all, and before publishing.
_LOOK_AT_ALL_AFTER = 0.005
_LOOK_FIRST_AFTER = 0.05


class DispatchProducer:
    """The one writer of a dispatch channel, and its owner. Any thread; publishing and adding a
    reader take turns, removing one does not wait for a publish that is stuck."""

    def __init__(self, owner: RingOwner) -> None:
        """Use :meth:`create`."""
        self._owner = owner
        self._writer = RingWriter(owner.memory, 0, owner.locks)
        self._turns = threading.Lock()  # a new reader's first message is known only between two
        self._sequence = 0
        self._messages = 0
        self._bytes = 0
        self._turn = 0
        self._looked = 0.0
        self._dead: str | None = None
        self._attached: list[tuple[int, str]] = []
        self._waiting = True
        self._closed = False

    @classmethod
    def create(
        cls,
        name: str,
        slots: int = 16,
        slot_bytes: int = 1 << 16,
        readers: Sequence[str] = (),
        directory: str | None = None,
    ) -> DispatchProducer:
        """Make a channel on this host.

        Args:
            name: for messages, such as ``bic-i``.
            slots: N, 3 or more. A reader may be N - 2 messages late before the producer waits.
            slot_bytes: a message up to about this size is read in place; a larger one is cut.
            readers: names of the readers that will open the channel; none misses a message.
            directory: where the memory lies; None: a memfd, which needs no ``/dev/shm``.

        Raises:
            ResourceError: not enough memory; see :func:`sipipe.channels.required_bytes`.
        """
        layout = Layout(slots, slot_bytes)
        return cls(RingOwner.create(name, layout, list(readers), directory))

    @property
    def endpoint(self) -> Endpoint:
        """What a reader needs to open the channel, while this process lives."""
        return self._owner.endpoint

    def publish(
        self, parts: Sequence[Part], timeout: float | None = None, *, sequence: int | None = None
    ) -> int:
        """Send one message to every reader; returns its sequence number, counted from 0.

        A replica gives the original's ``sequence``.

        Raises:
            ChannelPeerDied: a reader was found dead. Nothing was published:
                ``remove_reader`` (and perhaps ``add_reader``) first, then publish again. Amid a
                stream of messages it is found after at most as many as there are readers.
            ChannelTimeout: a late reader still holds the slot after ``timeout`` seconds. Nothing
                was published; the call may be made again.
            ChannelClosed: this producer is closed.
        """
        with self._turns:
            if time.monotonic() - self._looked > _LOOK_FIRST_AFTER:
                self._look_at_readers()
            if self._closed or self._dead is not None:
                self._refuse()
            if sequence is not None:
                self._sequence = sequence
            writer = self._writer
            views, sizes = [], []
            total = (8 * len(parts) + 15) & _MASK
            for part in parts:
                view = part if type(part) is bytes else _bytes_of(part)
                size = len(view)
                views.append(view)
                sizes.append(size)
                total += (size + 15) & _MASK
            if total > writer.layout.slot_bytes:
                self._publish_cut(views, sizes, total, deadline_after(timeout))
            else:
                target = writer.slot_view(writer.reserve(timeout))
                place = _lay_out(target, views, sizes)
                writer.publish((self._sequence, WHOLE, place, len(sizes), total))
            self._bytes += sum(sizes)
            self._messages += 1
            self._sequence += 1
            self._look_at_readers()
            writer.claim_nowait()
            return self._sequence - 1

    def _publish_cut(
        self,
        views: Sequence[bytes | bytearray | memoryview],
        sizes: Sequence[int],
        total: int,
        deadline: float | None,
    ) -> None:
        size = self._writer.layout.slot_bytes
        source = memoryview(bytearray(total))
        _lay_out(source, views, sizes)
        for start in range(0, total, size):
            piece = source[start : start + size]
            form = FIRST if start == 0 else LAST if start + size >= total else MIDDLE
            slot = self._writer.reserve(remaining(deadline))
            self._writer.slot_view(slot)[: len(piece)] = piece
            self._writer.publish((self._sequence, form, len(piece), len(sizes), total))

    def _look_at_readers(self) -> None:
        """Look for a dead reader: at all of them after a pause, at one in turn amid a stream.

        Normally after a message, when it delays nobody; in an idle engine before it.
        """
        if self._closed:
            return
        if self._waiting:
            self._attached = list(self._owner.readers(attached=True))
            self._waiting = any(True for _ in self._owner.readers(attached=False))
        now = time.monotonic()
        if now - self._looked > _LOOK_AT_ALL_AFTER:
            look = self._attached
        elif self._attached:
            self._turn = (self._turn + 1) % len(self._attached)
            look = [self._attached[self._turn]]
        else:
            return
        self._looked = now
        self._dead = next((name for k, name in look if self._owner.is_dead(k)), None)

    def _refuse(self) -> None:
        if self._closed:
            raise ChannelClosed(f"channel {self._owner.channel}: this producer is closed")
        # Looked at again: it may have been removed meanwhile, and others may have died.
        dead = self.dead_readers()
        self._dead = dead[0] if dead else None
        if self._dead is not None:
            raise ChannelPeerDied(
                f"channel {self._owner.channel}: reader {self._dead} died; "
                "nothing was sent, remove it and send again",
                self._dead,
            )

    def dead_readers(self) -> tuple[str, ...]:
        """Names of the attached readers that are dead now."""
        return tuple(
            name for k, name in self._owner.readers(attached=True) if self._owner.is_dead(k)
        )

    def absent_readers(self) -> tuple[str, ...]:
        """Names of the declared readers that have not opened the channel yet."""
        return tuple(name for _, name in self._owner.readers(attached=False))

    def add_reader(self, name: str) -> None:
        """Declare a reader whose first message is the next one to be published.

        It may be a name used before, once the reader that had it is dead, has left, or was
        removed and is gone.
        """
        with self._turns:
            self._owner.add_reader(name, start=self._writer.next)
            self._waiting = True

    def remove_reader(self, name: str) -> None:
        """Forget a reader, dead or alive. One that lives gets ChannelClosed at its next receive;
        until then it still holds the slot that it is at, so kill it if it is stuck."""
        self._owner.remove_reader(name)
        self._waiting = True

    def statistics(self) -> ChannelStatistics:
        """Messages, bytes, waits for late readers, and how far the slowest reader is behind."""
        cursors = [self._owner.cursor(k) for k, _ in self._owner.readers()]
        return ChannelStatistics(
            messages=self._messages,
            bytes=self._bytes,
            waits=self._writer.waits,
            wait_seconds=self._writer.wait_seconds,
            depth=self._writer.next - min(cursors, default=self._writer.next),
        )

    def close(self) -> None:
        """Readers get what was published, then ChannelClosed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._owner.mark_closed()
            self._writer.close()
            self._owner.close()

    def abandon(self) -> None:
        """Go away as if killed: readers get what was published, then ChannelPeerDied."""
        self._closed = True
        self._writer.abandon()
        self._owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Message:
    """One received message, a context manager that lets its memory go at the end.

    ``parts`` are read-only and stay valid until :meth:`release`, at the latest until the next
    receive; copy what must live longer. ``sequence`` counts from the producer's first message.
    """

    __slots__ = ("_ring", "parts", "sequence")

    def __init__(self, sequence: int, parts: tuple[memoryview, ...], ring: RingReader) -> None:
        self._ring = ring
        self.sequence = sequence
        self.parts = parts

    def release(self) -> None:
        """Let the memory go: ``parts`` can no longer be read. Idempotent.

        An array made from a part keeps that part alive, but its content changes with a later
        message.
        """
        for part in self.parts:
            try:  # noqa: SIM105 - suppress() costs as much as all the rest
                part.release()
            except BufferError:
                pass
        self.parts = ()
        self._ring.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class DispatchReader:
    """One named reader of a dispatch channel. Not for two threads at once."""

    def __init__(self, ring: RingReader) -> None:
        """Use :meth:`open`."""
        self._ring = ring
        self._messages = 0
        self._bytes = 0
        self._dropped = 0
        self._partial: bytearray | None = None
        self._filled = 0
        self._expected = -1

    @classmethod
    def open(cls, endpoint: Endpoint, name: str) -> DispatchReader:
        """Attach as the declared reader ``name``.

        Raises:
            ChannelPeerDied: the producer is gone. ChannelError: ``name`` is not declared, or
                somebody else has attached as it.
        """
        return cls(RingReader(SharedMemory.open(endpoint), name))

    def receive(self, timeout: float | None = None) -> Message:
        """Wait for the next message, asleep; use it in a ``with`` statement.

        None waits as long as the producer lives: its death or close ends the wait at once.

        Raises:
            ChannelTimeout: nothing within ``timeout`` seconds; call again.
            ChannelClosed: the producer closed. ChannelPeerDied: the producer died.
        """
        deadline = deadline_after(timeout) if timeout else timeout
        while True:
            use = self._ring.receive(remaining(deadline) if deadline else deadline)
            sequence, form, size, count, total, *_ = self._ring.stamps(use)
            view = self._ring.slot_view(use)
            if form == WHOLE:
                if self._partial is not None:
                    self._drop()
                return self._deliver(sequence, view, count)
            if form == FIRST:
                self._drop()
                self._partial = bytearray(total)
            assert self._partial is not None, "a message begins in its middle"
            self._partial[self._filled : self._filled + size] = view[:size]
            self._filled += size
            if form == LAST:
                assert self._filled == total
                self._ring.settle()
                whole = memoryview(self._partial).toreadonly()
                self._partial, self._filled = None, 0
                return self._deliver(sequence, whole, count)

    def _deliver(self, sequence: int, view: memoryview, count: int) -> Message:
        if self._expected not in (-1, sequence):
            raise ChannelError(
                f"message {sequence} came in place of {self._expected}; this is a bug of SiPipe"
            )
        self._expected = sequence + 1
        lengths = _table(count).unpack_from(view)
        place = (8 * count + 15) & _MASK
        parts = []
        for length in lengths:
            parts.append(view[place : place + length])
            place += (length + 15) & _MASK
            self._bytes += length
        self._messages += 1
        return Message(sequence, tuple(parts), self._ring)

    def _drop(self) -> None:
        if self._partial is not None:
            self._partial, self._filled = None, 0
            self._dropped += 1

    def statistics(self) -> ChannelStatistics:
        """Messages, bytes, waits for messages, and messages that are there now."""
        return ChannelStatistics(
            messages=self._messages,
            bytes=self._bytes,
            waits=self._ring.waits,
            wait_seconds=self._ring.wait_seconds,
            depth=max(0, self._ring.depth()),
            dropped=self._dropped,
        )

    def close(self) -> None:
        """Leave; the producer no longer waits for this reader. Idempotent."""
        self._ring.close()

    def abandon(self) -> None:
        """Go away as if killed; any thread. The producer gets ChannelPeerDied."""
        self._ring.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.lru_cache(maxsize=256)
def _table(count: int) -> struct.Struct:
    """The lengths of ``count`` parts."""
    return struct.Struct(f"<{count}Q")


def _lay_out(
    target: memoryview, views: Sequence[bytes | bytearray | memoryview], sizes: Sequence[int]
) -> int:
    """Write the table and the parts of a message; returns where it ends."""
    _table(len(sizes)).pack_into(target, 0, *sizes)
    place = (8 * len(sizes) + 15) & _MASK
    for view, size in zip(views, sizes, strict=True):
        target[place : place + size] = view
        place += (size + 15) & _MASK
    return place


def _bytes_of(part: Part) -> bytes | bytearray | memoryview:
    """``part`` itself or a view of its bytes."""
    if isinstance(part, bytes | bytearray):
        return part
    view = memoryview(part)
    return view.cast("B") if view.nbytes else b""
