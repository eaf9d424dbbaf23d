"""BIC-I: one producer's messages to every reader of this host, in order, without a copy.

Who runs here
    The producer's threads, one at a time; each reader in a process or thread of its own. The ring
    (:mod:`sipipe.ipc.ring.ring`) does all synchronization; what is here lays messages out.
Guarantees
    A message is a sequence of parts, written once, whatever the number of readers. One that fits an
    entry is read in place. A larger one is cut into consecutive entries, and each reader puts it
    together in memory of its own. A producer whose time is up amid a cut message gives it up, and
    the readers drop what they have of it.
    A dead reader holds nobody up. The producer hears of it elsewhere, and calls ``remove_reader``.

An entry's header words: sequence, offset of this piece, its bytes, parts, bytes of the message. In
the entry, or in the memory of a reader that puts a message together:

    ┌ 8-byte length of each part ┬ part 0 ┬ part 1 ┬ …   parts start at multiples of 16
"""

import functools
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from sipipe.ipc.errors import ChannelClosed
from sipipe.ipc.ring.ends import RingReader, RingWriter
from sipipe.ipc.ring.layout import Layout, RingEndpoint
from sipipe.ipc.ring.ring import Ring

Part = bytes | bytearray | memoryview
"""Part of a message: any C-contiguous buffer, a NumPy array too."""

_MASK = -16  # parts begin at multiples of 16: & _MASK rounds down


@dataclass(slots=True)
class Message:
    """One received message, a context manager that gives the memory back at its end. ``parts`` are
    read-only, and can be read until then, or the next receive; then the content of an array made
    from one changes: copy what must live longer. ``sequence`` counts the producer's from 0."""

    sequence: int
    parts: Sequence[memoryview]
    _unlock: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            try:  # noqa: SIM105 - suppress() costs as much as all the rest
                part.release()
            except BufferError:
                pass
        self.parts = ()
        self._unlock()


@functools.cache  # as many as there are numbers of parts: a few
def _table(count: int) -> struct.Struct:
    """The lengths of so many parts."""
    return struct.Struct(f"<{count}Q")


def measure(parts: Sequence[Part]) -> tuple[list[Part], int]:
    """The bytes of each part, and how many bytes the message takes with table and padding."""
    views = []
    total = (8 * len(parts) + 15) & _MASK
    for part in parts:
        view = part if type(part) is bytes else _bytes_of(part)
        views.append(view)
        total += (len(view) + 15) & _MASK
    return views, total


def lay_out(target: memoryview, views: Sequence[Part]) -> None:
    """Write the table and the parts of a message."""
    count = len(views)
    _table(count).pack_into(target, 0, *map(len, views))
    place = (8 * count + 15) & _MASK
    for view in views:
        end = place + len(view)
        target[place:end] = view
        place = (end + 15) & _MASK


def parts_in(view: memoryview, count: int) -> list[memoryview]:
    """The parts of the message at the start of ``view``, in place."""
    place = (8 * count + 15) & _MASK
    parts = []
    for size in _table(count).unpack_from(view):
        end = place + size
        parts.append(view[place:end])
        place = (end + 15) & _MASK
    return parts


def _bytes_of(part: Part) -> Part:
    """``part`` itself or a view of its bytes."""
    if isinstance(part, bytes | bytearray):
        return part
    view = memoryview(part)
    return view.cast("B") if view.nbytes else b""


