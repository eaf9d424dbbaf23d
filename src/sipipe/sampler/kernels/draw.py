"""One token by inverse CDF: of the candidates, or of a whole row and its edits."""

from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels.blocks import block_exp
from sipipe.sampler.kernels.lists import list_mass
from sipipe.sampler.kernels.scan import LOWEST, is_masked, positions_between


@kernel
def draw_candidates(count: Any, cut: Any, cut_id: Any, u: Any, work: Any) -> Any:
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
    target = u * (total + tied * weight)
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
def draw_full(x: Any, top: Any, scale: Any, total: Any, u: Any, edited: Any, work: Any) -> Any:
    """One token of the row and its edits, by block and then within it; `exp_sums` comes first."""
    target = u * total
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
    full = x.size >> 8
    if chosen < full:
        start = chosen << 8
        block_exp(x, start, top, scale, work.weights)
    elif chosen < blocks:
        start = 0
        block_exp(work.tail, start, top, scale, work.weights)
    else:
        start = (chosen - blocks) << 8
        block_exp(work.edited, start, top, scale, work.weights)
    inside = 0.0
    for i in range(256):
        if chosen >= blocks or not is_masked((chosen << 8) + i, work):
            inside += np.float64(work.weights[start + i])
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
        return np.int64((chosen << 8) + pick)
    return np.int64(work.edited_ids[start + pick])
