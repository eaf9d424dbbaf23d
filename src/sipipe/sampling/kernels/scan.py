"""Passes over one row: maxima, sums of exponentials, candidates, ranks.

A row ``x`` is a contiguous 1-D array of at least V logits. Where V is not a multiple of 256 the
last block lies in ``work.tail``, widened and padded with -inf by `block_maxima`, which comes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sipipe.sampling.kernels._jit import kernel
from sipipe.sampling.kernels.blocks import (
    block_count,
    block_exp,
    block_exp_sum,
    block_gather,
    block_max,
    element,
)

NOTHING = np.float32(-np.inf)
LOWEST = np.float32(-3.4028235e38)
LOG2E = 1.4426950408889634


@kernel
def block_maxima(x: Any, vocab: Any, work: Any) -> Any:
    """Fill ``work.peaks`` and ``work.tail``; (maximum of the row, whether any logit is NaN)."""
    full = vocab >> 8
    top = NOTHING
    bad = False
    for b in range(full):
        peak, nan = block_max(x, b << 8)
        work.peaks[b] = peak
        bad |= nan
        top = max(top, peak)
    rest = vocab & 255
    if rest:
        for i in range(256):
            work.tail[i] = element(x, (full << 8) + i) if i < rest else NOTHING
        peak, nan = block_max(work.tail, 0)
        work.peaks[full] = peak
        bad |= nan
        top = max(top, peak)
    return top, bad


@kernel
def exp_sums(x: Any, vocab: Any, top: Any, scale: Any, work: Any) -> Any:
    """Sum over the row of ``2 ** ((x - top) * scale)``; the blocks' sums in ``work.masses``."""
    full = vocab >> 8
    total = 0.0
    for b in range(full):
        mass = block_exp_sum(x, b << 8, top, scale)
        work.masses[b] = mass
        total += mass
    if vocab & 255:
        mass = block_exp_sum(work.tail, 0, top, scale)
        work.masses[full] = mass
        total += mass
    return total


@kernel
def gather(x: Any, vocab: Any, threshold: Any, work: Any) -> Any:
    """Collect the logits >= ``threshold`` (finite) into ``work.ids``/``values``, by token id.

    Reads only blocks whose maximum reaches the threshold.
    """
    full = vocab >> 8
    count = 0
    for b in range(full):
        if work.peaks[b] >= threshold:
            count = block_gather(x, b << 8, b << 8, threshold, work.ids, work.values, count)
    if vocab & 255 and work.peaks[full] >= threshold:
        count = block_gather(work.tail, 0, full << 8, threshold, work.ids, work.values, count)
    return count


@kernel
def count_at_least(x: Any, vocab: Any, shift: Any, offset: Any, threshold: Any, work: Any) -> Any:
    """How many of ``(x - shift) - offset`` are >= ``threshold``."""
    full = vocab >> 8
    count = 0
    for b in range(full):
        count += block_count(x, b << 8, shift, offset, threshold)
    if vocab & 255:
        count += block_count(work.tail, 0, shift, offset, threshold)
    return count


@kernel
def candidate_weights(count: Any, top: Any, scale: Any, work: Any) -> Any:
    """``work.weights`` = 2 ** ((values - top) * scale) for the candidates; their sum."""
    padded = (count + 255) & ~255
    for i in range(count, padded):
        work.values[i] = NOTHING
    total = 0.0
    for b in range(0, padded, 256):
        total += block_exp(work.values, b, top, scale, work.weights)
    return total


@kernel
def kth_largest(values: Any, count: Any, k: Any) -> Any:
    """The k-th largest (k >= 1) of ``values[:count]`` (no NaN), which is reordered: quickselect."""
    low, high = 0, count - 1
    target = k - 1
    while low < high:
        middle = (low + high) >> 1
        a, b, c = values[low], values[middle], values[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if target <= j:
            high = j
        elif target >= i:
            low = i
        else:
            break
    return values[target]