class DispatchProducer:
    """The one writer of a dispatch channel, and its owner. Any thread; publishing and adding a
    reader take turns, removing one does not wait for a publish that is stuck."""

    def __init__(
        self, name: str, entries: int = 16, entry_bytes: int = 1 << 16, readers: Sequence[str] = ()
    ) -> None:
        """Make a channel on this host.

        Args:
            name: for messages, such as ``bic-i``.
            entries: N, 3 or more. A reader may be N - 2 messages late before the producer waits.
            entry_bytes: a message up to about this size is read in place; a larger one is cut.
            readers: of all that will ever open the channel; none misses a message.

        Raises ResourceError: not enough memory.
        """
        self._ring = Ring.create(name, Layout(entries, entry_bytes), readers)
        self.endpoint = self._ring.endpoint
        """Endpoint by which a reader opens the channel, while this process lives."""
        self._writer = RingWriter(self._ring)
        # wait: held for a publish, at most its bound; its end
        self._turns = threading.Lock()  # a new reader's first message is known only between two
        self._sequence = 0
        self._closed = False

    def publish(self, parts: Sequence[Part], timeout: float = 60.0) -> int:
        """Send one message to every reader; returns its sequence number, counted from 0. Raises
        StallError: a late reader still holds the entry after ``timeout`` seconds: nobody
        gets it. ChannelClosed: this producer is closed."""
        with self._turns:
            if self._closed:
                raise ChannelClosed(f"channel {self._ring.channel}: this producer is closed")
            sequence = self._sequence
            views, total = measure(parts)
            writer = self._writer
            if total > self._ring.layout.entry_bytes:
                self._publish_cut(sequence, views, total, timeout)
            else:
                lay_out(writer.reserve(timeout), views)
                writer.publish((sequence, 0, total, len(views), total))
            # From here on the readers run; what follows delays nobody.
            self._sequence = sequence + 1
            writer.claim_nowait()
            return sequence

    def _publish_cut(self, sequence: int, views: Sequence[Part], size: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        source = memoryview(bytearray(size))
        lay_out(source, views)
        for offset in range(0, size, self._ring.layout.entry_bytes):
            piece = source[offset : offset + self._ring.layout.entry_bytes]
            self._writer.reserve(timeout, deadline)[: len(piece)] = piece
            self._writer.publish((sequence, offset, len(piece), len(views), size))

    def add_reader(self, name: str) -> None:
        """Declare a reader whose first message is the next one to be published. It may be a name
        used before, once the reader that had it was removed."""
        with self._turns:
            self._ring.add_reader(name, start=self._writer.next)

    def remove_reader(self, name: str) -> None:
        """Forget a reader, dead or alive; idempotent. One that lives gets ChannelClosed at its next
        receive, and holds the entry that it is at until then: kill it if it is stuck."""
        self._ring.remove_reader(name)

    def close(self) -> None:
        """Readers get all, then ChannelClosed; a publish that waits ends. Idempotent; any thread."""
        self._ring.mark_closed()
        with self._turns:
            self._closed = True
            self._writer.close()


class DispatchReader:
    """One named reader of a dispatch channel. Not for two threads at once."""

    def __init__(self, endpoint: RingEndpoint, name: str) -> None:
        """Attach as the declared reader ``name``. Raises PeerDiedError: the producer is gone."""
        self._ring = RingReader(Ring.attach(endpoint), name)
        self._partial = bytearray()
        self._expected = -1

    def receive(self) -> Message:
        """Wait for the next message, asleep and without a bound; use it in a ``with`` statement.
        Raises ChannelClosed: the producer closed. PeerDiedError: the producer died."""
        ring = self._ring
        _, sequence, offset, size, count, total = ring.receive()
        view = ring.view
        while size != total:  # a piece
            if offset == 0:
                self._partial = bytearray(total)
            self._partial[offset : offset + size] = view[:size]
            if offset + size == total:
                view = memoryview(self._partial).toreadonly()
                self._partial = bytearray()
                ring.unlock_previous()
                break
            _, sequence, offset, size, count, total = ring.receive()
            view = ring.view
        assert self._expected in (sequence, -1), f"message {sequence}, not {self._expected}"
        self._expected = sequence + 1
        return Message(sequence, parts_in(view, count), ring.unlock_previous)

    def close(self) -> None:
        """Leave; the producer no longer waits for this reader. Idempotent."""
        self._ring.close()
