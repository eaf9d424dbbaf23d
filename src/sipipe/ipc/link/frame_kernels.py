"""What runs the rows of :mod:`.frames`: compiled, without the GIL.

Imported when a sender is opened, not before: a vLLM worker must not have Numba loaded while it is
initialized.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit, types

from sipipe.ipc.link.frames import HEAD, IN_PYTHON, PACKET
from sipipe.ipc.link.memory_kernels import copy, publish
from sipipe.ipc.link.records import RECORD_BYTES

__all__ = ["run_queued_row", "run_row", "step_row"]

_CHECKED = RECORD_BYTES - 4
_FLAGS = int(socket.MSG_NOSIGNAL)
_MORE = int(socket.MSG_NOSIGNAL | socket.MSG_MORE)
_EINTR = 4
_LEAD = np.uint64(4 << 20)
"""Bytes still to copy when the record leaves: about as long as the receiver takes to wake up."""
_PIECE = np.uint64(512 << 10)
_STREAM = np.uint64(8 << 20)
"""Bytes of a frame from which on it is copied past the caches. Measured, copy and first reading
together: a fifth less at 8 and 16 MiB, nothing at 4, more below."""

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


def _copy_and_tell(
    row: Any, parts: Any, places: Any, seal_at: Any, descriptor: Any, record: Any
) -> Any:
    """Copy the tensors, with the record sent when ``_LEAD`` bytes are left, and seal the slot."""
    left = np.uint64(0)
    for part in range(parts):
        left += row[places + 2 * part + 1]
    stream = left >= _STREAM
    error, told = np.int64(0), False
    for part in range(parts):
        to, source, end = row[places + 2 * part], row[HEAD + part], row[places + 2 * part + 1]
        done = np.uint64(0)
        while done < end:
            if left <= _LEAD and not told:
                error = _send_all(descriptor, record, np.uint64(RECORD_BYTES), _FLAGS)
                told = True
            piece = min(end - done, _PIECE)
            copy(to + done, source + done, piece, stream)
            done += piece
            left -= piece
    if not told:
        error = _send_all(descriptor, record, np.uint64(RECORD_BYTES), _FLAGS)
    publish(seal_at, row[2])
    return error


_run_copy: Any = njit(nogil=True, cache=True)(_copy_and_tell)


def _run(row: Any) -> Any:
    """Run a row; 0, or the errno of the send that failed."""
    parts = row[0]
    places = HEAD + parts
    seal_at, descriptor = row[places + 2 * parts], row[places + 2 * parts + 1]
    record = np.uint64(row.ctypes.data + 8 * PACKET)
    _check_word(row[PACKET:].view(np.uint8))
    if row[1] == 0:
        return _run_copy(row, parts, places, seal_at, descriptor, record)
    seal = np.uint64(row.ctypes.data + 16)
    error = _send_all(descriptor, record, np.uint64(RECORD_BYTES), _MORE)
    for part in range(parts):
        if error == 0:
            error = _send_all(descriptor, row[HEAD + part], row[places + 2 * part + 1], _MORE)
    if error == 0:
        error = _send_all(descriptor, seal, np.uint64(8), _FLAGS)
    return error


_ROW = types.uint64[::1]
run_row: Callable[[Any], int] = njit([types.int64(_ROW)], nogil=True, cache=True)(_run)


def _run_unless_empty(row: Any) -> Any:
    """:func:`run_row`; ``IN_PYTHON`` for a row that Python must handle."""
    if row[0] == 0:
        return np.int64(IN_PYTHON)
    return run_row(row)


run_queued_row: Callable[[Any], int] = njit([types.int64(_ROW)], nogil=True, cache=True)(
    _run_unless_empty
)


def _step(rows: Any, index: int, doorbell: int, scratch: Any) -> Any:
    """Wait for a ring, then :func:`run_queued_row`."""
    while _read(np.int32(doorbell), np.uint64(scratch.ctypes.data), np.uint64(8)) != 8:
        error = carray(_errno(), 1)[0]
        if error != _EINTR:
            return np.int64(error)
    return run_queued_row(rows[index])


step_row: Callable[[Any, int, int, Any], int] = njit(
    [types.int64(types.uint64[:, ::1], types.int64, types.int64, _ROW)], nogil=True, cache=True
)(_step)
