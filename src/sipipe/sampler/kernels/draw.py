"""One token by inverse CDF: of the candidates, or of a whole row and its edits.

Of a row by rejection: a token is proposed by upper bounds of the weights, which cost a third of the
weights themselves, and taken with probability weight / bound, 0.96 on the average; else the next
one is proposed. So each token is drawn with exactly its share of the mass, which need not be known.

Nor need a filter be applied to the row. A token drawn from all of them that top-k or top-p keeps is
a token drawn from those that they keep; so the one token is judged: top-k keeps it if fewer than k
logits are larger, top-p if what comes before it in the order of likelihood has less than p of the
mass. One that they do not keep is drawn again.
"""

from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels import scan
from sipipe.sampler.kernels.blocks import element
from sipipe.sampler.kernels.bounds import (
    LARGEST_RATIO,
    ROUNDING,
    UNIT,
    block_above,
    block_bound_sum,
    block_bounds,
)
from sipipe.sampler.kernels.lists import list_mass
from sipipe.sampler.kernels.philox import uniform, uniforms
from sipipe.sampler.kernels.scan import LOWEST, is_masked, positions_between

SHARE = 32
"""What filters keep holds 1 / SHARE of the mass at least, or the row is not drawn by rejection."""
_ATTEMPTS = 8192
"""That many fail with a probability below 1e-100."""


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
def _bound_sums(x: Any, top: Any, slope: Any, edited: Any, work: Any) -> Any:
    """Sum of the bounds of the row and its edits.

    The sums of the row's blocks are left in ``work.masses``, those of the edits behind them.
    """
    full = x.size >> 8
    pieces = (x.size + 255) >> 8
    total = 0.0
    for b in range(full):
        mass: Any = np.float32(0.0)
        if work.peaks[b] > scan.NEG_INF:  # else all of it is masked
            mass = block_bound_sum(x, b << 8, work.mask, b << 3, top, slope)
        work.masses[b] = mass
        total += mass
    if full < pieces:
        mass = block_bound_sum(work.tail, 0, work.mask, full << 3, top, slope)
        work.masses[full] = mass
        total += mass
    for start in range(0, edited, 256):
        mass = block_bound_sum(work.edited, start, work.no_mask, 0, top, slope)
        work.masses[pieces + (start >> 8)] = mass
        total += mass
    return total


@kernel
def _propose(x: Any, top: Any, slope: Any, target: Any, edited: Any, work: Any) -> Any:
    """The token at which the running sum of bounds passes ``target``: (id, its logit, its bound).

    By block, then within it.
    """
    blocks = (x.size + 255) >> 8
    parts = blocks + ((edited + 255) >> 8)
    before = 0.0
    chosen = 0
    reached = 0.0
    for b in range(parts):
        mass = np.float64(work.masses[b])
        if mass > 0.0:
            chosen, reached = b, before
            before += mass
            if before > target:
                break
    start = chosen << 8
    if chosen < x.size >> 8:
        block_bounds(x, start, top, slope, work.weights)
    elif chosen < blocks:
        block_bounds(work.tail, 0, top, slope, work.weights)
    else:
        start = (chosen - blocks) << 8
        block_bounds(work.edited, start, top, slope, work.weights)
    inside = 0.0
    for i in range(256):
        if chosen >= blocks or not is_masked(start + i, work):
            inside += np.float64(work.weights[i])
        work.sums[i] = inside
    # The block's sum was taken in float32: measure the rest of the way in its own unit.
    rest = (target - reached) / np.float64(work.masses[chosen]) * inside
    pick = 0
    previous = 0.0
    for i in range(256):
        if work.sums[i] > previous:
            pick = i
            if work.sums[i] > rest:
                break
        previous = work.sums[i]
    if chosen < blocks:
        return np.int64(start + pick), element(x, start + pick), np.float64(work.weights[pick])
    token = np.int64(work.edited_ids[start + pick])
    return token, work.edited[start + pick], np.float64(work.weights[pick])


@kernel
def _before(x: Any, value: Any, token: Any, top: Any, scale: Any, edited: Any, work: Any) -> Any:
    """(mass of the logits above ``value``, how many tokens above ``token`` have ``value``)."""
    full = x.size >> 8
    own = token >> 8
    above = 0.0
    tied = 0
    for b in range((x.size + 255) >> 8):
        if work.peaks[b] >= value:
            if b < full:
                mass, equal = block_above(x, b << 8, work.mask, b << 3, value, top, scale)
            else:
                mass, equal = block_above(work.tail, 0, work.mask, b << 3, value, top, scale)
            above += mass
            if b > own:
                tied += equal
            elif b == own and equal > 0:
                for i in range(token + 1, min((b + 1) << 8, x.size)):
                    tied += element(x, i) == value and not is_masked(i, work)
    for start in range(0, edited, 256):
        mass, equal = block_above(work.edited, start, work.no_mask, 0, value, top, scale)
        above += mass
        if equal > 0:
            for i in range(start, min(start + 256, edited)):
                tied += work.edited[i] == value and work.edited_ids[i] > token
    return above, tied


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
def draw_row(
    x: Any, top: Any, filters: Any, judged: Any, low: Any, low_id: Any, edited: Any, work: Any
) -> Any:
    """One token of the row and its edits, whose maximum is ``top``; `block_maxima` comes first.

    ``judged``: by top-k, or else top-p, where they are set. Tokens up to (low, low_id), in the
    order of logits and then ids, are known not to be kept. Returns -1 for what does not happen.
    """
    scale = scan.LOG2E / np.float64(filters.temperature)
    slope = np.float32(scale * UNIT)
    exact = np.float64(slope) / UNIT
    total = _bound_sums(x, top, slope, edited, work)
    mass = 0.0  # of the row, once it is known
    for attempt in range(_ATTEMPTS):
        u, v = uniforms(filters.seed, filters.position, attempt)
        token, value, bound = _propose(x, top, slope, u * total, edited, work)
        weight = 2.0 ** (np.float64(value - top) * exact)
        if v * bound >= weight * ROUNDING or value < low or (value == low and token <= low_id):
            continue
        if judged and filters.top_k > 0:
            low = _largest_equal(value, filters.temperature)
            low_id = np.int64(x.size)
            least, none = np.nextafter(low, np.float32(np.inf)), np.float32(0.0)
            if scan.count_at_least(x, none, none, least, edited, work) >= filters.top_k:
                continue
        elif judged and filters.top_p < 1.0:
            low, low_id = value, token
            above, tied = _before(x, value, token, top, np.float32(scale), edited, work)
            above += tied * weight
            # The mass lies between the sum of the bounds and 1 / LARGEST_RATIO of it.
            if above >= filters.top_p * total:
                continue
            if above * LARGEST_RATIO >= filters.top_p * total:
                if mass == 0.0:
                    mass = scan.exp_sums(x, top, np.float32(scale), edited, work)
                if above >= filters.top_p * mass:
                    continue
        return token
    return np.int64(-1)
