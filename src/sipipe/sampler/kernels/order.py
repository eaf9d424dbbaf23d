"""Order among candidates: sort keys, the k-th largest, and thresholds that k values reach."""

from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels import scan
from sipipe.sampler.kernels.blocks import block_count

_SIGN = np.uint32(0x80000000)
_FULL = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_DIGIT = 11
_LAST_DIGIT = (1 << _DIGIT) - 1
_DIGITS = np.uint64(_LAST_DIGIT)
_ROUNDING = np.float32(2.4e-7)
"""Distinct logits this close, relatively, may become equal when divided by the temperature."""


@kernel
def key_of(value: Any, tie: Any) -> Any:
    """A sort key: descending in it is descending in ``value``, then descending in ``tie``."""
    bits = np.float32(np.float32(value) + np.float32(0.0)).view(np.uint32)
    ordered = ~bits if bits & _SIGN else bits | _SIGN
    return (np.uint64(ordered & np.uint32(0xFFFFFFFF)) << _32) | np.uint64(tie)


@kernel
def key_tie(key: Any) -> Any:
    return np.int64(key & _FULL)


@kernel
def key_value(key: Any) -> Any:
    ordered = np.uint32(key >> _32) & np.uint32(0xFFFFFFFF)
    bits = ordered ^ _SIGN if ordered & _SIGN else ~ordered
    return np.uint32(bits).view(np.float32)


@kernel
def least_reaching(score: Any, logit: Any, temperature: Any, shift: Any, offset: Any) -> Any:
    """The least logit whose score, ``(logit / temperature - shift) - offset``, is >= ``score``.

    ``logit`` is one that has this score. Rounding keeps order, so it is found by bisection of bits.
    """
    low, high = np.int64(key_of(scan.LOWEST, 0) >> _32), np.int64(key_of(logit, 0) >> _32)
    # bound: 32 halvings of the 32 bits
    while low < high:
        middle = (low + high) >> 1
        value = key_value(np.uint64(middle) << _32)
        if (value / temperature - shift) - offset >= score:
            high = middle
        else:
            low = middle + 1
    return key_value(np.uint64(high) << _32)


@kernel
def _partition(values: Any, low: Any, high: Any) -> Any:
    """(i, j): ``values[low : j + 1]`` are no smaller than a pivot, ``values[i : high + 1]`` no larger."""
    a = values[low]
    b = values[(low + high) >> 1]
    c = values[high]
    pivot = max(min(a, b), min(max(a, b), c))
    i = low
    j = high
    # bound: each round brings i and j closer; the scans end at the pivot, or what was exchanged
    while i <= j:
        # bound: the pivot, or a value before it that was put behind i
        while values[i] > pivot:
            i += 1
        # bound: the same from the other side
        while values[j] < pivot:
            j -= 1
        if i <= j:
            values[i], values[j] = values[j], values[i]
            i += 1
            j -= 1
    return i, j


@kernel
def _radix_sort(count: Any, low_bit: Any, work: Any) -> None:
    """Sort ``work.keys[:count]``, largest first, by their bits from ``low_bit`` on; stable."""
    keys = work.keys
    other = work.sums.view(np.uint64)
    places = work.stack
    swapped = False
    for shift in range(low_bit, 64, _DIGIT):
        down = np.uint64(shift)
        places[: _LAST_DIGIT + 1] = 0
        for i in range(count):
            places[np.int64((keys[i] >> down) & _DIGITS)] += 1
        if places[np.int64((keys[0] >> down) & _DIGITS)] == count:
            continue  # all have the same digit
        first = 0
        for digit in range(_LAST_DIGIT, -1, -1):
            occurrences = places[digit]
            places[digit] = first
            first += occurrences
        for i in range(count):
            digit_value = np.int64((keys[i] >> down) & _DIGITS)
            other[places[digit_value]] = keys[i]
            places[digit_value] += 1
        keys, other = other, keys
        swapped = not swapped
    if swapped:
        for i in range(count):
            work.keys[i] = keys[i]


@kernel
def sort_keys(count: Any, ties_sorted: Any, work: Any) -> None:
    """Sort ``work.keys[:count]``, largest first. ``ties_sorted``: they are so already by their ties
    alone, which spares many keys half of the passes. Few are sorted by quicksort, the larger side
    kept on ``work.stack``."""
    if count > 1024:
        _radix_sort(count, 32 if ties_sorted else 0, work)
        return
    keys = work.keys
    stack = work.stack
    depth = 0
    low, high = 0, count - 1
    # bound: `count`, as each round sorts one part for good
    while True:
        # bound: the part's size, which each partition makes smaller
        while high - low > 16:
            i, j = _partition(keys, low, high)
            if j - low > high - i:
                stack[depth] = low
                stack[depth + 1] = j
                low = i
            else:
                stack[depth] = i
                stack[depth + 1] = high
                high = j
            depth += 2
        for i in range(low + 1, high + 1):
            key = keys[i]
            j = i - 1
            # bound: 16
            while j >= low and keys[j] < key:
                keys[j + 1] = keys[j]
                j -= 1
            keys[j + 1] = key
        if depth == 0:
            return
        depth -= 2
        low, high = stack[depth], stack[depth + 1]


