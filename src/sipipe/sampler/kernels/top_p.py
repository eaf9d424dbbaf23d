"""Top-p over many candidates: which of a row's tokens may be in the set, and where it ends."""

import math
from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels import order, scan
from sipipe.sampler.kernels.lists import list_mass


@kernel
def _mass_from(count: Any, threshold: Any, work: Any) -> Any:
    """(mass, number) of the candidates with a value >= ``threshold``."""
    mass = 0.0
    number = 0
    for start in range(0, count, 256):
        part, some = list_mass(work.values, work.weights, start, threshold)
        mass += part
        number += some
    return mass, number


@kernel
def _guess(x: Any, top: Any, scale: Any, low: Any, tail: Any, work: Any) -> Any:
    """Hardly less than the largest logit below which at most the mass ``tail`` of the row lies: a
    guess from a sample (by which the mass of many small logits can be judged), but above ``low``."""
    count, share = scan.sample_blocks(x, work)
    mass = scan.candidate_weights(count, top, scale, work)
    wanted = mass - 0.9 * tail * share
    high = top
    for _ in range(9):
        middle = low + (high - low) * np.float32(0.5)
        if _mass_from(count, middle, work)[0] >= wanted:
            low = middle
        else:
            high = middle
    return low


@kernel
def gather_tail(
    x: Any, top: Any, scale: Any, total: Any, target: Any, edited: Any, work: Any
) -> Any:
    """Collect tokens that hold at least ``target`` of the mass ``total``, the largest of the row.
    Returns (their number, a bound below them). Below top + ln(tail / V) / scale lie fewer than V
    tokens of at most the weight tail / V each: together at most tail = total - target. A guess
    usually finds a higher bound, and is taken if the mass above it reaches the target."""
    tail = max(total - target, 1e-30)
    bound = top + np.float32(math.log(tail / x.size) * scan.LOG2E / scale)
    threshold = bound
    if x.size >= 64 << 8:
        threshold = _guess(x, top, scale, bound, tail, work)
    # bound: 3 rounds, with the guess, the bound and all tokens
    while True:
        threshold = max(threshold, scan.LOWEST)
        count = scan.gather(x, threshold, edited, work)
        mass = scan.candidate_weights(count, top, scale, work)
        if mass >= target or threshold == scan.LOWEST:
            return count, threshold
        threshold = bound if threshold > bound else scan.LOWEST


@kernel
def _extremes(listed: Any, work: Any) -> Any:
    """The smallest and the largest value of the candidates in ``work.picks[:found]``."""
    smallest = largest = work.values[work.picks[0]]
    for i in range(1, listed):
        value = work.values[work.picks[i]]
        smallest = min(smallest, value)
        largest = max(largest, value)
    return smallest, largest


@kernel
def top_p_cut(count: Any, top: Any, low: Any, target: Any, inverse: Any, work: Any) -> Any:
    """The last candidate of the smallest set whose mass reaches ``target``: (value, id). Kept are
    those with a larger value, or the same and an id no smaller. Bisection by value, a vectorized
    pass over the candidates each, until those around the cut are few or all tied. No candidate is
    below ``low`` (-inf: not known). Weights are exp((value - top) * inverse)."""
    if low <= scan.LOWEST:
        low = top
        for i in range(count):
            low = min(low, work.values[i])
        low = max(low, scan.LOWEST)
    # Invariant: mass(>= low) >= target (or low is the smallest), mass(>= high) = above < target.
    high = np.float32(np.inf)
    above = 0.0
    skipped = 0
    between = count
    step = max(np.float32(top), np.float32(low))
    half = np.float32(0.5)
    # bound: 280 halvings, from 2**129 to 2**-149; then `low` and `high` are neighbours
    while between > 64:
        if high == np.inf:
            middle = step
        else:
            middle = np.float32(low * half + high * half)  # where the difference is above float32
        if middle <= low or middle >= high:
            break  # `low` and `high` are neighbours: all between are tied
        mass, number = _mass_from(count, middle, work)
        before = between
        if mass >= target:
            low = middle
            between = number - skipped
        else:
            high = middle
            above = mass
            between -= number - skipped
            skipped = number
        if between == before:
            # Nothing was told apart. Logits of 16 bits have many ties, and gaps that bisection
            # would cross in steps of float32: close in on the values that there are.
            low, largest = _extremes(scan.positions_between(count, low, high, work), work)
            if low == largest:
                break
            high = np.nextafter(largest, np.float32(np.inf))
    if between <= 64:
        listed = scan.positions_between(count, low, high, work)
        for i in range(listed):
            at = work.picks[i]
            work.keys[i] = order.key_of(work.values[at], work.ids[at])
        order.sort_keys(listed, False, work)
        for i in range(listed):
            value = order.key_value(work.keys[i])
            above += math.exp((np.float64(value) - np.float64(top)) * inverse)
            if above >= target or i == listed - 1:
                return value, order.key_tie(work.keys[i])
    weight = math.exp((np.float64(low) - np.float64(top)) * inverse)
    needed = math.ceil((target - above) / weight) if weight > 0.0 else count
    tied = scan.positions_between(count, low, np.nextafter(low, np.float32(np.inf)), work)
    for i in range(tied):
        work.spare[i] = np.float32(work.ids[work.picks[i]])  # exact: ids are below 2 ** 24
    last = order.kth_largest(work.spare, tied, min(max(needed, 1), tied), work)
    return low, np.int64(last)
