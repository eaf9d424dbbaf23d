"""Logprobs of one row, as vLLM returns them: the drawn token first, then the top-k, and its rank.

Among equal scores the lower token id comes first. A rank counts the scores >= the drawn token's,
itself among them, after rounding to float32: as in vLLM.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels.blocks import element
from sipipe.sampler.kernels.order import (
    candidate_threshold,
    key_of,
    key_value,
    kth_largest,
    sort_keys,
)
from sipipe.sampler.kernels.scan import (
    LOG2E,
    LOWEST,
    NEG_INF,
    SMALL,
    count_at_least,
    exp_sums,
    gather,
    is_masked,
    keep_at_least,
)


@kernel
def _logit(x: Any, token: Any, work: Any) -> Any:
    return NEG_INF if is_masked(token, work) else element(x, token)


@kernel
def _write_top(
    count: Any, k: Any, shift: Any, offset: Any, vocab: Any, ids: Any, values: Any, work: Any
) -> None:
    """The k best of the candidates into ``ids[1:]``/``values[1:]``; then masked tokens, -inf.

    Largest value first, lower id first among equals. Masked tokens are named in order of their ids,
    so that no id appears twice.
    """
    for i in range(count):
        work.keys[i] = key_of(work.values[i], np.int64(work.ids[i]))
    sort_keys(count, work)
    n = min(k, count)
    for i in range(n):
        ids[1 + i] = np.int64(work.keys[i] & np.uint64(0xFFFFFFFF))
        values[1 + i] = (key_value(work.keys[i]) - shift) - offset
    if n < k:
        for i in range(count):
            work.entries[work.ids[i]] = 1
        token = 0
        while n < k and token < vocab:
            if work.entries[token] == 0:
                ids[1 + n] = token
                values[1 + n] = NEG_INF
                n += 1
            token += 1
        for i in range(count):
            work.entries[work.ids[i]] = 0


@kernel
def score_row(
    x: Any, vocab: Any, top: Any, logits: Any, i: Any, options: Any, work: Any, out: Any
) -> None:
    """Raw scores of call row ``i``, whose `block_maxima` are in ``work``, without edited tokens.

    ``top`` is the row's maximum; ``logits`` says whether scores are logits or log-probabilities.
    """
    shift, offset = np.float32(0.0), np.float32(0.0)
    if not logits:
        shift = top
        offset = np.float32(math.log(exp_sums(x, vocab, top, np.float32(LOG2E), 0, work)))
    ids, values = out.score_ids[i], out.scores[i]
    ids[0] = out.tokens[i]
    own = (_logit(x, out.tokens[i], work) - shift) - offset
    values[0] = own
    out.ranks[i] = count_at_least(x, vocab, shift, offset, own, 0, work)
    named = options.named_tokens[options.named[i] : options.named[i + 1]]
    k = min(np.int64(options.wanted[i]), vocab)
    if named.size:  # they replace the most likely ones
        for j in range(named.size):
            ids[1 + j] = named[j]
            values[1 + j] = (_logit(x, named[j], work) - shift) - offset
    elif k > 0:
        threshold = LOWEST
        if k < vocab:
            threshold = candidate_threshold(x, vocab, k, top, 0, work)
        count = gather(x, vocab, threshold, 0, work)
        _write_top(count, k, shift, offset, vocab, ids, values, work)


@kernel
def score_kept(
    count: Any, vocab: Any, top: Any, log_mass: Any, logits: Any, i: Any, options: Any, work: Any,
    out: Any,
) -> None:  # fmt: skip
    """Processed scores of call row ``i``: ``count`` tokens are kept, as candidates; others are -inf."""
    shift, offset = np.float32(0.0), np.float32(0.0)
    if not logits:
        shift = np.float32(top)
        offset = np.float32(log_mass)
    ids, values = out.score_ids[i], out.scores[i]
    own = NEG_INF
    for j in range(count):
        if work.ids[j] == out.tokens[i]:
            own = (work.values[j] - shift) - offset
    ids[0] = out.tokens[i]
    values[0] = own
    rank = 0
    for j in range(count):
        if (work.values[j] - shift) - offset >= own:
            rank += 1
    out.ranks[i] = rank
    named = options.named_tokens[options.named[i] : options.named[i + 1]]
    k = min(np.int64(options.wanted[i]), vocab)
    if named.size:
        for j in range(count):
            work.entries[work.ids[j]] = j + 1
        for j in range(named.size):
            at = work.entries[named[j]] - 1
            ids[1 + j] = named[j]
            values[1 + j] = (work.values[at] - shift) - offset if at >= 0 else NEG_INF
        for j in range(count):
            work.entries[work.ids[j]] = 0
    elif k > 0:
        if count > SMALL and k < count:
            for j in range(count):
                work.weights[j] = work.values[j]
            count = keep_at_least(count, np.float64(kth_largest(work.weights, count, k)), work)
        _write_top(count, k, shift, offset, vocab, ids, values, work)
