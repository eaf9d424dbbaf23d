"""One token by inverse CDF: of the candidates, or of a whole row and its edits.

Of a row by rejection: a group of 8 tokens is proposed by an upper bound of the weight of its largest
logit, which the pass for the maxima leaves behind, then one of the 8, each as likely; it is taken
with probability weight / bound, else the next is proposed: 1 of 8.5 succeeds at worst. So each
token is drawn with exactly its share of the mass, and the row is read once.

Nor need a filter be applied to the row. A token drawn from all of them that top-k or top-p keeps is
a token drawn from those that they keep; so the one token is judged: top-k keeps it if fewer than k
logits are larger, top-p if what comes before it in the order of likelihood has less than p of the
mass. One that they do not keep is drawn again. Where top-p keeps less than 1 / `SHARE`, groups that
lie wholly before it in that order are then left out: each time about half of the mass that is left
too much goes. What min-p keeps is known beforehand, so only groups that it keeps of are proposed.
"""

import math
from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels import scan
from sipipe.sampler.kernels.blocks import block_exp, element
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

_ALL, _REACHING, _OTHERS = 0, 1, 2
SHARE = 32
"""What filters keep holds 1 / SHARE of the mass at least, or what they do not is left out."""
ATTEMPTS = 65536
"""That many fail with a probability below 1e-100, where one in 8.5 * SHARE succeeds."""
_FEW_TIED = 64
"""Where more are tied with a token, the end of the set among them is looked for at once."""
_OFTEN = 8.0 / ROUNDING
"""The mass of a row is at most so many times the sum of its groups' bounds."""


@kernel
def draw_candidates(count: Any, cut: Any, cut_id: Any, filters: Any, work: Any) -> Any:
    """One of the candidates from (cut, cut_id) up; (token, their mass).

    In the order of the list those above the cut, then those tied with it.
    """
    beyond = np.nextafter(cut, np.float32(np.inf)) if cut >= LOWEST else LOWEST
    total = 0.0
    for start in range(0, count, 256):
        part, _ = list_mass(work.values, work.weights, start, beyond)
        total += part
        work.sums[start >> 8] = total
    tied = 0
    weight = 0.0
    if cut >= LOWEST:
        found = positions_between(count, cut, beyond, work)
        for i in range(found):
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
        rest = min(int((target - total) / weight), tied - 1) if weight > 0.0 else 0
        last = np.int64(work.ids[work.picks[rest]])
    return last, total + tied * weight


@kernel
def _bound_groups(x: Any, top: Any, slope: Any, least: Any, edited: Any, work: Any) -> Any:
    """Bounds of the groups of the row and its edits into ``work.weights``; (where they end, sum).

    Those of 256 groups together are left in ``work.masses``. Groups below ``least`` become -inf.
    """
    count = (((x.size + 255) >> 8) + ((edited + 255) >> 8)) << 5
    end = (count + 255) & ~255
    for i in range(count, end):
        work.groups[i] = scan.NEG_INF
    if least > LOWEST:
        for i in range(count):
            work.groups[i] = work.groups[i] if work.groups[i] >= least else scan.NEG_INF
    total = 0.0
    for start in range(0, end, 256):
        mass = block_bounds(work.groups, start, top, slope, work.weights)
        work.masses[start >> 8] = mass
        total += mass
    return end, total


@kernel
def _leave_out(of_row: Any, end: Any, low: Any, low_id: Any, work: Any) -> Any:
    """Take groups without a token beyond (low, low_id) from the bounds; their sum."""
    for i in range(end):
        work.weights[i] = work.weights[i] if work.groups[i] >= low else np.float32(0.0)
    for i in range(end if low_id >= 0 else 0):
        if work.groups[i] == low:
            last = ((i >> 5) << 8) + (i & 31)
            if i < of_row:
                if last + 224 <= low_id:
                    work.weights[i] = 0.0
                continue
            beyond = False
            for at in range(last - (of_row << 3), last - (of_row << 3) + 256, 32):
                beyond |= work.edited[at] >= low and work.edited_ids[at] > low_id
            if not beyond:
                work.weights[i] = 0.0
    total = 0.0
    for start in range(0, end, 256):
        mass = list_mass(work.groups, work.weights, start, low)[0]
        work.masses[start >> 8] = mass
        total += mass
    return total


