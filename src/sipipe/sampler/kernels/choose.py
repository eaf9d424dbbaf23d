"""From a row to a token: filters, and one draw by inverse CDF.

Rules, after vLLM: min-p keeps probabilities >= min_p times the largest; top-k keeps every logit >=
the k-th largest, so all tokens tied with it; top-p keeps the smallest set of most likely tokens
whose mass reaches p, and of tokens tied at that cut the ones with the highest ids (what a stable
ascending sort gives; vLLM's own choice depends on its sort, the number kept does not).

Each way through returns (token, kept, maximum, log of mass): the ``kept`` tokens lie in
``work.ids``/``values``, divided by the temperature, where ``listed``; kept is -1 for the whole row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels.blocks import element
from sipipe.sampler.kernels.draw import draw_candidates, draw_full
from sipipe.sampler.kernels.order import (
    candidate_threshold,
    key_high_id,
    key_of,
    key_value,
    kth_largest,
    sort_keys,
)
from sipipe.sampler.kernels.scan import (
    LOG2E,
    LOWEST,
    NOTHING,
    SMALL,
    candidate_weights,
    exp_sums,
    gather,
    is_hidden,
)
from sipipe.sampler.kernels.top_p import gather_tail, top_p_cut


@kernel
def first_maximum(x: Any, vocab: Any, row_top: Any, top: Any, changed: Any, work: Any) -> Any:
    """The lowest token id with the largest logit, ``top``; the row's own largest is ``row_top``."""
    best = vocab
    if row_top == top:
        b = 0
        while work.peaks[b] != top:
            b += 1
        best = b << 8
        while is_hidden(best, work) or element(x, best) != top:
            best += 1
    for i in range(changed):
        if work.changed[i] == top:
            best = min(best, np.int64(work.changed_ids[i]))
    return best


@kernel
def divide_candidates(count: Any, temperature: Any, work: Any) -> Any:
    """Divide the candidates by the temperature; their maximum."""
    top = NOTHING
    for i in range(count):
        value = work.values[i] / temperature
        work.values[i] = value
        top = max(top, value)
    return top


@kernel
def _keep_at_least(count: Any, floor: Any, work: Any) -> Any:
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
def _keep_from(count: Any, cut: Any, cut_id: Any, work: Any) -> Any:
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
def _choose_sorted(count: Any, k: Any, min_p: Any, top_p: Any, u: Any, work: Any) -> Any:
    """Filter and draw among few candidates, which are left sorted, most likely first."""
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
    return np.int64(work.ids[pick]), kept, np.float64(top), math.log(total)


@kernel
def _choose_listed(
    count: Any, high: Any, k: Any, min_p: Any, top_p: Any, u: Any, listed: Any, work: Any
) -> Any:
    """Filter and draw among many candidates, whose largest is ``high``."""
    if min_p > 0.0:
        count = _keep_at_least(count, np.float64(high) + math.log(min_p), work)
    if 0 < k < count:
        for i in range(count):
            work.weights[i] = work.values[i]
        count = _keep_at_least(count, np.float64(kth_largest(work.weights, count, k)), work)
    total = candidate_weights(count, high, np.float32(LOG2E), work)
    cut, cut_id = NOTHING, np.int64(0)
    if top_p < 1.0:
        cut, cut_id = top_p_cut(count, high, NOTHING, top_p * total, 1.0, work)
    token, total = draw_candidates(count, cut, cut_id, u, work)
    if listed:
        count = _keep_from(count, cut, cut_id, work)
    return token, count, np.float64(high), math.log(total)


@kernel
def choose(
    x: Any,
    vocab: Any,
    row_top: Any,
    top: Any,
    temperature: Any,
    k: Any,
    min_p: Any,
    top_p: Any,
    u: Any,
    listed: Any,
    changed: Any,
    work: Any,
) -> Any:
    """Filter and draw; maxima of the row without overlay, and with it: ``row_top`` and ``top``."""
    inverse = 1.0 / np.float64(temperature)
    if k > 0 or min_p > 0.0:
        threshold = LOWEST
        if k > 0:
            threshold = candidate_threshold(x, vocab, k, row_top, changed, work)
        if min_p > 0.0:
            floor = np.float64(top) + math.log(min_p) / inverse
            floor -= (abs(floor) + abs(np.float64(top))) * 1e-6
            threshold = max(threshold, np.float32(floor))
        count = gather(x, vocab, min(threshold, top), changed, work)
        high = divide_candidates(count, temperature, work)
        if count <= SMALL and (k > 0 or top_p < 1.0):
            return _choose_sorted(count, k, min_p, top_p, u, work)
        return _choose_listed(count, high, k, min_p, top_p, u, listed, work)
    scale = np.float32(inverse * LOG2E)
    scaled_top = np.float64(top / temperature)
    total = exp_sums(x, vocab, top, scale, changed, work)
    if top_p >= 1.0:
        token = draw_full(x, vocab, top, scale, total, u, changed, work)
        return token, np.int64(-1), scaled_top, math.log(total)
    target = top_p * total
    count, low = gather_tail(x, vocab, top, scale, total, target, changed, work)
    cut, cut_id = top_p_cut(count, top, low, target, inverse, work)
    token, total = draw_candidates(count, cut, cut_id, u, work)
    if listed:
        count = _keep_from(count, cut, cut_id, work)
        divide_candidates(count, temperature, work)
    return token, count, scaled_top, math.log(total)
