"""Logprobs of one row, as vLLM returns them: the drawn token first, then the top-k, and its rank.

Among equal scores the lower token id comes first. A rank counts the scores >= the drawn token's,
itself among them, after rounding to float32: as in vLLM.
"""

import math
from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels import order, scan
from sipipe.sampler.kernels.blocks import element
from sipipe.sampler.kernels.choose import divide_candidates

_LAST = np.int64(0xFFFFFFFF)
"""Minus an id, a tie of sort keys that puts lower ids first."""


@kernel
def _logit(x: Any, token: Any, edited: Any, work: Any) -> Any:
    if not scan.is_masked(token, work):
        return element(x, token)
    for c in range(edited):
        if work.edited_ids[c] == token:
            return work.edited[c]
    return scan.NEG_INF


@kernel
def _places(i: Any, out: Any) -> Any:
    """Where the token ids and scores of call row ``i`` go."""
    first, last = out.score_ends[i], out.score_ends[i + 1]
    return out.score_ids[first:last], out.scores[first:last]


@kernel
def _write_top(
    count: Any, k: Any, shift: Any, offset: Any, edited: Any, ids: Any, values: Any, work: Any
) -> None:
    """The k best of the candidates into ``ids[1:]``/``values[1:]``; then masked tokens, -inf, in
    order of their ids. Largest value first, lower id first among equals. Many candidates are in order
    of their ids where none is ``edited``."""
    for i in range(count):
        work.keys[i] = order.key_of(work.values[i], _LAST - np.int64(work.ids[i]))
    order.sort_keys(count, edited == 0, work)
    n = min(k, count)
    for i in range(n):
        ids[1 + i] = _LAST - order.key_tie(work.keys[i])
        values[1 + i] = (order.key_value(work.keys[i]) - shift) - offset
    if n < k:
        for i in range(count):
            work.entries[work.ids[i]] = 1
        token = 0
        # bound: the vocabulary, of which k are asked for at most
        while n < k:
            if work.entries[token] == 0:
                ids[1 + n] = token
                values[1 + n] = scan.NEG_INF
                n += 1
            token += 1
        for i in range(count):
            work.entries[work.ids[i]] = 0


@kernel
def score_row(
    x: Any, top: Any, temperature: Any, shift: Any, offset: Any,
    i: Any, edited: Any, options: Any, work: Any, out: Any,
) -> None:  # fmt: skip
    """Scores of call row ``i``, of every token: ``(logit / temperature - shift) - offset``. The
    `block_maxima` of the row without its edits are in ``work``, the largest is ``top``."""
    ids, values = _places(i, out)
    token = out.tokens[i]
    logit = _logit(x, token, edited, work)
    score = (logit / temperature - shift) - offset
    ids[0] = token
    values[0] = score
    out.ranks[i] = x.size
    if score >= scan.LOWEST:
        least = order.least_reaching(score, logit, temperature, shift, offset)
        out.ranks[i] = scan.count_at_least(x, least, edited, work)
    named = options.named.values[options.named.offsets[i] : options.named.offsets[i + 1]]
    k = np.int64(options.wanted[i])
    if named.size:  # they replace the most likely ones
        for j in range(named.size):
            ids[1 + j] = named[j]
            values[1 + j] = (_logit(x, named[j], edited, work) / temperature - shift) - offset
    elif k > 0:
        threshold = scan.LOWEST
        if k < x.size:
            threshold = order.candidate_threshold(x, k, top, edited, work)
        count = scan.gather(x, threshold, edited, work)
        divide_candidates(count, temperature, work)
        _write_top(count, k, shift, offset, edited, ids, values, work)


@kernel
def score_raw(x: Any, top: Any, logits: Any, i: Any, options: Any, work: Any, out: Any) -> None:
    """Raw scores of call row ``i``, whose `block_maxima` are in ``work``, without edited tokens.
    ``top`` is the row's maximum; ``logits`` says whether scores are logits or log-probabilities."""
    shift = np.float32(0.0)
    offset = np.float32(0.0)
    if not logits and top >= scan.LOWEST:
        shift = top
        offset = np.float32(math.log(scan.exp_sums(x, top, np.float32(scan.LOG2E), 0, work)))
    score_row(x, top, np.float32(1.0), shift, offset, i, 0, options, work, out)


@kernel
def score_kept(
    count: Any, shift: Any, offset: Any, i: Any, edited: Any, options: Any, work: Any, out: Any
) -> None:
    """Scores of call row ``i`` of which ``count`` tokens are kept, divided, as candidates; else -inf."""
    ids, values = _places(i, out)
    score = scan.NEG_INF
    for j in range(count):
        if work.ids[j] == out.tokens[i]:
            score = (work.values[j] - shift) - offset
    ids[0] = out.tokens[i]
    values[0] = score
    rank = 0
    for j in range(count):
        if (work.values[j] - shift) - offset >= score:
            rank += 1
    out.ranks[i] = rank
    named = options.named.values[options.named.offsets[i] : options.named.offsets[i + 1]]
    k = np.int64(options.wanted[i])
    if named.size:
        for j in range(count):
            work.entries[work.ids[j]] = j + 1
        for j in range(named.size):
            at = work.entries[named[j]] - 1
            ids[1 + j] = named[j]
            values[1 + j] = (work.values[at] - shift) - offset if at >= 0 else scan.NEG_INF
        for j in range(count):
            work.entries[work.ids[j]] = 0
    elif k > 0:
        if count > scan.SMALL and k < count:
            count = order.keep_largest(count, k, work)
        _write_top(count, k, shift, offset, edited, ids, values, work)