@kernel
def _below_top_p(x: Any, top: Any, slope: Any, least: Any, needed: Any, work: Any) -> Any:
    """A logit that tokens with the mass ``needed`` reach, so a small top-p keeps none below it.

    The largest tokens of the blocks are some of them. ``least`` where they do not weigh as much.
    """
    end = (((x.size + 255) >> 8) + 255) & ~255
    for start in range(0, end, 256):
        block_exp(work.peaks, start, top, np.float32(slope / UNIT), work.spare)
    found, high = least, np.float64(top)
    low = high - 127.0 * UNIT / slope
    for attempt in range(16):
        middle = np.float32(high if attempt == 0 else (low + high) * 0.5)
        mass = 0.0
        for start in range(0, end, 256):
            mass += list_mass(work.peaks, work.spare, start, middle)[0]
        if mass * ROUNDING >= needed:
            found = max(middle, least)
            low = np.float64(middle)
            if attempt == 0:
                break
        else:
            high = np.float64(middle)
    return found


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
            chosen, reached = i, before
            before += mass
            if before > target:
                break
    return chosen, reached


@kernel
def _propose(end: Any, target: Any, work: Any) -> Any:
    """The group at which the running sum of bounds passes ``target``.

    By 256 groups, then by the lanes of their vectors, then within one.
    """
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
    rest = (target - reached) / np.float64(work.masses[piece]) * inside
    lane, reached = _passing(lanes, 0, 1, 16, rest)
    row, _ = _passing(work.weights, first + lane, 16, 16, rest - reached)
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
    """(mass of the logits above ``value``, of the others, how many equal it and have a higher id).

    Of those from ``least`` on, and of all blocks, or of those ``which`` may hold such logits, or of the others. The sums of the
    weights where ``exact``, else of their bounds.
    """
    full = x.size >> 8
    blocks = (x.size + 255) >> 8
    own = token >> 8
    above = rest = 0.0
    tied = 0
    passed = 0
    for b in range(blocks + ((edited + 255) >> 8)):
        if which != _ALL and (b >= blocks or work.peaks[b] >= value) != (which == _REACHING):
            continue
        passed += 1
        if b >= blocks:
            start = (b - blocks) << 8
            parts = _split_block(
                work.edited, start, work.no_mask, 0, value, least, top, slope, exact
            )
        elif b == full:
            parts = _split_block(work.tail, 0, work.mask, b << 3, value, least, top, slope, exact)
        else:
            parts = _split_block(x, b << 8, work.mask, b << 3, value, least, top, slope, exact)
        above += parts[0]
        rest += parts[1]
        if parts[2] > 0:
            if b >= blocks:
                for i in range(start, min(start + 256, edited)):
                    tied += work.edited[i] == value and work.edited_ids[i] > token
            elif b > own:
                tied += parts[2]
            elif b == own:
                for i in range(token + 1, min((b + 1) << 8, x.size)):
                    tied += element(x, i) == value and not is_masked(i, work)
    work.passed[0] += passed
    return above, rest, tied


@kernel
def _largest_equal(value: Any, temperature: Any) -> Any:
    """The largest logit that divided by the temperature is what ``value`` is, after rounding."""
    infinity = np.float32(np.inf)
    divided = np.float32(value / temperature)
    middle = (np.float64(divided) + np.float64(np.nextafter(divided, infinity))) * 0.5
    found = max(np.float32(middle * np.float64(temperature)), value)
    if found > value and np.float32(found / temperature) > divided:
        found = np.nextafter(found, -infinity)
    return found


@kernel
def _nth_last(x: Any, n: Any, value: Any, top: Any, slope: Any, work: Any) -> Any:
    """The n-th highest id of the row's tokens with the logit ``value``; -1 where there are fewer."""
    full = x.size >> 8
    for b in range((x.size - 1) >> 8, -1, -1):
        if work.peaks[b] >= value:
            work.passed[0] += 1
            if b == full:
                equal = _split_block(
                    work.tail, 0, work.mask, b << 3, value, value, top, slope, False
                )[2]
            else:
                equal = _split_block(x, b << 8, work.mask, b << 3, value, value, top, slope, False)[
                    2
                ]
            if equal >= n:
                for token in range(min((b + 1) << 8, x.size) - 1, (b << 8) - 1, -1):
                    n -= element(x, token) == value and not is_masked(token, work)
                    if n == 0:
                        return np.int64(token)
            n -= equal
    return np.int64(-1)


