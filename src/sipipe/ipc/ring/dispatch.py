"""BIC-I: one producer's messages to every reader of this host, in order, without a copy.

Who runs here: the producer's threads, one at a time; each reader
(:mod:`sipipe.ipc.ring.dispatch_reader`) in a process or thread of its own. The ring does all
synchronization; what is here lays messages out in slots.

A message is a sequence of parts (:mod:`sipipe.ipc.ring.message`), written once, whatever the
number of readers. A slot's stamps: sequence, form, bytes (of the parts, of this piece if cut),
parts, total bytes.

A message that does not fit one slot is cut into consecutive slots (form FIRST, MIDDLE, LAST), and
each reader puts it together in memory of its own; one that fits (form WHOLE) is read in place.
A producer whose time is up amid a cut message gives it up: the next message begins with WHOLE or
FIRST, and the readers drop what they have of the old one.

Rejected: deltas against the last message of a microbatch's slot. A part of 4 KB that need not be
copied saves a tenth of a microsecond of forty (docs/log.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from sipipe.ipc.errors import ChannelClosed, ChannelPeerDied
from sipipe.ipc.locks import deadline_after, remaining
from sipipe.ipc.memory import Endpoint
from sipipe.ipc.peers import ReaderWatch
from sipipe.ipc.ring.dispatch_reader import FIRST, LAST, MIDDLE, WHOLE
from sipipe.ipc.ring.ends import End
from sipipe.ipc.ring.layout import Layout
from sipipe.ipc.ring.message import Bytes, Part, lay_out, measure
from sipipe.ipc.ring.owner import RingOwner
from sipipe.ipc.ring.writer import RingWriter
from sipipe.ipc.statistics import ChannelStatistics

__all__ = ["DispatchProducer"]


class DispatchProducer(End):
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
        self._slot_bytes = owner.layout.slot_bytes
        self._watch = ReaderWatch(owner)
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
                stream of messages it is found within 5 ms.
            ChannelTimeout: a late reader still holds the slot after ``timeout`` seconds. Nothing
                was published; the call may be made again.
            ChannelClosed: this producer is closed.
        """
        with self._turns:
            watch = self._watch
            if not self._closed and time.monotonic() > watch.look_first_at:
                watch.look()
            if self._closed or watch.suspect is not None:
                self._refuse()
            if sequence is None:
                sequence = self._sequence
            views, payload, total = measure(parts)
            writer = self._writer
            if total > self._slot_bytes:
                self._publish_cut(sequence, views, total, deadline_after(timeout))
            else:
                lay_out(writer.reserve(timeout), views)
                writer.publish((sequence, WHOLE, payload, len(views), total))
            # From here on the readers run; what follows delays nobody.
            self._sequence = sequence + 1
            self._messages += 1
            self._bytes += payload
            if not self._closed:
                watch.look()
            writer.claim_nowait()
            return sequence

    def _publish_cut(
        self,
        sequence: int,
        views: Sequence[Bytes],
        total: int,
        deadline: float | None,
    ) -> None:
        size = self._slot_bytes
        source = memoryview(bytearray(total))
        lay_out(source, views)
        for start in range(0, total, size):
            piece = source[start : start + size]
            form = FIRST if start == 0 else LAST if start + size >= total else MIDDLE
            self._writer.reserve(remaining(deadline))[: len(piece)] = piece
            self._writer.publish((sequence, form, len(piece), len(views), total))

    def _refuse(self) -> None:
        if self._closed:
            raise ChannelClosed(f"channel {self._owner.channel}: this producer is closed")
        # Looked at again: it may have been removed meanwhile, and others may have died.
        self._watch.suspect = next(iter(self._watch.dead()), None)
        if self._watch.suspect is not None:
            raise ChannelPeerDied(
                f"channel {self._owner.channel}: reader {self._watch.suspect} died; "
                "nothing was sent, remove it and send again",
                self._watch.suspect,
            )

    def dead_readers(self) -> tuple[str, ...]:
        """Names of the attached readers that are dead now."""
        return self._watch.dead()

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
            self._watch.changed()

    def remove_reader(self, name: str) -> None:
        """Forget a reader, dead or alive. One that lives gets ChannelClosed at its next receive;
        until then it still holds the slot that it is at, so kill it if it is stuck."""
        self._owner.remove_reader(name)
        self._watch.changed()

    def statistics(self) -> ChannelStatistics:
        """Messages, bytes, waits for late readers, and how far the slowest reader is behind."""
        return self._writer.statistics(self._messages, self._bytes)

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
