"""BIC-L: logits slots that the last stage's ranks write in place and samplers read in place.

Who runs here: one writer process per tensor-parallel rank, any number of reader processes, and
the owner, who made the memory (one of them or another). The ring below does all synchronization:
rank r holds lock r of a slot, and a reader takes the locks of all ranks in one system call, so it
sleeps until the last rank has published.

A slot is one contiguous array of ``batch`` sequences, for ``batch`` up to the maximum:

* layout ``columns``: ``[V, batch]``, the paper's; rank r of t writes rows ``[rV/t, (r+1)V/t)``,
  contiguous, so that tensor-parallel shards are concatenated by being written (or, with
  ``shard``, rows ``[r shard, (r+1) shard)`` as far as V goes: vLLM pads its vocabulary);
* layout ``rows``: ``[batch, V]``; rank r writes those columns of every row.

On a CUDA machine :attr:`LogitsWriter.buffer` is what to
page-lock (``cudaHostRegister``) once, after which the device copies straight into the slot.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import numpy.typing as npt

from sipipe.ipc.errors import ChannelConfigError, ChannelError
from sipipe.ipc.memory import Endpoint, SharedMemory
from sipipe.ipc.ring import layout as at
from sipipe.ipc.ring.ends import End, ReaderEnd
from sipipe.ipc.ring.layout import Layout, required_bytes
from sipipe.ipc.ring.logits_shape import LogitsShape
from sipipe.ipc.ring.owner import RingOwner, Side
from sipipe.ipc.ring.reader import RingReader
from sipipe.ipc.ring.writer import RingWriter
from sipipe.ipc.statistics import ChannelStatistics

__all__ = ["LogitsChannel", "LogitsReader", "LogitsSlot", "LogitsWriter"]


def _shape_of(ring: Side) -> LogitsShape:
    return LogitsShape.of_words(tuple(ring.words.load(at.FRAMING + i) for i in range(4)))


class LogitsChannel(End):
    """The owner of a logits channel. It need not write or read."""

    def __init__(self, ring: RingOwner) -> None:
        """Use :meth:`create`."""
        self._ring = ring

    @classmethod
    def create(
        cls,
        name: str,
        *,
        slots: int,
        vocab: int,
        batch: int,
        dtype: Literal["float32", "float16", "bfloat16"] = "float32",
        layout: Literal["columns", "rows"] = "rows",
        ranks: int = 1,
        shard: int | None = None,
        readers: Sequence[str] = (),
        directory: str | None = None,
    ) -> LogitsChannel:
        """Make the memory: ``slots`` arrays of ``vocab`` by up to ``batch``.

        Args:
            name: for messages, such as ``bic-l``.
            slots: N, 3 or more; microbatches in flight + 2 keeps every undrawn iteration for a
                sampler that is restarted.
            ranks: tensor-parallel writers, each its own region.
            shard: columns of each rank, the last ones having what is left of the vocabulary, which
                may be none; None: even parts.
            readers: names of the samplers.
            directory: where the memory lies; None: a memfd.

        Raises:
            ResourceError: not enough memory. ChannelConfigError: a size that cannot work.
        """
        shape = LogitsShape.checked(name, vocab, batch, dtype, layout)
        return cls.of_shape(
            name,
            shape,
            slots=slots,
            ranks=ranks,
            shard=shard,
            readers=readers,
            directory=directory,
        )

    @classmethod
    def of_shape(
        cls,
        name: str,
        shape: LogitsShape,
        *,
        slots: int,
        ranks: int = 1,
        shard: int | None = None,
        readers: Sequence[str] = (),
        directory: str | None = None,
    ) -> LogitsChannel:
        """Like :meth:`create`, for an array like another channel's."""
        if not 1 <= ranks <= shape.vocab:
            raise ChannelConfigError(
                f"channel {name}: {ranks} ranks cannot share a vocabulary of {shape.vocab}"
            )
        if shard is not None and not (shard >= 1 and shard * ranks >= shape.vocab):
            raise ChannelConfigError(
                f"channel {name}: {ranks} shards of {shard} columns do not cover {shape.vocab}"
            )
        sizes = Layout(slots, shape.slot_bytes, ranks)
        return cls(
            RingOwner.create(name, sizes, list(readers), directory, (*shape.words, shard or 0))
        )

    @staticmethod
    def required_bytes(
        *, slots: int, vocab: int, batch: int, dtype: str = "float32", ranks: int = 1
    ) -> int:
        """Shared memory that such a channel takes."""
        slot_bytes = LogitsShape(vocab, batch, dtype).slot_bytes
        return required_bytes(slots=slots, slot_bytes=slot_bytes, ranks=ranks)

    @property
    def endpoint(self) -> Endpoint:
        """What writers and readers need, while this process lives."""
        return self._ring.endpoint

    def add_reader(self, name: str) -> None:
        """Declare a reader, for example a restarted sampler. It begins with the oldest iteration
        that is complete and still in the ring, so that it can draw what its predecessor owed."""
        self._ring.add_reader(name, start=-1)

    def remove_reader(self, name: str) -> None:
        """Forget a reader, dead or alive."""
        self._ring.remove_reader(name)

    def close(self) -> None:
        """Let go of the memory and close the channel. Idempotent."""
        if self._ring.locks.fd >= 0:
            self._ring.mark_closed()
            self._ring.close()

    def abandon(self) -> None:
        """Let go of the memory as if killed."""
        self._ring.close()


