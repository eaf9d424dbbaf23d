"""One token by inverse CDF: of the candidates, or of a whole row and its edits.

Of a row by rejection: a group of 8 tokens is proposed by an upper bound of the weight of its largest
logit, which the pass for the maxima leaves behind, then one of the 8, each as likely; it is taken
with probability weight / bound, else the next is proposed: 1 of 8.5 succeeds at worst. So each
token is drawn with exactly its share of the mass, and the row is read once.

Nor need a filter be applied to the row. A token drawn from all of them that top-k or top-p keeps is
a token drawn from those that they keep; so the one token is judged: top-k keeps it if fewer than k
logits are larger, top-p if what comes before it in the order of likelihood has less than p of the
mass. One that they do not keep is drawn again. What min-p keeps is known beforehand: groups without
such a token are not proposed. Nor are groups below a logit from which on the largest of their groups
hold ``top_p`` of the mass, where that is little: else most of the tokens drawn would not be kept.
"""

import math
from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels import scan
from sipipe.sampler.kernels.blocks import element
from sipipe.sampler.kernels.bounds import (
    LARGEST_RATIO,
    ROUNDING,
    UNIT,
    block_bounds,
    block_split,
    block_split_exactly,
)
from sipipe.sampler.kernels.lists import list_mass
from sipipe.sampler.kernels.philox import uniform, uniforms
from sipipe.sampler.kernels.scan import LOWEST, is_masked, positions_between

_ALL = 0
_REACHING = 1
_OTHERS = 2
SHARE = 32
"""Where a filter keeps less than 1 / SHARE, what may be kept is narrowed down before a draw."""
ATTEMPTS = 65536
"""Attempts of a draw. All of them fail with a probability below 1e-100, where one in 8.5 * SHARE
succeeds."""


@kernel
def draw_candidates(count: Any, cut: Any, cut_id: Any, filters: Any, work: Any) -> Any:
    """One of the candidates from (cut, cut_id) up; (token, their mass). In the order of the list
    those above the cut, then those tied with it."""
    beyond = np.nextafter(cut, np.float32(np.inf)) if cut >= LOWEST else LOWEST
    total = 0.0
    for start in range(0, count, 256):
        part, _ = list_mass(work.values, work.weights, start, beyond)
        total += part
        work.sums[start >> 8] = total
    tied = 0
    weight = 0.0
    if cut >= LOWEST:
        tied_candidates = positions_between(count, cut, beyond, work)
        for i in range(tied_candidates):
            at = work.picks[i]
            if work.ids[at] >= cut_id:
                work.picks[tied] = at
                tied += 1
                weight = np.float64(work.weights[at])
    target = uniform(filters.seed, filters.position) * (total + tied * weight)
    last = np.int64(-1)
    if target < total or tied * weight == 0.0:
        b = 0
        # bound: the blocks of `count`
        while work.sums[b] <= target and (b + 1) * 256 < count:
            b += 1
        before = work.sums[b - 1] if b else 0.0
        for i in range(b * 256, count):  # past the block only where rounding leads there
            if work.values[i] >= beyond:
                before += np.float64(work.weights[i])
                last = np.int64(work.ids[i])
                if before > target:
                    break
    if last < 0:
        chosen = min(int((target - total) / weight), tied - 1) if weight > 0.0 else 0
        last = np.int64(work.ids[work.picks[chosen]])
    return last, total + tied * weight


@kernel
def _bound_groups(x: Any, top: Any, slope: Any, least: Any, edited: Any, work: Any) -> Any:
    """Bounds of the groups of the row and its edits into ``work.weights``; (where they end, sum).
    Those of 256 groups together are left in ``work.masses``. Groups below ``least`` have none."""
    count = (((x.size + 255) >> 8) + ((edited + 255) >> 8)) << 5
    end = (count + 255) & ~255
    for i in range(count, end):
        work.groups[i] = scan.NEG_INF
    total = 0.0
    for start in range(0, end, 256):
        mass = block_bounds(work.groups, start, least, top, slope, work.weights)
        work.masses[start >> 8] = mass
        total += mass
    return end, total


@kernel
def _groups_from(least: Any, end: Any, step: Any, work: Any) -> Any:
    """Sum of the bounds of the groups that reach ``least``, of 256 in each ``step``."""
    total = 0.0
    for start in range(0, end, step):
        total += list_mass(work.groups, work.weights, start, least)[0]
    return total


