"""The few logits of a row that its request changes: masks, bias, penalties, a forced token.

The row is only read. What masks take out of it is *hidden*: a bit per token in ``work.hidden``,
which every pass over the row obeys. A token whose logit changes (seen, biased, forced: hundreds of
150,000) is *lifted*: hidden too, and entered in the overlay, ``work.changed_ids`` and
``work.changed``, with its new logit. So nothing is copied, and no block's maximum or mass has to be
put right afterwards.

The order is vLLM's: grammar, allowed tokens, bad words, min tokens, logit bias, repetition,
frequency and presence penalty, thinking budget; arithmetic is float32, rounded where vLLM rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sipipe.jit import kernel
from sipipe.sampler.kernels.blocks import block_max, element
from sipipe.sampler.kernels.lists import list_penalize
from sipipe.sampler.kernels.scan import LOWEST, NOTHING, block_maxima, is_hidden

FORCED = np.float32(1e9)
"""Logit of a token that the thinking budget forces, as in vLLM."""
_ONE = np.uint32(1)


@kernel
def _bit(token: Any) -> Any:
    return np.uint32(_ONE << np.uint32(token & 31))


@kernel
def hide_by_grammar(i: Any, extras: Any, work: Any) -> Any:
    """Hide what the grammar of call row ``i`` forbids; whether it has one."""
    m = extras.mask_rows[i]
    if m < 0:
        return False
    for w in range(min(extras.mask.shape[1], work.hidden.size)):
        work.hidden[w] = ~np.uint32(extras.mask[m, w])
    return True


@kernel
def _hide_but_allowed(i: Any, extras: Any, work: Any) -> None:
    """Hide all but the allowed tokens (ascending, unique) of call row ``i``, if it has any."""
    at, last = extras.allowed[i], extras.allowed[i + 1]
    if last > at:
        for w in range(work.hidden.size):
            bits = np.uint32(0)
            while at < last and extras.allowed_tokens[at] >> 5 == w:
                bits |= _bit(extras.allowed_tokens[at])
                at += 1
            work.hidden[w] |= ~bits


@kernel
def _lift(x: Any, token: Any, changed: Any, work: Any) -> Any:
    """Enter a token that is not in the overlay yet, with its own logit; the overlay's length."""
    work.hidden[token >> 5] |= _bit(token)
    work.slots[token] = changed + 1
    work.changed_ids[changed] = token
    work.changed[changed] = element(x, token)
    return changed + 1


@kernel
def _hide_stops(x: Any, vocab: Any, i: Any, masked: Any, extras: Any, work: Any) -> None:
    """Hide the stop tokens while under min_tokens, unless the grammar can only stop."""
    hidden = 0
    for s in range(extras.stops[i], extras.stops[i + 1]):
        token = extras.stop_tokens[s]
        if not is_hidden(token, work):
            work.hidden[token >> 5] |= _bit(token)
            work.ids[hidden] = token
            hidden += 1
    if hidden and masked:
        top, _ = block_maxima(x, vocab, work)
        if not top >= LOWEST:
            for s in range(hidden):
                work.hidden[work.ids[s] >> 5] &= ~_bit(work.ids[s])


@kernel
def _lift_with_extras(
    x: Any, vocab: Any, i: Any, column: Any, columns: Any, extras: Any, work: Any
) -> Any:
    """The overlay of a row with masks, bans, bias or a forced token, one by one; its length."""
    masked = hide_by_grammar(i, extras, work)
    _hide_but_allowed(i, extras, work)
    for b in range(extras.bans[i], extras.bans[i + 1]):
        token = extras.ban_tokens[b]
        work.hidden[token >> 5] |= _bit(token)
    _hide_stops(x, vocab, i, masked, extras, work)
    # From here on a hidden token without a slot is masked: nothing changes its -inf but force.
    changed = 0
    for b in range(extras.biases[i], extras.biases[i + 1]):
        token = extras.bias_tokens[b]
        if not is_hidden(token, work):
            changed = _lift(x, token, changed, work)
            work.changed[changed - 1] += extras.bias_values[b]
    first = columns.seen_start[column]
    repetition = columns.repetition[column]
    inverse = np.float32(1.0) / repetition
    for s in range(first, first + columns.seen_used[column]):
        token = columns.seen_tokens[s]
        if not is_hidden(token, work):
            changed = _lift(x, token, changed, work)
        at = work.slots[token] - 1
        if at >= 0:
            value = work.changed[at]
            value *= inverse if value > np.float32(0.0) else repetition
            if columns.seen_counts[s] > 0:
                value -= columns.frequency[column] * np.float32(columns.seen_counts[s])
                value -= columns.presence[column]
            work.changed[at] = value
    token = extras.forced[i]
    if token >= 0:
        if work.slots[token] == 0:
            changed = _lift(x, token, changed, work)
        work.changed[work.slots[token] - 1] = FORCED
    for c in range(changed):
        work.slots[work.changed_ids[c]] = 0
    return changed


@kernel
def _lift_seen(x: Any, column: Any, columns: Any, work: Any) -> Any:
    """The overlay of a row that has penalties only, in vector code; its length."""
    first, changed = columns.seen_start[column], columns.seen_used[column]
    for s in range(changed):
        token = columns.seen_tokens[first + s]
        work.changed_ids[s] = token
        work.changed[s] = element(x, token)
    repetition = columns.repetition[column]
    for start in range(0, changed, 256):
        list_penalize(
            work.changed,
            start,
            columns.seen_counts,
            first + start,
            repetition,
            np.float32(1.0) / repetition,
            columns.frequency[column],
            columns.presence[column],
        )
    return changed


@kernel
def has_extras(i: Any, extras: Any) -> Any:
    """Whether call row ``i`` has more than penalties to change its logits."""
    return (
        extras.mask_rows[i] >= 0
        or extras.forced[i] >= 0
        or extras.allowed[i + 1] > extras.allowed[i]
        or extras.bans[i + 1] > extras.bans[i]
        or extras.stops[i + 1] > extras.stops[i]
        or extras.biases[i + 1] > extras.biases[i]
    )


@kernel
def lay_over(x: Any, vocab: Any, i: Any, column: Any, columns: Any, extras: Any, work: Any) -> Any:
    """Hide and lift what the request of call row ``i`` changes, and take the maxima.

    Returns (the overlay's length, maximum of what is left in the row, maximum of both, whether
    either holds NaN). `show_all` must follow once the row is done.
    """
    special = has_extras(i, extras)
    changed = np.int64(0)
    if special:
        changed = _lift_with_extras(x, vocab, i, column, columns, extras, work)
    else:
        first = columns.seen_start[column]
        for s in range(first, first + columns.seen_used[column]):
            token = columns.seen_tokens[s]
            work.hidden[token >> 5] |= _bit(token)
    row_top, bad = block_maxima(x, vocab, work)
    if not special:  # after the pass, which has brought the row into the cache
        changed = _lift_seen(x, column, columns, work)
    for c in range(changed, (changed + 255) & ~255):
        work.changed[c] = NOTHING
    top = row_top
    for start in range(0, changed, 256):
        peak, nan = block_max(work.changed, start, work.shown, 0)
        top = max(top, peak)
        bad |= nan
    return changed, row_top, top, bad


@kernel
def show_all(work: Any) -> None:
    """Nothing is hidden any more."""
    work.hidden[:] = np.uint32(0)