class LogitsWriter(End):
    """One rank's writer. Not for two threads at once."""

    def __init__(self, ring: RingWriter) -> None:
        """Use :meth:`open`."""
        self._ring = ring
        self._shape = _shape_of(ring)
        self._shard = ring.words.load(at.FRAMING + 4)
        self._messages = 0
        self._bytes = 0

    @classmethod
    def open(cls, endpoint: Endpoint, rank: int = 0) -> LogitsWriter:
        """Attach as the writer of ``rank``; one per rank and channel."""
        memory = SharedMemory.open(endpoint)
        return cls(RingWriter(memory, rank))

    @property
    def buffer(self) -> memoryview:
        """All slots, page-aligned and contiguous: what to page-lock once for a device."""
        return self._ring.payload

    def ahead(self, batch: int) -> npt.NDArray[Any]:
        """The region that the next :meth:`acquire` of ``batch`` sequences gives, without a wait.

        It may be written already: nobody reads it before it is published.
        """
        array = self._shape.array(self._ring.ahead, batch)
        return self._shape.region(array, self._ring.rank, self._ring.layout.ranks, self._shard)

    @contextlib.contextmanager
    def acquire(
        self, iteration: int, batch: int, timeout: float | None = None
    ) -> Iterator[npt.NDArray[Any]]:
        """This rank's region of the next slot, writable; published when the block ends well.

        Yields ``[V/t, batch]`` (columns) or ``[batch, V/t]`` (rows). After an exception in the
        block nothing is published, and the next call gives the same slot again.

        Raises:
            ChannelTimeout: a late sampler still reads the slot after ``timeout`` seconds.
        """
        if not 0 <= batch <= self._shape.batch:
            raise ChannelError(
                f"channel {self._ring.channel}: batch {batch} is above {self._shape.batch}"
            )
        self._ring.reserve(timeout)
        region = self.ahead(batch)
        yield region
        self._ring.publish((iteration, batch, 0, 0, 0))
        self._ring.claim_nowait()
        self._messages += 1
        self._bytes += math.prod(region.shape) * region.itemsize

    def statistics(self) -> ChannelStatistics:
        """Iterations and bytes of this rank, waits for late samplers, depth."""
        return self._ring.statistics(self._messages, self._bytes)

    def close(self) -> None:
        """Readers get what was published, then ChannelClosed. Idempotent."""
        self._ring.close()

    def abandon(self) -> None:
        """Go away as if killed: readers get ChannelPeerDied after what was published."""
        self._ring.abandon()


class LogitsSlot:
    """One iteration's logits, valid until the block ends, at the latest until the next receive."""

    __slots__ = ("_ring", "array", "batch", "iteration")

    def __init__(
        self, iteration: int, batch: int, array: npt.NDArray[Any], ring: RingReader
    ) -> None:
        self._ring = ring
        self.iteration = iteration
        self.batch = batch
        self.array = array

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.array = self.array[:0]
        self._ring.settle()


class LogitsReader(ReaderEnd):
    """One sampler's side. Not for two threads at once."""

    def __init__(self, ring: RingReader) -> None:
        """Use :meth:`open`."""
        super().__init__(ring)
        self.shape = _shape_of(ring)

    def receive(self, timeout: float | None = None) -> LogitsSlot:
        """Wait, asleep, until every rank has published the next iteration.

        Returns its ``iteration``, ``batch`` and ``array``: ``[V, batch]`` or ``[batch, V]``,
        read-only, in place. Errors are those of :meth:`DispatchReader.receive`.
        """
        _, iteration, batch, *_ = self._ring.receive(timeout)
        for rank in range(1, self._ring.layout.ranks):
            other = self._ring.slot_words(rank)[1:3]
            assert other == (iteration, batch), f"ranks disagree: {other}, rank {rank}"
        array = self.shape.array(self._ring.view, batch)
        self._messages += 1
        self._bytes += array.nbytes
        return LogitsSlot(iteration, batch, array, self._ring)
