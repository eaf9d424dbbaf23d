"""Filters and draws over candidates: min-p, top-k, top-p, and one token by inverse CDF.

Rules, after vLLM: min-p keeps probabilities >= min_p times the largest; top-k keeps every logit >=
the k-th largest, so all tokens tied with it; top-p keeps the smallest set of most likely tokens
whose mass reaches p, and of tokens tied at that cut the ones with the highest ids (what a stable
ascending sort gives; vLLM's own choice depends on its sort, the number kept does not).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sipipe.sampling.kernels._jit import kernel
from sipipe.sampling.kernels.blocks import bits_float, block_mass, element, float_bits
from sipipe.sampling.kernels.scan import (
    LOWEST,
    NOTHING,
    candidate_weights,
    count_at_least,
    gather,
    kth_largest,
)
from sipipe.sampling.kernels.work import BINS

SMALL = 2048
"""Candidates up to which a row is settled by sorting them."""

_SIGN = np.uint32(0x80000000)
_FULL = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


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
def key_high_id(key: Any) -> Any:
    """The token id of a key made with ``low = 0xFFFFFFFF - id`` (highest id first among ties)."""
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
def candidates_of_top(x: Any, vocab: Any, k: Any, temperature: Any, changed: Any, work: Any) -> Any:
    """Candidates that hold the k largest logits of a row with an overlay, or -1 if too many.

    The k-th largest of the maxima of those blocks whose maximum the overlay leaves alone is no
    larger than the k-th largest logit, and few logits reach it.
    """
    blocks = work.peaks.size
    if k > blocks:
        return -1
    for b in range(blocks):
        work.picks[b] = work.peaks[b]
    for i in range(changed):
        b = work.changed_ids[i] >> 8
        if work.changed_raw[i] == work.peaks[b]:
            work.picks[b] = NOTHING
    threshold = kth_largest(work.picks, blocks, k)
    if threshold < LOWEST:
        return -1
    # Distinct logits may become equal when divided by the temperature: leave room for them.
    threshold = max(threshold - abs(threshold) * np.float32(2.4e-7), LOWEST)
    found = gather(x, vocab, threshold, work)
    if found > SMALL:
        return -1
    kept = 0
    for i in range(found):
        token = work.ids[i]
        if work.slots[token] == 0:
            work.ids[kept] = token
            work.values[kept] = work.values[i] / temperature
            kept += 1
    for i in range(changed):
        if work.changed[i] >= threshold:
            if kept >= SMALL:
                return -1
            work.ids[kept] = work.changed_ids[i]
            work.values[kept] = work.changed[i] / temperature
            kept += 1
    return kept


@kernel
def choose_sorted(count: Any, k: Any, min_p: Any, top_p: Any, u: Any, work: Any) -> Any:
    """Filter and draw among few candidates; (token, number kept, their maximum, log of mass).

    The kept ones are left in ``work.ids``/``values``, most likely first.
    """
    for i in range(count):
        low = np.int64(0xFFFFFFFF) - np.int64(work.ids[i])
        work.keys[i] = key_of(work.values[i], low)
    sort_keys(count, work)
    top = key_value(work.keys[0])
    if 0 < k < count:
        cut = key_value(work.keys[k - 1])
        while k < count and key_value(work.keys[k]) == cut:
            k += 1
        count = k
    floor = -math.inf
    if min_p > 0.0:
        floor = math.log(min_p)
    total = 0.0
    kept = 0
    for i in range(count):
        value = key_value(work.keys[i])
        below = np.float64(value) - np.float64(top)
        if below < floor:
            break
        total += math.exp(below)
        work.ids[i] = key_high_id(work.keys[i])
        work.values[i] = value
        work.sums[i] = total
        kept += 1
    if top_p < 1.0:
        target = top_p * total
        last = 0
        while last < kept - 1 and work.sums[last] < target:
            last += 1
        kept = last + 1
        total = work.sums[last]
    target = u * total
    pick = 0
    while pick < kept - 1 and work.sums[pick] <= target:
        pick += 1
    return work.ids[pick], kept, top, math.log(total)


@kernel
def scale_candidates(count: Any, temperature: Any, work: Any) -> Any:
    """Divide the candidates by the temperature; their maximum."""
    top = NOTHING
    for i in range(count):
        value = work.values[i] / temperature
        work.values[i] = value
        top = max(top, value)
    return top


@kernel
def keep_at_least(count: Any, floor: Any, work: Any) -> Any:
    """Drop candidates below ``floor`` (float64)."""
    kept = 0
    for i in range(count):
        value = work.values[i]
        work.ids[kept] = work.ids[i]
        work.values[kept] = value
        if np.float64(value) >= floor:
            kept += 1
    return kept


@kernel
def threshold_for_count(x: Any, vocab: Any, k: Any, work: Any) -> Any:
    """A logit that at least ``k`` of the row reach, and not many more: for k beyond the blocks.

    Guessed from every 64th logit, then checked by counting; lowered until enough.
    """
    step = 64 if vocab >= 16384 else max(1, vocab >> 8)
    sampled = 0
    for i in range(0, vocab, step):
        work.weights[sampled] = element(x, i)
        sampled += 1
    rank = int(k / vocab * sampled * 1.05) + 8
    zero = np.float32(0.0)
    while rank < sampled:
        guess = kth_largest(work.weights, sampled, rank)
        if guess < LOWEST:
            break
        if count_at_least(x, vocab, zero, zero, guess, work) >= k:
            return max(guess - abs(guess) * np.float32(2.4e-7), LOWEST)
        rank += rank // 4 + 8
    return LOWEST


@kernel
def threshold_for_tail(x: Any, vocab: Any, top: Any, scale: Any, mass: Any, work: Any) -> Any:
    """A guess of the largest logit below which the row holds at most ``mass`` (of its weights).

    From every 32nd block, with weights ``2 ** ((x - top) * scale)``. Only a guess: the caller
    checks what is above it.
    """
    full = vocab >> 8
    if full < 64:
        return NOTHING
    count = 0
    for b in range(0, full, 32):
        for i in range(256):
            work.values[count + i] = element(x, (b << 8) + i)
        count += 256
    candidate_weights(count, top, scale, work)
    work.bins[:] = 0.0
    width = np.float32(scale * 0.125**-1 / 1.4426950408889634)  # bins of 1/8 nat
    for i in range(count):
        below = (top - work.values[i]) * width
        if below < np.float32(BINS - 1):
            work.bins[int(below)] += work.weights[i]
    factor = full * 256.0 / count
    tail = 0.0
    b = BINS - 1
    while b > 0:
        tail += work.bins[b] * factor
        if tail > 0.9 * mass:
            break
        b -= 1
    return np.float32(top - np.float32(b + 1) / width)


@kernel
def mass_from(count: Any, threshold: Any, work: Any) -> Any:
    """(mass, number) of the candidates with a value >= ``threshold``."""
    mass = 0.0
    number = 0
    for start in range(0, count, 256):
        part, some = block_mass(work.values, work.weights, start, threshold)
        mass += part
        number += some
    return mass, number


@kernel
def top_p_cut(count: Any, top: Any, low: Any, target: Any, inverse: Any, work: Any) -> Any:
    """The last candidate of the smallest set whose mass reaches ``target``: (value, id).

    Kept are those with a larger value, or the same and an id no smaller. Bisection by value, a
    vectorized pass over the candidates each, until those around the cut are few or all tied.
    No candidate is below ``low`` (-inf: not known). Weights are exp((value - top) * inverse).
    """
    if low <= LOWEST:
        low = top
        for i in range(count):
            low = min(low, work.values[i])
    # Invariant: mass(>= low) >= target (or low is the smallest), mass(>= high) = above < target.
    high = np.float32(np.inf)
    above, skipped = 0.0, 0
    between = count
    step = max(np.float32(top), np.float32(low))
    while between > 64:
        if high == np.inf:
            middle = step
        else:
            middle = np.float32(low + (high - low) * np.float32(0.5))
        if middle <= low or middle >= high:
            break  # `low` and `high` are neighbours: all between are tied
        mass, number = mass_from(count, middle, work)
        if mass >= target:
            low = middle
            between = number - skipped
        else:
            high = middle
            above = mass
            between -= number - skipped
            skipped = number
    found = 0
    if between <= 64:
        for i in range(count):
            value = work.values[i]
            if low <= value < high:
                low_bits = np.int64(0xFFFFFFFF) - np.int64(work.ids[i])
                work.keys[found] = key_of(value, low_bits)
                found += 1
        sort_keys(found, work)
        for i in range(found):
            value = key_value(work.keys[i])
            above += math.exp((np.float64(value) - np.float64(top)) * inverse)
            if above >= target or i == found - 1:
                return value, key_high_id(work.keys[i])
    weight = math.exp((np.float64(low) - np.float64(top)) * inverse)
    needed = math.ceil((target - above) / weight) if weight > 0.0 else count
    needed = max(needed, 1)
    pick = 0
    for i in range(count - 1, -1, -1):
        if work.values[i] == low:
            pick = work.ids[i]
            needed -= 1
            if needed == 0:
                break
    return low, pick


@kernel
def draw_candidates(count: Any, cut: Any, cut_id: Any, u: Any, work: Any) -> Any:
    """One of the candidates from (cut, cut_id) up; (token, their mass).

    In order of token ids those above the cut, then those tied with it.
    """
    beyond = np.nextafter(cut, np.float32(np.inf)) if cut >= LOWEST else LOWEST
    total = 0.0
    for start in range(0, count, 256):
        part, _ = block_mass(work.values, work.weights, start, beyond)
        total += part
        work.sums[start >> 8] = total
    tied = 0
    weight = 0.0
    if cut >= LOWEST:
        for i in range(count):
            if work.values[i] == cut and work.ids[i] >= cut_id:
                tied += 1
                weight = np.float64(work.weights[i])
    target = u * (total + tied * weight)
    last = -1
    if target < total or tied * weight == 0.0:
        b = 0
        while work.sums[b] <= target and (b + 1) * 256 < count:
            b += 1
        before = work.sums[b - 1] if b else 0.0
        for i in range(b * 256, count):  # past the block only where rounding leads there
            if work.values[i] >= beyond:
                before += np.float64(work.weights[i])
                last = work.ids[i]
                if before > target:
                    break
    if last < 0:
        rest = min(int((target - total) / weight), tied - 1) if weight > 0.0 else 0
        for i in range(count):
            if work.values[i] == cut and work.ids[i] >= cut_id:
                last = work.ids[i]
                if rest <= 0:
                    break
                rest -= 1
    return last, total + tied * weight


@kernel
def keep_from(count: Any, cut: Any, cut_id: Any, work: Any) -> Any:
    """Drop the candidates below (cut, cut_id); how many stay."""
    kept = 0
    for i in range(count):
        value = work.values[i]
        token = work.ids[i]
        if value > cut or (value == cut and token >= cut_id):
            work.ids[kept] = token
            work.values[kept] = value
            kept += 1
    return kept


@kernel
def draw_full(x: Any, vocab: Any, top: Any, inverse: Any, total: Any, u: Any, work: Any) -> Any:
    """One token of the whole row, by block and then within it; weights exp((x - top) * inverse)."""
    target = u * total
    blocks = work.peaks.size
    b = 0
    before = 0.0
    last = 0
    while b < blocks:
        mass = np.float64(work.masses[b])
        if mass > 0.0:
            last = b
            if before + mass > target:
                break
            before += mass
        b += 1
    if b == blocks:  # rounding put the target past the end
        b = last
        before -= np.float64(work.masses[b])
    full = vocab >> 8
    size = 256 if b < full else vocab & 255
    inside = 0.0
    for i in range(size):
        value = element(x, (b << 8) + i)
        inside += math.exp((np.float64(value) - np.float64(top)) * inverse)
        work.sums[i] = inside
    # The block's sum was taken in float32: measure the rest of the way in its own unit.
    rest = (target - before) / np.float64(work.masses[b]) * inside
    pick = -1
    previous = 0.0
    for i in range(size):
        if work.sums[i] > previous:
            pick = i
            if work.sums[i] > rest:
                break
        previous = work.sums[i]
    return (b << 8) + pick