@kernel
def _reaching(values: Any, count: Any, threshold: Any, work: Any) -> Any:
    """Count ``values[:count]``, with -inf behind them to a whole block, that are >= ``threshold``."""
    number = 0
    for start in range(0, count, 256):
        number += block_count(values, start, work.no_mask, 0, threshold)
    return number


@kernel
def kth_largest(values: Any, count: Any, k: Any, work: Any) -> Any:
    """The k-th largest (k >= 1) of ``values[:count]`` (no NaN); behind them a block is filled up.
    By bisection of bits, a vectorized count each: to select by comparing elements takes ten times
    as long, and in some orders of them hours."""
    for i in range(count, (count + 255) & ~255):
        values[i] = scan.NEG_INF
    low, high = np.int64(key_of(scan.NEG_INF, 0) >> _32), np.int64(key_of(np.inf, 0) >> _32)
    # bound: 32 halvings of the 32 bits
    while low < high:
        middle = (low + high + 1) >> 1
        if _reaching(values, count, key_value(np.uint64(middle) << _32), work) >= k:
            low = middle
        else:
            high = middle - 1
    return key_value(np.uint64(low) << _32)


@kernel
def keep_at_least(count: Any, floor: Any, work: Any) -> Any:
    """Drop candidates below ``floor`` (float64); how many stay."""
    stay = 0
    for i in range(count):
        value = work.values[i]
        work.ids[stay] = work.ids[i]
        work.values[stay] = value
        if np.float64(value) >= floor:
            stay += 1
    return stay


@kernel
def keep_largest(count: Any, k: Any, work: Any) -> Any:
    """Drop the candidates below the k-th largest; how many stay."""
    return keep_at_least(count, np.float64(kth_largest(work.values, count, k, work)), work)


@kernel
def threshold_reached(values: Any, count: Any, k: Any, top: Any, work: Any) -> Any:
    """Find a value that at least ``k`` of ``values[:count]`` reach, and not many more; -inf if none.
    ``top``, which is finite, is at least their maximum; behind them the block is filled with -inf.
    Found by bisection, a vectorized count each."""
    low = high = top
    step = np.float32(1.0)
    number = _reaching(values, count, low, work)
    # bound: 129 doublings, after which no difference is above the lowest float32
    while number < k:
        high = low
        low = top - step
        if not low >= scan.LOWEST:  # also where `top` was no number
            return scan.NEG_INF
        step *= np.float32(2.0)
        number = _reaching(values, count, low, work)
    # bound: 280 halvings, from 2**129 to 2**-149; `low` serves after each, only with more tokens
    while number > k + (k >> 2) + 4:
        middle = low + (high - low) * np.float32(0.5)
        if middle <= low or middle >= high:
            break
        some = _reaching(values, count, middle, work)
        if some >= k:
            low = middle
            number = some
        else:
            high = middle
    return low


@kernel
def _threshold_by_sample(x: Any, k: Any, top: Any, edited: Any, work: Any) -> Any:
    """A logit that at least ``k`` tokens reach, and not many more: for k beyond the blocks. Guessed
    from a sample, then checked by counting; lowered until enough."""
    sampled, share = scan.sample_blocks(x, work)
    rank = int(k * share * 1.05) + 8
    # bound: about 50 rounds, as the rank grows by a quarter each; then all tokens
    while rank < sampled:
        guess = threshold_reached(work.values, sampled, rank, top, work)
        if not guess >= scan.LOWEST:
            break
        if scan.count_at_least(x, guess, edited, work) >= k:
            return guess
        rank += rank // 4 + 8
    return scan.LOWEST


@kernel
def candidate_threshold(x: Any, k: Any, top: Any, edited: Any, work: Any) -> Any:
    """A logit no larger than the k-th largest, and little smaller (-3.4e38: all of them). The
    maxima of k blocks are k different tokens' logits, so what k of them reach is a bound. ``top``
    is the maximum of the row without its edits."""
    blocks = (x.size + 255) >> 8
    threshold = scan.NEG_INF
    if top >= scan.LOWEST:
        if k <= blocks:
            threshold = threshold_reached(work.peaks, blocks, k, top, work)
        if not threshold >= scan.LOWEST:
            threshold = _threshold_by_sample(x, k, top, edited, work)
    return max(threshold - abs(threshold) * _ROUNDING, scan.LOWEST)
