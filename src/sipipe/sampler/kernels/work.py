"""Working memory of one sampler: allocated once, proportional to the vocabulary, never to the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sipipe.sampler.kernels._vector import BLOCK, LANES

STAGED = 16
"""Columns that are transposed together in the column layout: one cache line of float32."""


class Work(NamedTuple):
    """Scratch arrays shared by all kernels; V is the vocabulary, N = ceil(V / 256) blocks."""

    mask: Any  # uint32 [8 N], bit set: the token counts as -inf (`logit_edits`); 0 between rows
    no_mask: Any  # uint32 [8], 0: nothing of a block is masked
    tail: Any  # float32 [256], the last, incomplete block of a row
    peaks: Any  # float32 [N, up to whole blocks], maximum of each block, then -inf
    masses: Any  # float32 [2 N + 1], sum of weights of each block of the row, then of the edits
    ids: Any  # int32 [V + 256], candidates of a row,
    values: Any  # float32 [V + 256], their logits
    weights: Any  # float32 [V + 256], and exponentials
    picks: Any  # int32 [V + 256], positions among the candidates
    keys: Any  # uint64 [V + 256], sort keys
    sums: Any  # float64 [V + 256], running sums of candidate weights
    entries: Any  # int32 [V], 0 between uses: 1 + index of a token in a list
    edited_ids: Any  # int32 [V + 256], edited tokens,
    edited: Any  # float32 [V + 256], their new logits
    spare: Any  # float32 [V + 256], to select from
    stack: Any  # int64, bounds yet to sort


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
