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
line of it costs a microsecond. The record's check word is put in when the row runs; its place
holds the link's seed till then. k is 0 in a row that Python must handle.

Rejected: a thread that runs Python for every frame (two waits for the GIL and 50 to 100 µs of
interpreter on cold caches between the end of the forward and the copy); a C extension (a compiler
at installation, for the thirty lines that Numba compiles here).
"""

from __future__ import annotations

import enum
import os
import queue
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit, types

from sipipe.transfer.records import LAYOUT, RECORD_BYTES

__all__ = ["MAX_PARTS", "FrameQueue", "Row", "RowKind"]

MAX_PARTS = 12
"""Tensors of a frame; one with more is left to Python."""

_HEAD = 3
_PACKET = -(-(_HEAD + 3 * MAX_PARTS + 2) // 8) * 8  # records begin on cache lines
_WORDS = _PACKET + 8
_FORMATS = [
    struct.Struct(f"<{_HEAD + 3 * k + 2}Q{8 * (_PACKET - _HEAD - 3 * k - 2)}x{LAYOUT}")
    for k in range(MAX_PARTS + 1)
]
_CHECKED = RECORD_BYTES - 4
_FLAGS = int(socket.MSG_NOSIGNAL)
_MORE = int(socket.MSG_NOSIGNAL | socket.MSG_MORE)
_EINTR = 4
_IN_PYTHON = -1


class RowKind(enum.IntEnum):
    """What is done with a row."""

    COPY = 0
    """Copy the tensors and the seal to their places, then send the record (one packet)."""
    STREAM = 1
    """Send record, tensors and seal, one behind the other."""


_memcpy: Any = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
_send: Any = types.ExternalFunction(
    "send", types.intp(types.int32, types.uintp, types.uintp, types.int32)
)
_read: Any = types.ExternalFunction("read", types.intp(types.int32, types.uintp, types.uintp))
_errno: Any = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())


def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ 0xEDB88320, table >> 1)
    return table.astype(np.uint64)


_CRC = _crc_table()


def _send_whole(descriptor: Any, address: Any, left: Any, flags: Any) -> Any:
    """0, or an errno."""
    while left > 0:
        sent = _send(np.int32(descriptor), np.uint64(address), np.uint64(left), np.int32(flags))
        if sent >= 0:
            address += np.uint64(sent)
            left -= np.uint64(sent)
        elif carray(_errno(), 1)[0] != _EINTR:
            return np.int64(carray(_errno(), 1)[0])
    return np.int64(0)


def _put_check(packet: Any) -> None:
    """zlib's CRC-32 of a record, from the seed in the check word's place, into that place."""
    check = np.uint64(0)
    for index in range(4):
        check |= np.uint64(packet[_CHECKED + index]) << np.uint64(8 * index)
    check ^= np.uint64(0xFFFFFFFF)
    for index in range(_CHECKED):
        low = (check ^ np.uint64(packet[index])) & np.uint64(255)
        check = _CRC[low] ^ (check >> np.uint64(8))
    check ^= np.uint64(0xFFFFFFFF)
    for index in range(4):
        packet[_CHECKED + index] = np.uint8((check >> np.uint64(8 * index)) & np.uint64(255))


_send_all: Any = njit(nogil=True, cache=True)(_send_whole)
_check_word: Any = njit(nogil=True, cache=True)(_put_check)


def _run(row: Any) -> Any:
    """Run a row; 0, or the errno of the send that failed."""
    parts = row[0]
    places = _HEAD + parts
    seal_at, descriptor = row[places + 2 * parts], row[places + 2 * parts + 1]
    seal = np.uint64(row.ctypes.data + 16)
    record = np.uint64(row.ctypes.data + 8 * _PACKET)
    _check_word(row[_PACKET:].view(np.uint8))
    if row[1] == 0:
        for part in range(parts):
            _memcpy(row[places + 2 * part], row[_HEAD + part], row[places + 2 * part + 1])
        _memcpy(seal_at, seal, np.uint64(8))
        return _send_all(descriptor, record, np.uint64(RECORD_BYTES), _FLAGS)
    error = _send_all(descriptor, record, np.uint64(RECORD_BYTES), _MORE)
    for part in range(parts):
        if error == 0:
            error = _send_all(descriptor, row[_HEAD + part], row[places + 2 * part + 1], _MORE)
    if error == 0:
        error = _send_all(descriptor, seal, np.uint64(8), _FLAGS)
    return error


_ROW = types.uint64[::1]
_run_row: Callable[[Any], int] = njit([types.int64(_ROW)], nogil=True, cache=True)(_run)


def _step(rows: Any, index: int, doorbell: int, scratch: Any) -> Any:
    """Wait for a ring, then run the row; ``_IN_PYTHON`` for one that Python must handle."""
    while _read(np.int32(doorbell), np.uint64(scratch.ctypes.data), np.uint64(8)) != 8:
        error = carray(_errno(), 1)[0]
        if error != _EINTR:
            return np.int64(error)
    row = rows[index]
    if row[0] == 0:
        return np.int64(_IN_PYTHON)
    return _run_row(row)


_step_row: Callable[[Any, int, int, Any], int] = njit(
    [types.int64(types.uint64[:, ::1], types.int64, types.int64, _ROW)], nogil=True, cache=True
)(_step)


class Row:
    """One frame's place."""

    def __init__(self, words: np.ndarray) -> None:
        self._words = words
        self._buffer = words.data.cast("B")

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

    def leave_to_python(self) -> None:
        """Say that Python must handle this frame."""
        self._words[0] = 0

    def run(self) -> int:
        """Run the row now, on this thread, without the GIL; 0 or an errno."""
        return _run_row(self._words)


class FrameQueue:
    """Rows between the thread that calls ``send`` and the one that transmits."""

    def __init__(self, depth: int) -> None:
        self._words = np.zeros((depth + 2, _WORDS), np.uint64)
        # Invariant: row n is written again only after it ran. Frame n + depth has a slot, so one
        # of the frames n … n + depth - 1 was released, so it was taken; frames are taken in
        # order, so frame n was too, and it had been run before. One more row is for closing.
        self._rows = [Row(words) for words in self._words]
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

    def row(self) -> Row:
        """The row that the next :meth:`ring` is about."""
        return self._rows[self._written % self._turn]

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
            result = _run_row(self._words[index]) if self._words[index, 0] else _IN_PYTHON
        else:
            result = _step_row(self._words, index, self._doorbell, self._scratch)
        self._done += 1
        return None if result == _IN_PYTHON else result

    def close(self) -> None:
        """Give the doorbell back; nobody waits for it any more."""
        if self._doorbell >= 0:
            os.close(self._doorbell)
            self._doorbell = -1
