"""BIC-L: logits that the last stage's ranks write in place and the samplers read in place.

Who runs here
    One writer process per tensor-parallel rank, any number of readers, and the owner of the memory.
Guarantees
    An iteration's logits are a contiguous array ``[batch, V]``, each rank writing its part of V.
Relies on
    The engine, which gives iterations in flight rows that do not overlap, and tells all ranks the
    same (:mod:`sipipe.engine.iteration.logits_room`). An entry of the ring is a header: where the rows are.
    The ring (:mod:`sipipe.ipc.ring.ring`) does all synchronization: rank r holds lock r of an
    entry, and a reader takes all of them in one system call, so it sleeps until the last is free.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy.typing as npt

from sipipe.ipc.ring.ends import RingReader, RingWriter
from sipipe.ipc.ring.layout import Layout, RingEndpoint
from sipipe.ipc.ring.ring import Ring
from sipipe.messages.logits import LogitsShape


class LogitsEndpoint(msgspec.Struct, frozen=True):
    """Endpoint by which writers and readers attach."""

    ring: RingEndpoint
    shape: LogitsShape


class LogitsChannel:
    """The owner of a logits channel. It need not write or read."""

    def __init__(
        self, name: str, shape: LogitsShape, *, rows: int, entries: int, readers: Sequence[str] = ()
    ) -> None:
        """Make the memory. ``rows``: of all iterations that are in it at once, with the gaps between
        them. ``entries``: 3 or more; microbatches in flight + 2 keep every undrawn iteration for a
        sampler that is restarted. ``readers``: the samplers. ResourceError: too little memory."""
        self._ring = Ring.create(name, logits_layout(shape, rows, entries), readers)
        self.endpoint = LogitsEndpoint(self._ring.endpoint, shape)
        """Endpoint for writers and readers, while this process lives."""

    def add_reader(self, name: str) -> None:
        """Declare a reader, such as a restarted sampler. It begins with the oldest complete
        iteration in the ring, so that it can draw what its predecessor owed."""
        self._ring.add_reader(name, start=-1)

    def remove_reader(self, name: str) -> None:
        """Forget a reader, dead or alive. Idempotent."""
        self._ring.remove_reader(name)

    def behind(self) -> dict[str, int]:
        """Map each reader that is not done with what is complete to the use it is at; -1: not attached."""
        end = min(self._ring.published(rank) for rank in range(self.endpoint.shape.ranks))
        at = {name: self._ring.cursor(k) for k, name in self._ring.readers()}
        return {name: use for name, use in at.items() if use < end}

    def close(self) -> None:
        """Give the memory back and close the channel. Idempotent."""
        if not self._ring.closed:
            self._ring.mark_closed()
            self._ring.close()


class LogitsWriter:
    """One rank's writer. Not for two threads at once."""

    def __init__(self, endpoint: LogitsEndpoint, rank: int = 0) -> None:
        """Attach as the writer of ``rank``; one per rank and channel."""
        self._ring = RingWriter(Ring.attach(endpoint.ring), rank)
        self._shape = endpoint.shape

    @property
    def buffer(self) -> memoryview:
        """All rows, page-aligned and contiguous: what is page-locked once for a device."""
        return self._ring.ring.payload

    def part(self, row: int, batch: int) -> npt.NDArray[Any]:
        """This rank's part of ``batch`` rows from ``row`` on: what :meth:`acquire` gives. It may be
        written before: nobody reads it before it is published."""
        assert (row + batch) * self._shape.row_bytes <= len(self.buffer), (row, batch, self._shape)
        return self._shape.part(self._shape.array(self.buffer, row, batch), self._ring.rank)

    @contextlib.contextmanager
    def acquire(
        self, iteration: int, batch: int, row: int, timeout: float = 60.0
    ) -> Iterator[npt.NDArray[Any]]:
        """This rank's part of the iteration's rows from ``row`` on, ``[batch, V/t]``, writable;
        published when the block ends well. Else the next call takes the same entry again. Raises
        StallError: a late sampler still reads the entry after ``timeout`` seconds."""
        part = self.part(row, batch)
        self._ring.reserve(timeout)
        yield part
        self._ring.publish((iteration, batch, row, 0, 0))
        self._ring.claim_nowait()

    def close(self) -> None:
        """Readers get what was published, then ChannelClosed. Idempotent."""
        self._ring.close()


@dataclass(slots=True)
class ReceivedLogits:
    """One iteration's logits, valid until the block ends, at the latest until the next receive."""

    iteration: int
    batch: int
    array: npt.NDArray[Any]
    _ring: RingReader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the writer use the memory again; the array is empty from now on."""
        self.array = self.array[:0]
        self._ring.unlock_previous()


class LogitsReader:
    """One sampler's side. Not for two threads at once."""

    def __init__(self, endpoint: LogitsEndpoint, name: str) -> None:
        """Attach as the declared reader ``name``; raises what :class:`.DispatchReader` does."""
        self._ring = RingReader(Ring.attach(endpoint.ring), name)
        self._shape = endpoint.shape
        self._rows = self._ring.ring.payload.toreadonly()

    def receive(self) -> ReceivedLogits:
        """Wait, asleep, until every rank has published the next iteration: its ``array``
        ``[batch, V]`` is read-only, in place. Errors are those of :meth:`DispatchReader.receive`."""
        _, iteration, batch, row, _, _ = self._ring.receive()
        for rank in range(1, self._shape.ranks):
            other = self._ring.header(rank)[1:4]
            assert other == [iteration, batch, row], f"ranks disagree: {other}, rank {rank}"
        array = self._shape.array(self._rows, row, batch)
        return ReceivedLogits(iteration, batch, array, self._ring)

    def catch_up(self) -> None:
        """None of the iterations that are there is wanted: until more come, it is not behind."""
        self._ring.catch_up()

    def close(self) -> None:
        """Leave; the writers no longer wait for this reader. Idempotent."""
        self._ring.close()


def logits_layout(shape: LogitsShape, rows: int, entries: int) -> Layout:
    """The one place that knows the ring of a logits channel."""
    return Layout(entries, 0, shape.ranks, arena=rows * shape.row_bytes)
