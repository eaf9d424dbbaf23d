"""Order among candidates: sort keys, the k-th largest, and thresholds that k values reach."""

from __future__ import annotations

from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels.blocks import block_count
from sipipe.sampler.kernels.lists import bits_float, float_bits
from sipipe.sampler.kernels.scan import LOWEST, NEG_INF, count_at_least, sample_blocks

_SIGN = np.uint32(0x80000000)
_FULL = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDING = np.float32(2.4e-7)
"""Distinct logits this close, relatively, may become equal when divided by the temperature."""


@kernel
def key_of(value: Any, low: Any) -> Any:
    """A sort key: ascending in it is descending in ``value``, then ascending in ``low``."""
    bits = float_bits(np.float32(value) + np.float32(0.0))
    ordered = ~bits if bits & _SIGN else bits | _SIGN
    return (np.uint64(~ordered & np.uint32(0xFFFFFFFF)) << _32) | np.uint64(low)


@kernel
def key_value(key: Any) -> Any:
    ordered = ~np.uint32(key >> _32) & np.uint32(0xFFFFFFFF)
    bits = ordered ^ _SIGN if ordered & _SIGN else ~ordered
    return bits_float(np.uint32(bits))


@kernel
def key_high_first(value: Any, token: Any) -> Any:
    """A sort key with the highest id first among ties; `key_high_id` gives the id back."""
    return key_of(value, np.int64(0xFFFFFFFF) - np.int64(token))


@kernel
def key_high_id(key: Any) -> Any:
    return np.int64(_FULL - (key & _FULL))


@kernel
def sort_keys(count: Any, work: Any) -> None:
    """Sort ``work.keys[:count]`` in place: quicksort, the larger side kept on ``work.stack``."""
    keys, stack = work.keys, work.stack
    depth = 0
    low, high = 0, count - 1
    while True:
        while high - low > 16:
            middle = (low + high) >> 1
            a, b, c = keys[low], keys[middle], keys[high]
            pivot = max(min(a, b), min(max(a, b), c))
            i, j = low, high
            while i <= j:
                while keys[i] < pivot:
                    i += 1
                while keys[j] > pivot:
                    j -= 1
                if i <= j:
                    keys[i], keys[j] = keys[j], keys[i]
                    i += 1
                    j -= 1
            if j - low > high - i:
                stack[depth], stack[depth + 1] = low, j
                low = i
            else:
                stack[depth], stack[depth + 1] = i, high
                high = j
            depth += 2
        for i in range(low + 1, high + 1):
            key = keys[i]
            j = i - 1
            while j >= low and keys[j] > key:
                keys[j + 1] = keys[j]
                j -= 1
            keys[j + 1] = key
        if depth == 0:
            return
        depth -= 2
        low, high = stack[depth], stack[depth + 1]


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


@kernel
def _reaching(values: Any, count: Any, threshold: Any, work: Any) -> Any:
    zero = np.float32(0.0)
    number = 0
    for start in range(0, count, 256):
        number += block_count(values, start, work.no_mask, 0, zero, zero, threshold)
    return number


@kernel
def threshold_reached(values: Any, count: Any, k: Any, top: Any, work: Any) -> Any:
    """What at least ``k`` of ``values[:count]`` reach, and not many more; -inf if there is none.

    ``top`` is at least their maximum; behind them the block is filled with -inf. Found by
    bisection, a vectorized count each: to select by comparing elements takes ten times as long.
    """
    low = high = top
    step = np.float32(1.0)
    number = _reaching(values, count, low, work)
    while number < k:
        high = low
        low = top - step
        if low < LOWEST:
            return NEG_INF
        step *= np.float32(2.0)
        number = _reaching(values, count, low, work)
    while number > k + (k >> 2) + 4:
        middle = low + (high - low) * np.float32(0.5)
        if middle <= low or middle >= high:
            break
        some = _reaching(values, count, middle, work)
        if some >= k:
            low, number = middle, some
        else:
            high = middle
    return low


@kernel
def _threshold_by_sample(x: Any, vocab: Any, k: Any, top: Any, edited: Any, work: Any) -> Any:
    """A logit that at least ``k`` tokens reach, and not many more: for k beyond the blocks.

    Guessed from a sample, then checked by counting; lowered until enough.
    """
    sampled, share = sample_blocks(x, vocab, work)
    rank = int(k * share * 1.05) + 8
    zero = np.float32(0.0)
    while rank < sampled:
        guess = threshold_reached(work.values, sampled, rank, top, work)
        if not guess >= LOWEST:
            break
        if count_at_least(x, vocab, zero, zero, guess, edited, work) >= k:
            return guess
        rank += rank // 4 + 8
    return LOWEST


@kernel
def candidate_threshold(x: Any, vocab: Any, k: Any, top: Any, edited: Any, work: Any) -> Any:
    """A logit no larger than the k-th largest, and little smaller (-3.4e38: all of them).

    The maxima of k blocks are k different tokens' logits, so what k of them reach is a bound.
    ``top`` is the maximum of the row without its edits.
    """
    blocks = (vocab + 255) >> 8
    threshold = NEG_INF
    if top >= LOWEST:
        if k <= blocks:
            threshold = threshold_reached(work.peaks, blocks, k, top, work)
        if not threshold >= LOWEST:
            threshold = _threshold_by_sample(x, vocab, k, top, edited, work)
    return max(threshold - abs(threshold) * _ROUNDING, LOWEST)