@kernel
def _least_of_head(needed: Any, top: Any, slope: Any, end: Any, total: Any, work: Any) -> Any:
    """A logit; the bounds of the groups that reach it sum up to ``needed`` and little more. Guessed
    from 2,048 groups, then lowered until it is so for all, whose sum is ``total``."""
    if needed <= 1.0:  # which is the bound of the largest
        return top
    step = max(end >> 11, 1) << 8
    wanted = 1.1 * needed * (((end + step - 1) // step) << 8) / end
    # Groups with less than half of the mean bound hold less than half of the sum.
    high, low = np.float32(0.0), np.float32(math.log2(2.0 * end / total) * UNIT / slope)
    for _ in range(10):
        middle = (low + high) * np.float32(0.5)
        if _groups_from(top - middle, end, step, work) >= wanted:
            low = middle
        else:
            high = middle
    for _ in range(16):  # else all
        if _groups_from(top - low, end, 256, work) >= needed:
            return top - low
        low *= np.float32(1.2)
    return LOWEST


@kernel
def _passing(values: Any, first: Any, step: Any, count: Any, target: Any) -> Any:
    """(which of ``values[first::step]``, the sum before it) takes the running sum past ``target``.

    Of the first ``count``; the last one that is not 0 where none does.
    """
    chosen = 0
    before = reached = 0.0
    for i in range(count):
        mass = np.float64(values[first + i * step])
        if mass > 0.0:
            chosen = i
            reached = before
            before += mass
            if before > target:
                break
    return chosen, reached


@kernel
def _propose(end: Any, target: Any, work: Any) -> Any:
    """The group at which the running sum of bounds passes ``target``. By 256 groups, then by the
    lanes of their vectors, then within one."""
    piece, reached = _passing(work.masses, 0, 1, end >> 8, target)
    first = piece << 8
    lanes = work.sums[:16]
    lanes[:] = 0.0
    for start in range(first, first + 256, 16):
        for lane in range(16):
            lanes[lane] += np.float64(work.weights[start + lane])
    inside = 0.0
    for lane in range(16):
        inside += lanes[lane]
    # The sum of 256 was taken in float32: measure the rest of the way in its own unit.
    remaining = (target - reached) / np.float64(work.masses[piece]) * inside
    lane, reached = _passing(lanes, 0, 1, 16, remaining)
    row, _ = _passing(work.weights, first + lane, 16, 16, remaining - reached)
    return first + row * 16 + lane


@kernel
def _split_block(
    x: Any, start: Any, mask: Any, word: Any, value: Any, least: Any, top: Any, slope: Any,
    exact: Any,
) -> Any:  # fmt: skip
    if exact:
        return block_split_exactly(x, start, mask, word, value, least, top, slope)
    return block_split(x, start, mask, word, value, least, top, slope)


@kernel
def _split(
    x: Any, which: Any, value: Any, token: Any, least: Any, top: Any, slope: Any, exact: Any,
    edited: Any, work: Any,
) -> Any:  # fmt: skip
    """(mass of the logits before ``token``'s, ``value``, and mass of the others, down to ``least``).

    Before it are the larger ones, and those equal to it that have a higher id. Of all blocks, or of
    those ``which`` may hold them, or of the others. The weights where ``exact``, else their bounds.
    """
    full = x.size >> 8
    blocks = (x.size + 255) >> 8
    block = token >> 8
    larger = np.nextafter(value, np.float32(np.inf))
    before = remaining = 0.0
    tied = 0
    for b in range(blocks + ((edited + 255) >> 8)):
        if which != _ALL and (b >= blocks or work.peaks[b] >= value) != (which == _REACHING):
            continue
        first = value if block < b < blocks else larger
        if b >= blocks:
            start = (b - blocks) << 8
            parts = _split_block(
                work.edited, start, work.no_mask, 0, first, least, top, slope, exact
            )
            for i in range(start, min(start + 256, edited)):
                tied += work.edited[i] == value and work.edited_ids[i] > token
        elif b == full:
            parts = _split_block(work.tail, 0, work.mask, b << 3, first, least, top, slope, exact)
        else:
            parts = _split_block(x, b << 8, work.mask, b << 3, first, least, top, slope, exact)
        before += parts[0]
        remaining += parts[1]
    if which != _OTHERS:
        for i in range(token + 1, min((block + 1) << 8, x.size)):
            tied += element(x, i) == value and not is_masked(i, work)
    weight = np.float64(value - top) * np.float64(slope) + 127.0 * UNIT
    curve = np.float64(np.uint32(max(weight, 0.0)).view(np.float32))
    weight = 2.0 ** (weight / UNIT - 127.0) if exact else curve
    return before + tied * weight, remaining - tied * weight


@kernel
def _largest_equal(value: Any, temperature: Any) -> Any:
    """The largest logit that divided by the temperature is what ``value`` is, after rounding."""
    infinity = np.float32(np.inf)
    divided = np.float32(value / temperature)
    middle = (np.float64(divided) + np.float64(np.nextafter(divided, infinity))) * 0.5
    largest = max(np.float32(middle * np.float64(temperature)), value)
    if largest > value and np.float32(largest / temperature) > divided:
        largest = np.nextafter(largest, -infinity)
    return largest


@kernel
def _in_top_p(
    x: Any, value: Any, token: Any, least: Any, top: Any, slope: Any, end: Any, total: Any,
    mass: Any, top_p: Any, edited: Any, work: Any,
) -> Any:  # fmt: skip
    """(whether top-p keeps ``token``, sum of the bounds of the row or ``mass`` if it took none).

    It does if what comes before has less than ``top_p`` of the mass: (1 - top_p) before < top_p rest.
    ``total`` is the sum of the groups' bounds. A group holds at most 8 times its bound, and at least
    1 / LARGEST_RATIO of it: six tokens of ten are so known to be kept (p = 0.95). For most others the
    bounds of the weights are enough; the weights are summed only near the cut.
    """
    share = 1.0 - top_p
    reaching = _groups_from(value, end, 256, work)
    below = (total - reaching) / LARGEST_RATIO - total * 1e-6  # what rounding may have added
    if share * reaching * 8.0 < top_p * below:
        return True, mass
    before, remaining = _split(x, _REACHING, value, token, least, top, slope, False, edited, work)
    if before == 0.0 or share * before < top_p * max(below, remaining / LARGEST_RATIO):
        return True, mass
    if mass == 0.0:
        elsewhere = _split(x, _OTHERS, value, token, least, top, slope, False, edited, work)
        mass = before + remaining + elsewhere[1]
    remaining = mass - before
    rounding = mass * 1e-6
    if share * before < top_p * (remaining / LARGEST_RATIO - rounding):
        return True, mass
    if share * before / LARGEST_RATIO >= top_p * (remaining / ROUNDING + rounding):
        return False, mass
    before, remaining = _split(x, _ALL, value, token, least, top, slope, True, edited, work)
    return share * before < top_p * remaining, mass


@kernel
def draw_row(x: Any, top: Any, filters: Any, least: Any, edited: Any, work: Any) -> Any:
    """One token of the row and its edits, whose maximum is ``top``; `block_maxima` comes first. Of
    those from ``least`` on that top-k, or else top-p, keeps. -1: no attempt has taken one."""
    slope = np.float32(scan.LOG2E / np.float64(filters.temperature) * UNIT)
    exact = np.float64(slope) / UNIT
    end, total = _bound_groups(x, top, slope, least, edited, work)
    of_row = ((x.size + 255) >> 8) << 5
    mass = 0.0  # the sum of the row's bounds, once it is taken
    # Tokens up to (low, low_id), in the order of logits and then ids, are known not to be kept.
    low = least
    low_id = np.int64(-1)
    proposed = total
    few = filters.top_k == 0 and filters.top_p * SHARE < 1.0
    if few:
        # Where the largest logit alone need not hold top_p, and a group weighs unlike its largest.
        if filters.top_p * total * 8.5 > 1.0 and total * 4.0 < end:
            mass = _split(x, _ALL, top, np.int64(x.size), least, top, slope, False, edited, work)[1]
        needed = filters.top_p * (LARGEST_RATIO + 1e-4) * (mass if mass > 0.0 else total * 8.0)
        low = max(low, _least_of_head(needed, top, slope, end, total, work))
        proposed = _bound_groups(x, top, slope, low, edited, work)[1]
    for attempt in range(ATTEMPTS):
        u, v = uniforms(filters.seed, filters.position, attempt)
        group = _propose(end, u * proposed, work)
        place = int(v * 8.0)
        at = ((group >> 5) << 8) + (place << 5) + (group & 31)
        if group >= of_row:
            at -= of_row << 3
            token = np.int64(work.edited_ids[at])
            value = work.edited[at]
        elif at < x.size and not is_masked(at, work):
            token = np.int64(at)
            value = element(x, at)
        else:
            continue
        if value < low or (value == low and token <= low_id):
            continue
        weight = 2.0 ** (np.float64(value - top) * exact)
        if (v * 8.0 - place) * np.float64(work.weights[group]) >= weight * ROUNDING:
            continue
        if filters.top_k > 0:
            low = _largest_equal(value, filters.temperature)
            low_id = np.int64(x.size)
            larger = np.nextafter(low, np.float32(np.inf))
            if scan.count_at_least(x, larger, edited, work) >= filters.top_k:
                continue
        elif filters.top_p < 1.0:
            low = value
            low_id = token
            in_top_p, mass = _in_top_p(
                x, value, token, least, top, slope, end, total, mass, filters.top_p, edited, work
            )
            if not in_top_p:
                if few:
                    proposed = _bound_groups(x, top, slope, low, edited, work)[1]
                continue
        return token
    return np.int64(-1)
