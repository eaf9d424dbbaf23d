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
    NOTHING,
    SMALL,
    count_at_least,
    exp_sums,
    gather,
    is_hidden,
)


@kernel
def _shown_logit(x: Any, token: Any, work: Any) -> Any:
    return NOTHING if is_hidden(token, work) else element(x, token)


@kernel
def _sort_candidates(count: Any, work: Any) -> None:
    """``work.keys`` of the candidates, largest value first, lower id first among equals."""
    for i in range(count):
        work.keys[i] = key_of(work.values[i], np.int64(work.ids[i]))
    sort_keys(count, work)


@kernel
def _write_top(
    count: Any, k: Any, shift: Any, offset: Any, vocab: Any, ids: Any, values: Any, work: Any
) -> None:
    """The k best of the sorted keys into ``ids[1:]``/``values[1:]``; then masked tokens, -inf.

    Masked tokens are named in order of their ids, so that no id appears twice.
    """
    n = min(k, count)
    for i in range(n):
        ids[1 + i] = np.int64(work.keys[i] & np.uint64(0xFFFFFFFF))
        values[1 + i] = (key_value(work.keys[i]) - shift) - offset
    if n < k:
        for i in range(count):
            work.slots[work.ids[i]] = 1
        token = 0
        while n < k and token < vocab:
            if work.slots[token] == 0:
                ids[1 + n] = token
                values[1 + n] = NOTHING
                n += 1
            token += 1
        for i in range(count):
            work.slots[work.ids[i]] = 0


@kernel
def score_row(
    x: Any,
    vocab: Any,
    top: Any,
    logits: Any,
    token: Any,
    k: Any,
    named: Any,
    ids: Any,
    values: Any,
    work: Any,
) -> Any:
    """Raw scores of a row whose `block_maxima` are in ``work``, without overlay; ``token``'s rank.

    ``logits`` says whether scores are logits or log-probabilities. ``named`` are token ids asked
    for by name (they replace the top-k), ``ids``/``values`` the row of the result.
    """
    shift, offset = np.float32(0.0), np.float32(0.0)
    if not logits:
        shift = top
        offset = np.float32(math.log(exp_sums(x, vocab, top, np.float32(LOG2E), 0, work)))
    own = (_shown_logit(x, token, work) - shift) - offset
    ids[0] = token
    values[0] = own
    rank = count_at_least(x, vocab, shift, offset, own, 0, work)
    if named.size:
        for i in range(named.size):
            ids[1 + i] = named[i]
            values[1 + i] = (_shown_logit(x, named[i], work) - shift) - offset
    elif k > 0:
        k = min(k, vocab)
        threshold = LOWEST
        if k < vocab:
            threshold = candidate_threshold(x, vocab, k, top, 0, work)
        count = gather(x, vocab, threshold, 0, work)
        _sort_candidates(count, work)
        _write_top(count, k, shift, offset, vocab, ids, values, work)
    return rank


@kernel
def score_kept(
    count: Any,
    vocab: Any,
    top: Any,
    log_mass: Any,
    logits: Any,
    token: Any,
    k: Any,
    named: Any,
    ids: Any,
    values: Any,
    work: Any,
) -> Any:
    """Processed scores: of the ``count`` kept tokens in ``work.ids``/``values``; others are -inf."""
    shift, offset = np.float32(0.0), np.float32(0.0)
    if not logits:
        shift = np.float32(top)
        offset = np.float32(log_mass)
    own = NOTHING
    for i in range(count):
        if work.ids[i] == token:
            own = (work.values[i] - shift) - offset
    ids[0] = token
    values[0] = own
    rank = 0
    for i in range(count):
        if (work.values[i] - shift) - offset >= own:
            rank += 1
    if named.size:
        for i in range(count):
            work.slots[work.ids[i]] = i + 1
        for i in range(named.size):
            slot = work.slots[named[i]]
            ids[1 + i] = named[i]
            values[1 + i] = (work.values[slot - 1] - shift) - offset if slot else NOTHING
        for i in range(count):
            work.slots[work.ids[i]] = 0
    elif k > 0:
        k = min(k, vocab)
        if count > SMALL and k < count:
            for i in range(count):
                work.weights[i] = work.values[i]
            cut = kth_largest(work.weights, count, k)
            kept = 0
            for i in range(count):
                if work.values[i] >= cut:
                    work.ids[kept] = work.ids[i]
                    work.values[kept] = work.values[i]
                    kept += 1
            count = kept
        _sort_candidates(count, work)
        _write_top(count, k, shift, offset, vocab, ids, values, work)
    return rank
