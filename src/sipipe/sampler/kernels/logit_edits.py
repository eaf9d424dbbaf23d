"""The few logits of a row that its request changes: masks, bias, penalties, a forced token.

The row is only read. A token that the request rules out is masked: a bit in ``work.mask``, which
every pass over the row obeys. A token whose logit changes (seen, biased, forced: hundreds of
150,000) is masked too, and listed in ``work.edited_ids`` and ``work.edited`` with its new logit;
passes read this list like a few more blocks.

The order is that of vLLM's first runner: grammar, allowed tokens, bad words, min tokens, logit bias,
repetition, frequency and presence penalty, thinking budget; arithmetic is float32, rounded where
vLLM rounds.
"""

from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels import scan
from sipipe.sampler.kernels.blocks import block_max, element
from sipipe.sampler.kernels.lists import list_penalize
from sipipe.sampler.kernels.tables import find_seen

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
def mask_no_numbers(x: Any, work: Any) -> None:
    """Mask NaN and +inf: what is asked about the others has an answer then."""
    for token in range(x.size):
        if not element(x, token) < np.inf:
            _mask_token(token, work)


@kernel
def _mask_not_allowed(i: Any, options: Any, work: Any) -> None:
    """Mask all but the allowed tokens of call row ``i``, if it has any."""
    at = options.allowed.offsets[i]
    last = options.allowed.offsets[i + 1]
    for w in range(last - at):
        work.mask[w] |= ~np.uint32(options.allowed.values[at + w])


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
        top, bad = scan.block_maxima(x, False, work)
        if not bad and not top >= scan.LOWEST:
            for s in range(stops):
                work.mask[work.ids[s] >> 5] &= ~_bit(work.ids[s])


@kernel
def _mask_by_options(x: Any, i: Any, options: Any, work: Any) -> Any:
    """Mask what call row ``i`` rules out; its biases of other tokens, into ``work.picks``: how many."""
    grammar = mask_by_grammar(i, options, work)
    _mask_not_allowed(i, options, work)
    for b in range(options.bans.offsets[i], options.bans.offsets[i + 1]):
        _mask_token(options.bans.values[b], work)
    _mask_stops(x, i, grammar, options, work)
    biased = 0
    for b in range(options.biases.offsets[i], options.biases.offsets[i + 1]):
        token = options.biases.values[b]
        if options.bias_values.values[b] == scan.NEG_INF:
            _mask_token(token, work)
        elif not scan.is_masked(token, work):
            work.picks[biased] = b
            biased += 1
    return biased


@kernel
def _mask_edited(i: Any, biased: Any, request: Any, state: Any, options: Any, work: Any) -> None:
    """Mask the tokens that penalties and biases change: they are listed after the maxima are taken.
    Remembers in ``work.weights`` which seen tokens the request rules out. No branch depends on a
    token here and in `_list_seen`: with a grammar half of them would be mispredicted."""
    first = state.seen.start[request]
    for s in range(state.seen.used[request]):
        token = state.seen.tokens[first + s]
        word = work.mask[token >> 5]
        masked = (word & _bit(token)) != 0
        work.weights[s] = scan.NEG_INF if masked else np.float32(0.0)
        work.mask[token >> 5] = word | _bit(token)
    for c in range(biased):
        _mask_token(options.biases.values[work.picks[c]], work)
    if options.forced[i] >= 0:
        _mask_token(options.forced[i], work)


@kernel
def _list_seen(x: Any, request: Any, state: Any, work: Any) -> Any:
    """List the seen tokens with the row's logits, -inf for what the request rules out; how many."""
    first = state.seen.start[request]
    seen = state.seen.used[request]
    for s in range(seen):
        token = state.seen.tokens[first + s]
        value = element(x, token)
        work.edited_ids[s] = token
        work.edited[s] = value if work.weights[s] == np.float32(0.0) else scan.NEG_INF
    return seen


@kernel
def _add_biases(biased: Any, request: Any, state: Any, options: Any, work: Any) -> Any:
    """Add the biases of listed tokens; how many of other tokens are left in ``work.picks``."""
    if state.seen.room[request] == 0:
        return biased
    left = 0
    for c in range(biased):
        b = work.picks[c]
        at = find_seen(state.seen, request, options.biases.values[b])
        if at >= 0:
            work.edited[at] += options.bias_values.values[b]
        else:
            work.picks[left] = b
            left += 1
    return left


@kernel
def _penalize(seen: Any, request: Any, state: Any, work: Any) -> None:
    """Penalize the listed tokens, all of them seen, in vector code."""
    first = state.seen.start[request]
    repetition = state.repetition_penalty[request]
    for start in range(0, seen, 256):
        list_penalize(
            work.edited, start, state.seen.counts, first + start,
            repetition, np.float32(1.0) / repetition,
            state.frequency_penalty[request], state.presence_penalty[request],
        )  # fmt: skip


@kernel
def _list_edits(
    x: Any, i: Any, biased: Any, request: Any, state: Any, options: Any, work: Any
) -> Any:
    """List every token whose logit changes, with the new one: seen, biased, forced; how many."""
    edited = _list_seen(x, request, state, work)
    left = _add_biases(biased, request, state, options, work)
    _penalize(edited, request, state, work)
    for c in range(left):
        b = work.picks[c]
        work.edited_ids[edited] = options.biases.values[b]
        work.edited[edited] = element(x, options.biases.values[b]) + options.bias_values.values[b]
        edited += 1
    token = options.forced[i]
    if token >= 0:
        at = 0
        # bound: `edited`
        while at < edited and work.edited_ids[at] != token:
            at += 1
        work.edited_ids[at] = token
        work.edited[at] = FORCED
        edited = max(edited, at + 1)
    return edited


@kernel
def has_edits(i: Any, options: Any) -> Any:
    """Say if call row ``i`` has more than penalties to change its logits."""
    return (
        options.bitmask_rows[i] >= 0
        or options.forced[i] >= 0
        or options.allowed.offsets[i + 1] > options.allowed.offsets[i]
        or options.bans.offsets[i + 1] > options.bans.offsets[i]
        or options.stops.offsets[i + 1] > options.stops.offsets[i]
        or options.biases.offsets[i + 1] > options.biases.offsets[i]
    )


@kernel
def apply_edits(
    x: Any, i: Any, request: Any, grouped: Any, state: Any, options: Any, work: Any
) -> Any:
    """Mask and edit what the request of call row ``i`` changes, and take the maxima. Those of
    groups as well where ``grouped``. Returns (number of edited tokens, maximum of what is left in
    the row, maximum of both, whether either holds NaN). `clear_mask` must follow the row's draw."""
    biased = np.int64(0)
    if has_edits(i, options):
        biased = _mask_by_options(x, i, options, work)
    _mask_edited(i, biased, request, state, options, work)
    row_top, bad = scan.block_maxima(x, grouped, work)
    # After the pass, which has brought the row into the cache.
    edited = _list_edits(x, i, biased, request, state, options, work)
    for c in range(edited, (edited + 255) & ~255):
        work.edited[c] = scan.NEG_INF
    top = row_top
    first = ((x.size + 255) >> 8) << 5
    for start in range(0, edited, 256):
        at = first + (start >> 3)
        peak, nan = block_max(work.edited, start, work.no_mask, 0, work.groups, at)
        top = max(top, peak)
        bad |= nan
    return edited, row_top, top, bad


@kernel
def clear_mask(work: Any) -> None:
    work.mask[:] = np.uint32(0)
