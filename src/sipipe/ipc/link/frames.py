"""Frames as short programs of copies and sends, which run without the GIL.

Who runs here: the thread that calls :meth:`.Sender.send` writes rows and rings; the sender's own
thread waits in :meth:`FrameQueue.step` and runs them (or the caller itself does, for a frame that
is quick to send). Guarantees: rows run in the order in which they were rung; between the ring and
the last byte handed to the kernel no Python runs and the GIL is not wanted, so a caller that goes
on computing in Python holds no frame up (where both share one core, the GIL is wanted once).
Relies on: the doorbell's system calls for memory order (a row is written before it is rung, and
read after); the sender's credit, which never lets a row be written again before it ran (see
:class:`FrameQueue`).

One row, in words of 8 bytes, for a frame of k tensors::

    ┌───┬──────┬──────┬─────────────┬─────────────────┬─────────┬────────────┬───┬─────────────┐
    │ k │ kind │ seal │ k addresses │ k times to,size │ seal at │ descriptor │ … │ record, 48 B│
    └───┴──────┴──────┴─────────────┴─────────────────┴─────────┴────────────┴───┴─────────────┘
              changes every frame     the same for a slot, structure and number of tokens

It is written by one ``pack_into``: after a forward pass, Python runs on cold caches, where each
line of it costs a microsecond. Where the frame was posted that happened before, and the addresses
alone are put in. The record's check word is put in when the row runs; its place
holds the link's seed till then. k is 0 in a row that Python must handle.

Rejected: a thread that runs Python for every frame (two waits for the GIL and 50 to 100 µs of
interpreter on cold caches between the end of the forward and the copy); a C extension (a compiler
at installation, for the thirty lines that Numba compiles here).
"""

from __future__ import annotations

import enum
import functools
import os
import queue
import struct
from collections.abc import Callable

import numpy as np

from sipipe.ipc.link.records import LAYOUT

__all__ = ["MAX_PARTS", "FrameQueue", "Row", "RowKind"]

MAX_PARTS = 12
"""Tensors of a frame; one with more is left to Python."""

HEAD = 3
PACKET = -(-(HEAD + 3 * MAX_PARTS + 2) // 8) * 8  # records begin on cache lines
_WORDS = PACKET + 8
_FORMATS = [
    struct.Struct(f"<{HEAD + 3 * k + 2}Q{8 * (PACKET - HEAD - 3 * k - 2)}x{LAYOUT}")
    for k in range(MAX_PARTS + 1)
]
IN_PYTHON = -1


class RowKind(enum.IntEnum):
    """What is done with a row."""

    COPY = 0
    """Copy the tensors, then the seal, to their places; the record (one packet) leaves before the
    end of it."""
    STREAM = 1
    """Send record, tensors and seal, one behind the other."""


class Row:
    """One frame's place."""

    def __init__(
        self,
        words: np.ndarray,
        run: Callable[[np.ndarray], int],
        run_queued: Callable[[np.ndarray], int],
    ) -> None:
        self._words = words
        self._run = run
        self.run_queued = functools.partial(run_queued, words)
        """As :meth:`run`, but ``IN_PYTHON`` for a row left to Python."""
        self._buffer = words.data.cast("B")
        self._head = self._buffer.cast("Q")

    def write(
        self,
        kind: int,
        seal: int,
        addresses: list[int],
        places: tuple[int, ...],
        record: tuple[int, ...],
    ) -> None:
        """Fill the row.

        Args:
            kind: a :class:`RowKind`.
            seal: the check word behind the data.
            addresses: of the tensors, at most :data:`MAX_PARTS`.
            places: where each goes and how many bytes it has, where the seal goes, and the
                descriptor to send on.
            record: what :meth:`.RecordCodec.fields` says.
        """
        parts = len(addresses)
        _FORMATS[parts].pack_into(self._buffer, 0, parts, kind, seal, *addresses, *places, *record)

    def place(self, addresses: list[int]) -> None:
        """Fill in the tensors of a row that was written before they were there."""
        head = self._head
        for index, address in enumerate(addresses, HEAD):
            head[index] = address

    def leave_to_python(self) -> None:
        """Say that Python must handle this frame."""
        self._words[0] = 0

    def run(self) -> int:
        """Run the row now, on this thread, without the GIL; 0 or an errno."""
        return self._run(self._words)


class FrameQueue:
    """Rows between the thread that calls ``send`` and the one that transmits."""

    def __init__(self, depth: int) -> None:
        from sipipe.ipc.link.frame_kernels import run_queued_row, run_row, step_row

        self._step_row = step_row
        self._words = np.zeros((depth + 2, _WORDS), np.uint64)
        # Invariant: row n is written again only after it ran. Frame n + depth has a slot, so one
        # of the frames n … n + depth - 1 was released, so it was taken; frames are taken in
        # order, so frame n was too, and sealed before; the seal is the last that a row is read for.
        # One more row is for closing.
        self._rows = [Row(words, run_row, run_queued_row) for words in self._words]
        self._turn = depth + 1
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._scratch = np.zeros(1, np.uint64)
        self._one_core = len(os.sched_getaffinity(0)) == 1
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._written = 0  # by the thread that calls send()
        self._done = 0  # by the thread that transmits

    @property
    def own(self) -> Row:
        """A row for the caller's own use, outside the queue."""
        return self._rows[-1]

    def row(self, ahead: int = 0) -> Row:
        """The row that the next :meth:`ring` is about, or the one ``ahead`` rings after it."""
        return self._rows[(self._written + ahead) % self._turn]

    def ring(self) -> None:
        """Hand the row over."""
        self._written += 1
        if self._one_core:
            self._calls.put(None)
        else:
            os.eventfd_write(self._doorbell, 1)

    def step(self) -> int | None:
        """Wait for the next row and run it; 0, an errno, or None for one left to Python.

        No bound: an idle engine sends nothing for hours, and closing rings as well.
        """
        index = self._done % self._turn
        if self._one_core:
            # Wakes up wanting the GIL, which the caller keeps until it is out of send(): without
            # this the copy would push it off the core that they share.
            self._calls.get()
            result = self._rows[index].run_queued()
        else:
            result = self._step_row(self._words, index, self._doorbell, self._scratch)
        self._done += 1
        return None if result == IN_PYTHON else result

    def close(self) -> None:
        """Give the doorbell back; nobody waits for it any more."""
        if self._doorbell >= 0:
            os.close(self._doorbell)
            self._doorbell = -1
