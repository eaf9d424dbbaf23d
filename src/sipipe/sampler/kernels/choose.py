"""From a row to a token: filters, and one draw.

Rules, after vLLM: min-p keeps probabilities >= min_p times the largest; top-k keeps every logit >=
the k-th largest, so all tokens tied with it; top-p keeps the smallest set of most likely tokens
whose mass reaches p, and of tokens tied at that cut the ones with the highest ids (what a stable
ascending sort gives; vLLM's own choice depends on its sort, the number kept does not).

Each way through returns (token, kept, maximum, log of mass): the ``kept`` tokens lie in
``work.ids``/``values``, divided by the temperature, where ``listed``; kept is -1 for the whole row.
"""

import math
from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels import order, scan
from sipipe.sampler.kernels.blocks import element
from sipipe.sampler.kernels.draw import SHARE, draw_candidates, draw_row
from sipipe.sampler.kernels.philox import uniform
from sipipe.sampler.kernels.top_p import gather_tail, top_p_cut


@kernel
def first_maximum(x: Any, row_top: Any, top: Any, edited: Any, work: Any) -> Any:
    """The lowest token id with the largest logit, ``top``; the row's own largest is ``row_top``."""
    best = x.size
    if row_top == top:
        for b in range((x.size + 255) >> 8):
            if work.peaks[b] == top:
                for token in range(b << 8, min((b + 1) << 8, x.size)):
                    if element(x, token) == top and not scan.is_masked(token, work):
                        best = token
                        break
                break
    for i in range(edited):
        if work.edited[i] == top:
            best = min(best, np.int64(work.edited_ids[i]))
    return best


@kernel
def divide_candidates(count: Any, temperature: Any, work: Any) -> Any:
    """Divide the candidates by the temperature; their maximum."""
    top = scan.NEG_INF
    for i in range(count):
        value = work.values[i] / temperature
        work.values[i] = value
        top = max(top, value)
    return top


@kernel
def _keep_from(count: Any, cut: Any, cut_id: Any, work: Any) -> Any:
    """Drop the candidates below (cut, cut_id); how many stay."""
    stay = 0
    for i in range(count):
        value = work.values[i]
        token = work.ids[i]
        if value > cut or (value == cut and token >= cut_id):
            work.ids[stay] = token
            work.values[stay] = value
            stay += 1
    return stay


@kernel
def _choose_sorted(count: Any, filters: Any, work: Any) -> Any:
    """Filter and draw among few candidates, which are left sorted, most likely first."""
    k = filters.top_k
    min_p = filters.min_p
    top_p = filters.top_p
    for i in range(count):
        work.keys[i] = order.key_of(work.values[i], work.ids[i])
    order.sort_keys(count, False, work)
    top = order.key_value(work.keys[0])
    if 0 < k < count:
        cut = order.key_value(work.keys[k - 1])
        # bound: `count`
        while k < count and order.key_value(work.keys[k]) == cut:
            k += 1
        count = k
    floor = -math.inf
    if min_p > 0.0:
        floor = math.log(min_p)
    total = 0.0
    stay = 0
    for i in range(count):
        value = order.key_value(work.keys[i])
        below = np.float64(value) - np.float64(top)
        if below < floor:
            break
        total += math.exp(below)
        work.ids[i] = order.key_tie(work.keys[i])
        work.values[i] = value
        work.sums[i] = total
        stay += 1
    if top_p < 1.0:
        target = top_p * total
        last = 0
        # bound: `kept`
        while last < stay - 1 and work.sums[last] < target:
            last += 1
        stay = last + 1
        total = work.sums[last]
    target = uniform(filters.seed, filters.position) * total
    pick = 0
    # bound: `kept`
    while pick < stay - 1 and work.sums[pick] <= target:
        pick += 1
    return np.int64(work.ids[pick]), stay, np.float64(top), math.log(total)


@kernel
def _choose_listed(count: Any, high: Any, filters: Any, listed: Any, work: Any) -> Any:
    """Filter and draw among many candidates, whose largest is ``high``."""
    k = filters.top_k
    min_p = filters.min_p
    top_p = filters.top_p
    if min_p > 0.0:
        count = order.keep_at_least(count, np.float64(high) + math.log(min_p), work)
    if 0 < k < count:
        count = order.keep_largest(count, k, work)
    total = scan.candidate_weights(count, high, np.float32(scan.LOG2E), work)
    cut = scan.NEG_INF
    cut_id = np.int64(0)
    if top_p < 1.0:
        cut, cut_id = top_p_cut(count, high, scan.NEG_INF, top_p * total, 1.0, work)
    token, total = draw_candidates(count, cut, cut_id, filters, work)
    if listed:
        count = _keep_from(count, cut, cut_id, work)
    return token, count, np.float64(high), math.log(total)


