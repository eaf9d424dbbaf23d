"""How logits lie in memory, and the rows that kernels read from them.

    rows       [B, V]        each row is read in place
    shards     [t, B, V / t] tensor-parallel shards: put together in one row of staging memory
    columns    [V, B]        transposed 16 columns at a time into 16 rows of staging memory

Logits are only read, in their own dtype; nothing as large as the matrix is ever copied.
"""

import ctypes
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sipipe.sampler.kernels.layouts import transpose
from sipipe.sampler.kernels.state import STAGED, make_staging

Layout = Literal["rows", "columns"]
Indices = npt.NDArray[np.int64]


Part = tuple[npt.NDArray[Any], Indices, Indices]
"""(flat, starts, which): ``flat[starts[j]:]`` are the logits of call row ``which[j]``."""


class Reader:
    """Reads logits of any layout as contiguous rows; keeps the staging memory that this needs."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._staging: dict[tuple[int, str], npt.NDArray[Any]] = {}

    def parts(self, logits: npt.NDArray[Any], rows: Indices, layout: Layout) -> Iterator[Part]:
        """The call's rows, a part at a time; a part is overwritten when the next one is made.

        ``logits``: float32, float16, bfloat16 or its bits as uint16. ``rows[i]`` is the row (or
        column) of call row i. Raises ValueError or TypeError naming what does not fit.
        """
        stored = _as_stored(logits)
        self._check(stored, rows, layout)
        if rows.size == 0:
            return
        if layout == "columns":
            yield from self._columns(stored, rows)
        elif stored.ndim == 3:
            yield from self._shards(stored, rows)
        else:
            starts = rows * (stored.strides[0] // stored.itemsize)
            yield (_flat(stored), starts, np.arange(rows.size))

    def _columns(self, logits: npt.NDArray[Any], columns: Indices) -> Iterator[Part]:
        flat = _flat(logits)
        staging = self._stage(STAGED, logits.dtype)
        staged, apart = staging.reshape(-1), staging.shape[1]
        stride = logits.strides[0] // logits.itemsize
        batch = logits.shape[1]
        # Windows of 16 neighbours; the last one overlaps, so that it is whole where B >= 16.
        for first in range(0, batch, STAGED):
            which = np.flatnonzero((columns >= first) & (columns < first + STAGED))
            if which.size == 0:
                continue
            window = max(0, min(first, batch - STAGED))
            count = min(STAGED, batch)
            transpose(flat, stride, self._vocab_size, window, count, staged, apart)
            yield (staged, (columns[which] - window) * apart, which)

    def _shards(self, logits: npt.NDArray[Any], rows: Indices) -> Iterator[Part]:
        width = logits.shape[2]
        staged = self._stage(1, logits.dtype)[0]
        for i, row in enumerate(rows.tolist()):
            for first, shard in zip(range(0, self._vocab_size, width), logits, strict=False):
                part = staged[first : min(first + width, self._vocab_size)]
                part[:] = shard[row, : part.size]
            yield (staged, np.zeros(1, np.int64), np.full(1, i))

    def _stage(self, rows: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        key = (rows, dtype.str)
        if key not in self._staging:
            self._staging[key] = make_staging(self._vocab_size, rows, dtype)
        return self._staging[key]

    def _check(self, logits: npt.NDArray[Any], rows: Indices, layout: Layout) -> None:
        if layout not in ("rows", "columns"):
            raise ValueError(f'layout must be "rows" or "columns", got {layout!r}')
        sharded = layout == "rows" and logits.ndim == 3
        if logits.ndim != 2 and not sharded:
            raise ValueError(f"logits must have 2 dimensions, got {logits.ndim}")
        batch = logits.shape[0 if layout == "rows" and not sharded else 1]
        width = logits.shape[0] if layout == "columns" else logits.shape[-1]
        if sharded:
            width *= logits.shape[0]
        if width < self._vocab_size:
            raise ValueError(f"logits: {width} tokens, fewer than vocab_size {self._vocab_size}")
        if rows.size and not (rows.min() >= 0 and rows.max() < batch):
            raise ValueError(f"rows must be in [0, {batch})")
        if logits.size and logits.shape[-1] > 1 and logits.strides[-1] != logits.itemsize:
            raise ValueError("logits must be contiguous in their last dimension")


def _as_stored(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory with the dtype kernels know: float32, uint16 (bfloat16), int16 (float16)."""
    if logits.dtype in (np.float32, np.uint16):
        return logits
    if logits.dtype == np.float16:
        return logits.view(np.int16)
    if logits.dtype.name == "bfloat16":  # ml_dtypes
        return logits.view(np.uint16)
    raise TypeError(
        f"logits must be float32, float16 or bfloat16 (uint16 bits), not {logits.dtype}"
    )


def _flat(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The memory from an array's first element to its last, as one dimension."""
    if array.flags.c_contiguous:
        return writeable(array.reshape(-1))
    strides = array.strides
    size = 1 + sum(
        (length - 1) * stride // array.itemsize
        for length, stride in zip(array.shape, strides, strict=True)
    )
    flat = np.lib.stride_tricks.as_strided(array, (size,), (array.itemsize,))
    return writeable(flat)


def writeable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory without the read-only mark: kernels are compiled for one array type only.

    No kernel writes to what it got this way.
    """
    if array.flags.writeable:
        return array
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    view: npt.NDArray[Any] = np.frombuffer(memoryview(memory), array.dtype).reshape(array.shape)
    return view
