"""Working memory of one sampler: allocated once, proportional to the vocabulary, never to the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sipipe.sampling.kernels._vector import BLOCK, LANES

BINS = 1024
GROUP = 16
"""Columns that are transposed together in the column layout: one cache line of float32."""


class Work(NamedTuple):
    """Scratch arrays shared by all kernels; V is the vocabulary, N = ceil(V / 256) blocks.

    rows:    [1 or 16, 256 N] float32, a materialized row (masked, penalized, transposed).
    spare:   [256 N] float32, a row as it was before its allow list.
    tail:    [256] float32, the last, incomplete block of a row read in place.
    peaks:   [N] float32, maximum of each block; picks: a copy to select from.
    masses:  [N] float32, sum of weights of each block.
    ids:     [V + 256] int32, values: [V + 256] float32, weights: candidates of a row.
    keys:    [V + 256] uint64, sort keys.
    sums:    [V + 256] float64, running sums of candidate weights.
    slots:   [V] int32, 1 + index in the overlay of a token whose logit was changed, else 0.
    changed_ids, changed_raw, changed: the overlay: token, logit before, logit after.
    stale:   [N] uint8, blocks whose maximum must be taken again; bins, counts: [1024]; stack: bounds yet to sort.
    """

    rows: Any
    spare: Any
    tail: Any
    peaks: Any
    picks: Any
    masses: Any
    ids: Any
    values: Any
    weights: Any
    keys: Any
    sums: Any
    slots: Any
    changed_ids: Any
    changed_raw: Any
    changed: Any
    stale: Any
    bins: Any
    counts: Any
    stack: Any


def make_work(vocab_size: int, rows: int = 1) -> Work:
    """About 8 MB for ``rows=1`` at a vocabulary of 151,936."""
    blocks = -(-vocab_size // BLOCK)
    room = blocks * BLOCK + BLOCK + LANES
    return Work(
        rows=np.full((rows, blocks * BLOCK), -np.inf, np.float32),
        spare=np.zeros(blocks * BLOCK, np.float32),
        tail=np.full(BLOCK, -np.inf, np.float32),
        peaks=np.zeros(blocks, np.float32),
        picks=np.zeros(blocks, np.float32),
        masses=np.zeros(blocks, np.float32),
        ids=np.zeros(room, np.int32),
        values=np.zeros(room, np.float32),
        weights=np.zeros(room, np.float32),
        keys=np.zeros(room, np.uint64),
        sums=np.zeros(room, np.float64),
        slots=np.zeros(vocab_size, np.int32),
        changed_ids=np.zeros(vocab_size, np.int32),
        changed_raw=np.zeros(vocab_size, np.float32),
        changed=np.zeros(vocab_size, np.float32),
        stale=np.zeros(blocks, np.uint8),
        bins=np.zeros(BINS, np.float64),
        counts=np.zeros(BINS, np.int64),
        stack=np.zeros(128, np.int64),
    )
