"""One call for all rows of a microbatch, for each way that logits may lie in memory.

    rows       [B, V]        each row is read in place, as it is
    shards     [t, B, V / t] tensor-parallel shards: put together in one float32 row of work memory
    columns    [V, B]        transposed 16 columns at a time into 16 float32 rows of work memory

No copy is ever larger than 16 rows, whatever the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sipipe.sampling.kernels._jit import entry, kernel
from sipipe.sampling.kernels.blocks import block_copy, block_mask, element
from sipipe.sampling.kernels.rows import (
    PROCESSED_LOGPROBS,
    Columns,
    Extras,
    Output,
    copy_row,
    draw_row,
    score_raw,
)
from sipipe.sampling.kernels.scan import NOTHING, block_maxima
from sipipe.sampling.kernels.work import Work


@kernel
def _apply_bitmask(row: Any, vocab: Any, i: Any, extras: Any) -> None:
    """Apply the grammar's bitmask of call row ``i``, if any, to a float32 row."""
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
def _apply_allowed(row: Any, vocab: Any, i: Any, extras: Any) -> None:
    """Mask all but the allowed tokens (ascending, unique) of call row ``i``, if it has any."""
    first, last = extras.allowed[i], extras.allowed[i + 1]
    if last > first:
        at = 0
        for j in range(first, last):
            token = extras.allowed_tokens[j]
            row[at:token] = NOTHING
            at = token + 1
        row[at:vocab] = NOTHING


@kernel
def _is_masked(i: Any, extras: Any) -> Any:
    return extras.mask_rows[i] >= 0 or extras.allowed[i + 1] > extras.allowed[i]


@entry
def sample_rows(
    flat: Any,
    starts: Any,
    first: int,
    owned: bool,
    vocab: int,
    indices: Any,
    columns: Columns,
    extras: Extras,
    mode: int,
    work: Work,
    out: Output,
) -> None:
    """Rows ``first + i`` of the call, of columns ``indices[i]``: ``flat[starts[i]:][:vocab]``.

    Where ``owned``, they are in ``work.rows`` already, and ``flat`` and ``starts`` are not read.
    """
    for i in range(starts.size):
        r = first + i
        row = work.rows[i if owned else 0]
        masked = owned or _is_masked(r, extras)
        if masked:
            if not owned:
                copy_row(flat[starts[i] : starts[i] + vocab], vocab, row)
            _apply_bitmask(row, vocab, r, extras)
            # Raw scores are after the grammar's mask but before the allow list, as in vLLM.
            limited = extras.allowed[r + 1] > extras.allowed[r]
            late = limited and extras.wanted[r] >= 0 and mode < PROCESSED_LOGPROBS
            if late:
                copy_row(row, vocab, work.spare)
            _apply_allowed(row, vocab, r, extras)
            draw_row(row, row, masked, late, vocab, r, indices[i], columns, extras, mode, work, out)
            if late and out.tokens[r] >= 0:
                top, _ = block_maxima(work.spare, vocab, work)
                score_raw(work.spare, vocab, r, top, extras, mode, work, out)
        else:
            x = flat[starts[i] : starts[i] + vocab]
            draw_row(x, row, masked, masked, vocab, r, indices[i], columns, extras, mode, work, out)


@entry
def join_shards(
    flat: Any, start: int, shards: int, width: int, stride: int, vocab: int, row: Any
) -> None:
    """One float32 row from the shards ``flat[start + s * stride :][:width]``."""
    for s in range(shards):
        at = start + s * stride
        target = s * width
        size = min(width, vocab - target)
        j = 0
        while j + 256 <= size:
            block_copy(flat, at + j, row, target + j)
            j += 256
        while j < size:
            row[target + j] = element(flat, at + j)
            j += 1


@entry
def transpose(flat: Any, stride: int, vocab: int, starts: Any, rows: Any) -> None:
    """float32 rows from columns: token v of row j is ``flat[v * stride + starts[j]]``."""
    for t in range(0, vocab, 64):
        end = min(t + 64, vocab)
        for j in range(starts.size):
            at = starts[j]
            row = rows[j]
            for v in range(t, end):
                row[v] = element(flat, v * stride + at)


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
