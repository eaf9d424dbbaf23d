"""One call for all rows of a microbatch, for each way that logits may lie in memory.

    rows       [B, V]        each row is read in place, as it is
    shards     [t, B, V / t] tensor-parallel shards: put together in one float32 row of work memory
    columns    [V, B]        transposed 16 columns at a time into 16 float32 rows of work memory

No copy is ever larger than 16 rows, whatever the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sipipe.sampling._jit import kernel
from sipipe.sampling.blocks import block_copy, block_mask, element
from sipipe.sampling.rows import Columns, Extras, Output, copy_row, draw_row
from sipipe.sampling.scan import NOTHING
from sipipe.sampling.work import GROUP, Work


@kernel
def _mask_row(row: Any, vocab: Any, i: Any, extras: Any) -> None:
    """Apply allowed token ids and the grammar's bitmask of call row ``i`` to a float32 row."""
    first, last = extras.allowed[i], extras.allowed[i + 1]
    if last > first:  # ascending, unique: everything between is masked
        at = 0
        for j in range(first, last):
            token = extras.allowed_tokens[j]
            row[at:token] = NOTHING
            at = token + 1
        row[at:vocab] = NOTHING
    m = extras.mask_rows[i]
    if m >= 0:
        words = extras.mask[m]
        full = vocab >> 8
        for b in range(full):
            block_mask(row, b << 8, words, b << 3)
        for t in range(full << 8, vocab):
            if not (words[t >> 5] >> (t & 31)) & 1:
                row[t] = NOTHING


@kernel
def _is_masked(i: Any, extras: Any) -> Any:
    return extras.mask_rows[i] >= 0 or extras.allowed[i + 1] > extras.allowed[i]


@kernel
def sample_rows(
    flat: Any,
    starts: Any,
    vocab: Any,
    indices: Any,
    columns: Columns,
    extras: Extras,
    mode: Any,
    work: Work,
    out: Output,
) -> None:
    """Row layout: row i is ``flat[starts[i] : starts[i] + vocab]``, of column ``indices[i]``."""
    for i in range(starts.size):
        x = flat[starts[i] : starts[i] + vocab]
        row = work.rows[0]
        if _is_masked(i, extras):
            copy_row(x, vocab, row)
            _mask_row(row, vocab, i, extras)
            draw_row(row, row, True, vocab, i, indices[i], columns, extras, mode, work, out)
        else:
            draw_row(x, row, False, vocab, i, indices[i], columns, extras, mode, work, out)


@kernel
def sample_shards(
    flat: Any,
    starts: Any,
    shards: Any,
    width: Any,
    stride: Any,
    vocab: Any,
    indices: Any,
    columns: Columns,
    extras: Extras,
    mode: Any,
    work: Work,
    out: Output,
) -> None:
    """Shard s of row i is ``flat[starts[i] + s * stride :][:width]``."""
    row = work.rows[0]
    for i in range(starts.size):
        for s in range(shards):
            at = starts[i] + s * stride
            target = s * width
            size = min(width, vocab - target)
            j = 0
            while j + 256 <= size:
                block_copy(flat, at + j, row, target + j)
                j += 256
            while j < size:
                row[target + j] = element(flat, at + j)
                j += 1
        if _is_masked(i, extras):
            _mask_row(row, vocab, i, extras)
        draw_row(row, row, True, vocab, i, indices[i], columns, extras, mode, work, out)


@kernel
def _transpose(
    flat: Any, stride: Any, vocab: Any, starts: Any, first: Any, count: Any, rows: Any
) -> None:
    """Rows of work memory from columns ``starts[first : first + count]`` of a [V, B] matrix."""
    for t in range(0, vocab, 64):
        end = min(t + 64, vocab)
        for j in range(count):
            at = starts[first + j]
            row = rows[j]
            for v in range(t, end):
                row[v] = element(flat, v * stride + at)


@kernel
def sample_columns(
    flat: Any,
    starts: Any,
    stride: Any,
    vocab: Any,
    indices: Any,
    columns: Columns,
    extras: Extras,
    mode: Any,
    work: Work,
    out: Output,
) -> None:
    """Column layout: token v of row i is ``flat[v * stride + starts[i]]``."""
    for first in range(0, starts.size, GROUP):
        count = min(GROUP, starts.size - first)
        _transpose(flat, stride, vocab, starts, first, count, work.rows)
        for j in range(count):
            i = first + j
            row = work.rows[j]
            if _is_masked(i, extras):
                _mask_row(row, vocab, i, extras)
            draw_row(row, row, True, vocab, i, indices[i], columns, extras, mode, work, out)


def as_stored(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
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
