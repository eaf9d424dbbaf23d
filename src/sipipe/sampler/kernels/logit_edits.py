"""The few logits of a row that its request changes: masks, bias, penalties, a forced token.

The row is only read. A token that the request rules out is masked: a bit in ``work.mask``, which
every pass over the row obeys. A token whose logit changes (seen, biased, forced: hundreds of
150,000) is masked too, and listed in ``work.edited_ids`` and ``work.edited`` with its new logit;
passes read this list like a few more blocks. So nothing is copied, and no block's maximum or mass
has to be put right afterwards.

The order is vLLM's: grammar, allowed tokens, bad words, min tokens, logit bias, repetition,
frequency and presence penalty, thinking budget; arithmetic is float32, rounded where vLLM rounds.
"""

from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels import scan
from sipipe.sampler.kernels.blocks import block_max, element
from sipipe.sampler.kernels.lists import list_penalize

FORCED = np.float32(1e9)
"""Logit of a token that the thinking budget forces, as in vLLM."""
_ONE = np.uint32(1)


@kernel
def _bit(token: Any) -> Any:
    return np.uint32(_ONE << np.uint32(token & 31))


@kernel
def _mask_token(token: Any, work: Any) -> None:
    work.mask[token >> 5] |= _bit(token)


@kernel
def mask_by_grammar(i: Any, options: Any, work: Any) -> Any:
    """Mask what the grammar of call row ``i`` forbids; whether it has one."""
    m = options.bitmask_rows[i]
    if m < 0:
        return False
    for w in range(min(options.bitmask.shape[1], work.mask.size)):
        work.mask[w] = ~np.uint32(options.bitmask[m, w])
    return True


@kernel
def _mask_not_allowed(i: Any, options: Any, work: Any) -> None:
    """Mask all but the allowed tokens (ascending, unique) of call row ``i``, if it has any."""
    at, last = options.allowed.offsets[i], options.allowed.offsets[i + 1]
    if last > at:
        for w in range(work.mask.size):
            bits = np.uint32(0)
            while at < last and options.allowed.values[at] >> 5 == w:
                bits |= _bit(options.allowed.values[at])
                at += 1
            work.mask[w] |= ~bits


@kernel
def _mask_stops(x: Any, i: Any, grammar: Any, options: Any, work: Any) -> None:
    """Mask the stop tokens while under min_tokens, unless the grammar can only stop."""
    stops = 0
    for s in range(options.stops.offsets[i], options.stops.offsets[i + 1]):
        token = options.stops.values[s]
        if not scan.is_masked(token, work):
            _mask_token(token, work)
            work.ids[stops] = token
            stops += 1
    if stops and grammar:
        top, _ = scan.block_maxima(x, work)
        if not top >= scan.LOWEST:
            for s in range(stops):
                work.mask[work.ids[s] >> 5] &= ~_bit(work.ids[s])


@kernel
def _edit(x: Any, token: Any, edited: Any, work: Any) -> Any:
    """List a token that is not listed yet, with the row's logit; the list's length."""
    _mask_token(token, work)
    work.entries[token] = edited + 1
    work.edited_ids[edited] = token
    work.edited[edited] = element(x, token)
    return edited + 1


@kernel
def _edit_by_options(x: Any, i: Any, request: Any, state: Any, options: Any, work: Any) -> Any:
    """Mask and edit a row with masks, bans, bias or a forced token, one by one; edited tokens."""
    grammar = mask_by_grammar(i, options, work)
    _mask_not_allowed(i, options, work)
    for b in range(options.bans.offsets[i], options.bans.offsets[i + 1]):
        _mask_token(options.bans.values[b], work)
    _mask_stops(x, i, grammar, options, work)
    # From here on a masked token without an entry stays -inf, whatever else edits it but force.
    edited = 0
    for b in range(options.biases.offsets[i], options.biases.offsets[i + 1]):
        token = options.biases.values[b]
        bias = options.bias_values.values[b]
        if bias == scan.NEG_INF:
            _mask_token(token, work)
        elif not scan.is_masked(token, work):
            edited = _edit(x, token, edited, work)
            work.edited[edited - 1] += bias
    first = state.seen.start[request]
    repetition = state.repetition_penalty[request]
    inverse = np.float32(1.0) / repetition
    for s in range(first, first + state.seen.used[request]):
        token = state.seen.tokens[s]
        if not scan.is_masked(token, work):
            edited = _edit(x, token, edited, work)
        at = work.entries[token] - 1
        if at >= 0:
            value = work.edited[at]
            value *= inverse if value > np.float32(0.0) else repetition
            if state.seen.counts[s] > 0:
                value -= state.frequency_penalty[request] * np.float32(state.seen.counts[s])
                value -= state.presence_penalty[request]
            work.edited[at] = value
    token = options.forced[i]
    if token >= 0:
        if work.entries[token] == 0:
            edited = _edit(x, token, edited, work)
        work.edited[work.entries[token] - 1] = FORCED
    for c in range(edited):
        work.entries[work.edited_ids[c]] = 0
    return edited


@kernel
def _edit_seen(x: Any, request: Any, state: Any, work: Any) -> Any:
    """List the edits of a row that has penalties only, in vector code; how many."""
    first, edited = state.seen.start[request], state.seen.used[request]
    for s in range(edited):
        token = state.seen.tokens[first + s]
        work.edited_ids[s] = token
        work.edited[s] = element(x, token)
    repetition = state.repetition_penalty[request]
    for start in range(0, edited, 256):
        list_penalize(
            work.edited, start, state.seen.counts, first + start,
            repetition, np.float32(1.0) / repetition,
            state.frequency_penalty[request], state.presence_penalty[request],
        )  # fmt: skip
    return edited


@kernel
def has_edits(i: Any, options: Any) -> Any:
    """Whether call row ``i`` has more than penalties to change its logits."""
    return (
        options.bitmask_rows[i] >= 0
        or options.forced[i] >= 0
        or options.allowed.offsets[i + 1] > options.allowed.offsets[i]
        or options.bans.offsets[i + 1] > options.bans.offsets[i]
        or options.stops.offsets[i + 1] > options.stops.offsets[i]
        or options.biases.offsets[i + 1] > options.biases.offsets[i]
    )


@kernel
def apply_edits(x: Any, i: Any, request: Any, state: Any, options: Any, work: Any) -> Any:
    """Mask and edit what the request of call row ``i`` changes, and take the maxima.

    Returns (number of edited tokens, maximum of what is left in the row, maximum of both, whether
    either holds NaN). `clear_mask` must follow once the row is done.
    """
    several = has_edits(i, options)
    edited = np.int64(0)
    if several:
        edited = _edit_by_options(x, i, request, state, options, work)
    else:
        first = state.seen.start[request]
        for s in range(first, first + state.seen.used[request]):
            _mask_token(state.seen.tokens[s], work)
    row_top, bad = scan.block_maxima(x, work)
    if not several:  # after the pass, which has brought the row into the cache
        edited = _edit_seen(x, request, state, work)
    for c in range(edited, (edited + 255) & ~255):
        work.edited[c] = scan.NEG_INF
    top = row_top
    for start in range(0, edited, 256):
        peak, nan = block_max(work.edited, start, work.no_mask, 0)
        top = max(top, peak)
        bad |= nan
    return edited, row_top, top, bad


@kernel
def clear_mask(work: Any) -> None:
    work.mask[:] = np.uint32(0)