@kernel
def _in_top_p(
    x: Any, value: Any, token: Any, weight: Any, least: Any, top: Any, slope: Any, end: Any,
    total: Any, mass: Any, top_p: Any, edited: Any, work: Any,
) -> Any:  # fmt: skip
    """(whether top-p keeps ``token``, sum of the row's bounds or ``mass`` if it took none, id, sure).

    Of the tokens tied with it none up to ``id`` is kept; ``sure``: all others are, and all above.

    It does if what comes before has less than ``top_p`` of the mass: (1 - top_p) above < top_p rest.
    ``total`` is the sum of the groups' bounds. A group holds at most 8 times its bound, and at least
    1 / LARGEST_RATIO of it; with p = 0.95, six tokens of ten are so known to be kept. For most of the
    others the bounds of the weights are enough; the weights are summed only near the cut.
    """
    reaching = 0.0
    for start in range(0, end, 256):
        reaching += list_mass(work.groups, work.weights, start, value)[0]
    below = (total - reaching) / LARGEST_RATIO - total * 1e-6  # what rounding may have added
    if (1.0 - top_p) * reaching * 8.0 < top_p * below:
        return True, mass, token, False
    if top_p * _OFTEN < 1.0:
        larger = np.nextafter(value, np.float32(np.inf))
        above = 0.0
        for start in range(0, end, 256):
            above += list_mass(work.groups, work.weights, start, larger)[0]
        if (1.0 - top_p) * above * (1.0 - 1e-6) >= top_p * total * _OFTEN * LARGEST_RATIO:
            return False, mass, token, False
    above, rest, tied = _split(x, _REACHING, value, token, least, top, slope, False, edited, work)
    before = tied * weight
    if (1.0 - top_p) * above + before < top_p * max(below, rest / LARGEST_RATIO):
        return True, mass, token, False
    most = ((above + rest) / ROUNDING + (total - reaching) * _OFTEN) * (1.0 + 1e-6)
    if above >= top_p * most * LARGEST_RATIO:
        return False, mass, np.int64(x.size), False
    few = tied <= _FEW_TIED
    if mass == 0.0 and few:
        others = _split(x, _OTHERS, value, token, least, top, slope, False, edited, work)[1]
        mass = above + rest + others
    rest, rounding = mass - above, mass * 1e-6
    if few and (1.0 - top_p) * above + before < top_p * (rest / LARGEST_RATIO - rounding):
        return True, mass, token, False
    if few and (1.0 - top_p) * above / LARGEST_RATIO + before >= top_p * (
        rest / ROUNDING + rounding
    ):
        return False, mass, token, False
    above, rest, tied = _split(x, _ALL, value, token, least, top, slope, True, edited, work)
    if (1.0 - top_p) * above + before < top_p * rest:
        return True, mass, token, False
    if (1.0 - top_p) * above >= top_p * rest:
        return False, mass, np.int64(x.size), False
    for i in range(edited):
        if work.edited[i] == value:
            return False, mass, token, False
    number = math.ceil((top_p * rest - (1.0 - top_p) * above) / weight)
    return False, mass, _nth_last(x, number, value, top, slope, work) - 1, True


@kernel
def draw_row(x: Any, top: Any, filters: Any, least: Any, edited: Any, work: Any) -> Any:
    """One token of the row and its edits, whose maximum is ``top``; `block_maxima` comes first.

    Of those from ``least`` on that top-k, or else top-p, keeps. -1: no attempt has taken one.
    """
    slope = np.float32(scan.LOG2E / np.float64(filters.temperature) * UNIT)
    exact = np.float64(slope) / UNIT
    end, total = _bound_groups(x, top, slope, least, edited, work)
    of_row = ((x.size + 255) >> 8) << 5
    mass = 0.0  # the sum of the row's bounds, once it is taken
    proposed = total
    little = filters.top_p * SHARE < 1.0
    # Tokens up to (low, low_id), in the order of logits and then ids, are known not to be kept.
    low, low_id = least, np.int64(-1)
    sure = False  # all others are
    if little:
        low = _below_top_p(x, top, slope, least, filters.top_p * total * _OFTEN, work)
        proposed = _leave_out(of_row, end, low, low_id, work)
    for attempt in range(ATTEMPTS):
        u, v = uniforms(filters.seed, filters.position, attempt)
        group = _propose(end, u * proposed, work)
        place = int(v * 8.0)
        at = ((group >> 5) << 8) + (place << 5) + (group & 31)
        if group >= of_row:
            at -= of_row << 3
            token, value = np.int64(work.edited_ids[at]), work.edited[at]
        elif at < x.size and not is_masked(at, work):
            token, value = np.int64(at), element(x, at)
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
            least, none = np.nextafter(low, np.float32(np.inf)), np.float32(0.0)
            if scan.count_at_least(x, none, none, least, edited, work) >= filters.top_k:
                continue
        elif filters.top_p < 1.0 and not sure:
            low = value
            kept, mass, low_id, sure = _in_top_p(
                x, value, token, weight, least, top, slope, end, total, mass, filters.top_p,
                edited, work,
            )  # fmt: skip
            if not kept:
                if little:
                    proposed = _leave_out(of_row, end, low, low_id, work)
                continue
        return token
    return np.int64(-1)