@kernel
def draws_from_row(vocab: Any, filters: Any) -> Any:
    """Say if the filters can be put to one token, and top-k keeps a good part."""
    k = filters.top_k
    return k == 0 or (filters.top_p >= 1.0 and k * SHARE > vocab)


@kernel
def _least_of_min_p(top: Any, filters: Any) -> Any:
    """The least logit that min-p keeps."""
    if filters.min_p == 0.0:
        return scan.LOWEST
    none = np.float32(0.0)
    floor = np.float64(top / filters.temperature) + math.log(filters.min_p)
    return order.least_reaching(floor, top, filters.temperature, none, none)


@kernel
def _groups_reach(x: Any, least: Any, work: Any) -> Any:
    """Say if more than 1 / `SHARE` of the row's groups reach ``least``: few are better listed."""
    groups = ((x.size + 255) >> 8) << 5
    reaching = 0
    for i in range(groups):
        reaching += work.groups[i] >= least
    return reaching * SHARE > groups


@kernel
def _is_candidate(token: Any, count: Any, work: Any) -> Any:
    is_candidate = False
    for i in range(count):
        is_candidate |= work.ids[i] == token
    return is_candidate


@kernel
def choose(
    x: Any, row_top: Any, top: Any, from_row: Any, filters: Any, listed: Any, edited: Any,
    work: Any,
) -> Any:  # fmt: skip
    """Filter and draw; maxima of the row without its edits, and with them: ``row_top`` and ``top``.
    Where the token is drawn ``from_row``, only what is to be ``listed`` is filtered. Where no
    attempt takes one, or the list ends before it by rounding, it is drawn from what is filtered."""
    k = filters.top_k
    top_p = filters.top_p
    token = np.int64(-1)
    least = scan.LOWEST
    if from_row:
        least = _least_of_min_p(top, filters)
        from_row = filters.min_p == 0.0 or _groups_reach(x, least, work)
    if from_row:
        token = draw_row(x, top, filters, least, edited, work)
        if token >= 0 and not listed:
            return token, np.int64(-1), 0.0, 0.0
    inverse = 1.0 / np.float64(filters.temperature)
    if k > 0 or filters.min_p > 0.0:
        threshold = scan.LOWEST
        if k > 0:
            threshold = order.candidate_threshold(x, k, row_top, edited, work)
        if filters.min_p > 0.0:
            floor = np.float64(top) + math.log(filters.min_p) / inverse
            floor -= (abs(floor) + abs(np.float64(top))) * 1e-6
            threshold = max(threshold, np.float32(floor))
        count = scan.gather(x, min(threshold, top), edited, work)
        high = divide_candidates(count, filters.temperature, work)
        if count <= scan.SMALL and (k > 0 or top_p < 1.0):
            other, count, scaled_top, log_mass = _choose_sorted(count, filters, work)
        else:
            other, count, scaled_top, log_mass = _choose_listed(count, high, filters, listed, work)
        if token < 0 or not _is_candidate(token, count, work):
            token = other
        return token, count, scaled_top, log_mass
    scale = np.float32(inverse * scan.LOG2E)
    scaled_top = np.float64(top / filters.temperature)
    total = scan.exp_sums(x, top, scale, edited, work)
    if top_p >= 1.0:
        if from_row and token < 0:
            count = scan.gather(x, scan.LOWEST, edited, work)
            scan.candidate_weights(count, top, scale, work)
            token, _ = draw_candidates(count, scan.NEG_INF, np.int64(0), filters, work)
        return token, np.int64(-1), scaled_top, math.log(total)
    target = top_p * total
    count, low = gather_tail(x, top, scale, total, target, edited, work)
    cut, cut_id = top_p_cut(count, top, low, target, inverse, work)
    other, total = draw_candidates(count, cut, cut_id, filters, work)
    if listed:
        count = _keep_from(count, cut, cut_id, work)
        divide_candidates(count, filters.temperature, work)
    if token < 0 or (listed and not _is_candidate(token, count, work)):
        token = other
    return token, count, scaled_top, math.log(total)
