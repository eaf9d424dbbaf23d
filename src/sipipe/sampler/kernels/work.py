"""Working memory of one sampler: allocated once, proportional to the vocabulary, never to the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sipipe.sampler.kernels._vector import BLOCK, LANES

STAGED = 16
"""Columns that are transposed together in the column layout: one cache line of float32."""


class Work(NamedTuple):
    """Scratch arrays shared by all kernels; V is the vocabulary, N = ceil(V / 256) blocks.

    mask:    [8 N] uint32, bit set: the token counts as -inf (see `logit_edits`); 0 between rows.
    no_mask: [8] uint32, 0: nothing of a block is masked.
    tail:    [256] float32, the last, incomplete block of a row.
    peaks:   [N, up to whole blocks] float32, maximum of each block, then -inf.
    masses:  [2 N + 1] float32, sum of weights of each block of the row, then of the edits.
    ids:     [V + 256] int32, values: [V + 256] float32, weights: candidates of a row.
    picks:   [V + 256] int32, positions among the candidates.
    keys:    [V + 256] uint64, sort keys.
    sums:    [V + 256] float64, running sums of candidate weights.
    entries: [V] int32, 0 between uses: 1 + index of a token in a list.
    edited_ids, edited: [V + 256] int32 and float32, edited tokens and their new logits.
    spare:   [V + 256] float32, to select from.
    stack:   bounds yet to sort.
    """

    mask: Any
    no_mask: Any
    tail: Any
    peaks: Any
    masses: Any
    ids: Any
    values: Any
    weights: Any
    picks: Any
    keys: Any
    sums: Any
    entries: Any
    edited_ids: Any
    edited: Any
    spare: Any
    stack: Any


def make_work(vocab_size: int) -> Work:
    """About 7 MB at a vocabulary of 151,936, taken from the system as far as it is used."""
    blocks = -(-vocab_size // BLOCK)
    room = blocks * BLOCK + BLOCK + LANES
    return Work(
        mask=np.zeros(blocks * (BLOCK // 32), np.uint32),
        no_mask=np.zeros(BLOCK // 32, np.uint32),
        tail=np.full(BLOCK, -np.inf, np.float32),
        peaks=np.full(-(-blocks // BLOCK) * BLOCK, -np.inf, np.float32),
        masses=np.zeros(2 * blocks + 1, np.float32),
        ids=np.zeros(room, np.int32),
        values=np.zeros(room, np.float32),
        weights=np.zeros(room, np.float32),
        picks=np.zeros(room, np.int32),
        keys=np.zeros(room, np.uint64),
        sums=np.zeros(room, np.float64),
        entries=np.zeros(vocab_size, np.int32),
        edited_ids=np.zeros(room, np.int32),
        edited=np.zeros(room, np.float32),
        spare=np.zeros(room, np.float32),
        stack=np.zeros(128, np.int64),
    )


def make_staging(vocab_size: int, rows: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """[rows, >= V] for rows put together from another layout.

    Rows are an odd number of cache lines apart, so that they do not compete for the same lines of
    the cache as they are written side by side.
    """
    line = 64 // dtype.itemsize
    lines = -(-vocab_size // line) | 1
    return np.zeros((rows, lines * line), dtype)
