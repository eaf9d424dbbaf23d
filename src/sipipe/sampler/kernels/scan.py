"""Passes over one row: maxima, sums of exponentials, candidates, ranks.

A row is a contiguous 1-D array ``x`` of V logits, of which those whose bit is set in ``work.mask``
count as -inf, and ``edited`` tokens listed beside it that stand for masked ones with another logit
(see `logit_edits`). Where V is not a multiple of 256 the last block lies in ``work.tail``, widened
and padded with -inf by `block_maxima`, which comes first.
"""

from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels import blocks
from sipipe.sampler.kernels.lists import list_between

NEG_INF = np.float32(-np.inf)
LOWEST = np.float32(-3.4028235e38)
LOG2E = 1.4426950408889634
SMALL = 256
"""Candidates up to which a token is drawn by sorting them."""


@kernel
def is_masked(token: Any, work: Any) -> Any:
    return (work.mask[token >> 5] >> np.uint32(token & 31)) & np.uint32(1) != 0


@kernel
def block_maxima(x: Any, grouped: Any, work: Any) -> Any:
    """Fill ``work.peaks`` and ``tail``, and ``groups`` where ``grouped``. Returns (maximum of the
    row, whether any logit is NaN)."""
    full = x.size >> 8
    top = NEG_INF
    bad = False
    for b in range(full):
        first = b << 5 if grouped else -1
        peak, nan = blocks.block_max(x, b << 8, work.mask, b << 3, work.groups, first)
        work.peaks[b] = peak
        bad |= nan
        top = max(top, peak)
    remainder = x.size & 255
    if remainder:
        for i in range(256):
            work.tail[i] = blocks.element(x, (full << 8) + i) if i < remainder else NEG_INF
        peak, nan = blocks.block_max(work.tail, 0, work.mask, full << 3, work.groups, full << 5)
        work.peaks[full] = peak
        bad |= nan
        top = max(top, peak)
    return top, bad


@kernel
def exp_sums(x: Any, top: Any, scale: Any, edited: Any, work: Any) -> Any:
    """Sum of ``2 ** ((x - top) * scale)`` over the row and its edits."""
    full = x.size >> 8
    total = 0.0
    for b in range(full):
        total += blocks.block_exp_sum(x, b << 8, work.mask, b << 3, top, scale)
    if x.size & 255:
        total += blocks.block_exp_sum(work.tail, 0, work.mask, full << 3, top, scale)
    for start in range(0, edited, 256):
        total += blocks.block_exp_sum(work.edited, start, work.no_mask, 0, top, scale)
    return total


@kernel
def gather(x: Any, threshold: Any, edited: Any, work: Any) -> Any:
    """Collect the logits >= ``threshold`` (finite) into ``work.ids``/``values``. The row's by token
    id, then the edited ones. Blocks whose maximum is below it are not read."""
    full = x.size >> 8
    count = 0
    for b in range(full):
        if work.peaks[b] >= threshold:
            count = blocks.block_gather(
                x, b << 8, work.mask, b << 3, b << 8, threshold, work.ids, work.values, count
            )
    if x.size & 255 and work.peaks[full] >= threshold:
        count = blocks.block_gather(
            work.tail, 0, work.mask, full << 3, full << 8, threshold, work.ids, work.values, count
        )
    row = count
    for start in range(0, edited, 256):
        count = blocks.block_gather(
            work.edited, start, work.no_mask, 0, start, threshold, work.ids, work.values, count
        )
    for i in range(row, count):
        work.ids[i] = work.edited_ids[work.ids[i]]
    return count


@kernel
def sample_blocks(x: Any, work: Any) -> Any:
    """Every 32nd block of a large row, all whole blocks of a small one, into ``work.values``. (How
    many logits, -inf left out, which share of the row was read.) Filled up to a block with -inf."""
    full = x.size >> 8
    step = 32 if full >= 64 else 1
    count = 0
    looked = 0
    for b in range(0, full, step):
        count = blocks.block_gather(
            x, b << 8, work.mask, b << 3, b << 8, LOWEST, work.ids, work.values, count
        )
        looked += 256
    for i in range(count, (count + 255) & ~255):
        work.values[i] = NEG_INF
    return count, looked / x.size


@kernel
def count_at_least(x: Any, threshold: Any, edited: Any, work: Any) -> Any:
    """Count the logits of the row and its edits that are >= ``threshold``."""
    full = x.size >> 8
    count = 0
    for b in range(full):
        if work.peaks[b] >= threshold:
            count += blocks.block_count(x, b << 8, work.mask, b << 3, threshold)
    if x.size & 255:
        count += blocks.block_count(work.tail, 0, work.mask, full << 3, threshold)
    for start in range(0, edited, 256):
        count += blocks.block_count(work.edited, start, work.no_mask, 0, threshold)
    return count


@kernel
def candidate_weights(count: Any, top: Any, scale: Any, work: Any) -> Any:
    """``work.weights`` = 2 ** ((values - top) * scale) for the candidates; their sum."""
    padded = (count + 255) & ~255
    for i in range(count, padded):
        work.values[i] = NEG_INF
    total = 0.0
    for b in range(0, padded, 256):
        total += blocks.block_exp(work.values, b, top, scale, work.weights)
    return total


@kernel
def positions_between(count: Any, low: Any, high: Any, work: Any) -> Any:
    """Write positions of the candidates in [low, high) into ``work.picks``; returns their number."""
    listed = 0
    for start in range(0, count, 256):
        listed = list_between(work.values, start, low, high, work.picks, listed)
    return listed
