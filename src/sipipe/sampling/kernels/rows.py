"""One row from logits to token: the sampler's order of steps, and the shortest way through them.

maxima of all blocks ─► overlay (masks, bias, penalties) ─► greedy ───────────────► first maximum
                                                         ├► top-k ≤ blocks ──────► sort candidates
                                                         └► otherwise: overlay written into a
                                                            copy of the row, then
                                                            sums ─► [top-k/top-p/min-p] ─► draw
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sipipe.sampling.kernels._jit import kernel
from sipipe.sampling.kernels.blocks import block_copy, element
from sipipe.sampling.kernels.choose import (
    candidates_of_top,
    choose_sorted,
    draw_candidates,
    draw_full,
    keep_at_least,
    keep_from,
    scale_candidates,
    threshold_for_count,
    threshold_for_tail,
    top_p_cut,
)
from sipipe.sampling.kernels.overlay import (
    FORCED,
    apply_overlay,
    change,
    change_bans,
    change_biases,
    change_penalties,
    clear_overlay,
    restore_row,
)
from sipipe.sampling.kernels.philox import uniform
from sipipe.sampling.kernels.scan import (
    LOG2E,
    LOWEST,
    NOTHING,
    block_maxima,
    candidate_weights,
    exp_sums,
    gather,
    kth_largest,
)
from sipipe.sampling.kernels.scores import score_kept, score_row

GREEDY_BELOW = np.float32(1e-5)
"""Temperatures below this are greedy, as in vLLM."""

OK, HAS_NAN, HAS_INFINITY, ALL_MASKED = 0, 1, 2, 3

RAW_LOGPROBS, RAW_LOGITS, PROCESSED_LOGPROBS, PROCESSED_LOGITS = 0, 1, 2, 3


class Columns(NamedTuple):
    """What is kept per column (sequence), as arrays over columns; see `SequenceColumns`."""

    temperature: Any  # float32
    top_k: Any  # int32, 0: off
    top_p: Any  # float64
    min_p: Any  # float64
    repetition: Any  # float32
    presence: Any  # float32
    frequency: Any  # float32
    seed: Any  # uint64
    position: Any  # int64, output tokens so far
    seen_first: Any  # int64, start of the column's table of seen tokens
    seen_room: Any  # int64, its slots; 0: the column has no penalties
    seen_tokens: Any  # int32, all tables
    seen_counts: Any  # int32, occurrences in the output; 0: in the prompt only


class Extras(NamedTuple):
    """What few requests ask for, per row of this call: ranges into shared arrays."""

    bans: Any  # int64 [n + 1], bad words about to complete
    ban_tokens: Any
    stops: Any  # int64 [n + 1], stop tokens while under min_tokens
    stop_tokens: Any
    biases: Any  # int64 [n + 1]
    bias_tokens: Any
    bias_values: Any
    allowed: Any  # int64 [n + 1], allowed tokens; empty: all
    allowed_tokens: Any
    forced: Any  # int32 [n], token the thinking budget forces, or -1
    mask: Any  # int32 [m, words], grammar bitmasks
    mask_rows: Any  # int32 [n], row of `mask`, or -1
    wanted: Any  # int32 [n], logprobs to return besides the drawn token's, or -1: none at all
    named: Any  # int64 [n + 1], tokens whose logprobs are asked for by name
    named_tokens: Any


class Output(NamedTuple):
    """Results, per row of this call."""

    tokens: Any  # int32 [n], -1 where there is an error
    codes: Any  # uint8 [n]
    score_ids: Any  # int32 [n, width]
    scores: Any  # float32 [n, width]
    ranks: Any  # int32 [n]


@kernel
def _only_stops_left(x: Any, vocab: Any, changed: Any, work: Any) -> Any:
    """Whether the overlay leaves no finite logit."""
    found = gather(x, vocab, LOWEST, work)
    if found > changed:
        return False
    for i in range(found):
        slot = work.slots[work.ids[i]]
        if slot == 0 or work.changed[slot - 1] >= LOWEST:
            return False
    return True


@kernel
def _overlay(x: Any, vocab: Any, i: Any, column: Any, columns: Any, extras: Any, work: Any) -> Any:
    """Everything that changes single logits of the row, in vLLM's order; the overlay's length."""
    changed = change_bans(x, extras.ban_tokens, extras.bans[i], extras.bans[i + 1], 0, work)
    first, last = extras.stops[i], extras.stops[i + 1]
    for s in range(first, last):
        index, changed = change(x, extras.stop_tokens[s], changed, work)
        work.sums[s - first] = work.changed[index]
        work.changed[index] = NOTHING
    if last > first and extras.mask_rows[i] >= 0 and _only_stops_left(x, vocab, changed, work):
        for s in range(first, last):  # the grammar can only stop: min_tokens gives way
            if work.sums[s - first] >= LOWEST:
                work.changed[work.slots[extras.stop_tokens[s]] - 1] = work.sums[s - first]
    first, last = extras.biases[i], extras.biases[i + 1]
    changed = change_biases(x, extras.bias_tokens, extras.bias_values, first, last, changed, work)
    room = columns.seen_room[column]
    if room:
        first = columns.seen_first[column]
        changed = change_penalties(
            x,
            columns.seen_tokens,
            columns.seen_counts,
            first,
            first + room,
            columns.repetition[column],
            columns.presence[column],
            columns.frequency[column],
            changed,
            work,
        )
    if extras.forced[i] >= 0:
        index, changed = change(x, extras.forced[i], changed, work)
        work.changed[index] = FORCED
    return changed


@kernel
def _first_maximum(x: Any, vocab: Any, top: Any, work: Any) -> Any:
    for b in range(work.peaks.size):
        if work.peaks[b] == top:
            for i in range(b << 8, min((b + 1) << 8, vocab)):
                if element(x, i) == top:
                    return i
    return -1


@kernel
def _greedy_overlaid(x: Any, vocab: Any, changed: Any, work: Any) -> Any:
    """The maximum of a row with an overlay, lowest id among equals; -1: not found this way."""
    k = np.int64(vocab > 0)  # 1, but no literal: that would be another specialization
    count = candidates_of_top(x, vocab, k, np.float32(1.0), changed, work)
    best = -1
    top = NOTHING
    for i in range(count):
        value, token = work.values[i], work.ids[i]
        if value > top or (value == top and token < best):
            best, top = token, value
    return best


@kernel
def copy_row(x: Any, vocab: Any, row: Any) -> None:
    """Widen a row into ``row`` (float32)."""
    full = vocab >> 8
    for b in range(full):
        block_copy(x, b << 8, row, b << 8)
    for i in range(full << 8, vocab):
        row[i] = element(x, i)


@kernel
def _draw_plain(
    x: Any,
    vocab: Any,
    top: Any,
    temperature: Any,
    k: Any,
    min_p: Any,
    top_p: Any,
    u: Any,
    listed: Any,
    work: Any,
) -> Any:
    """Draw from a row without overlay; (token, kept or -1 for the whole row, maximum, log mass).

    Where ``listed``, the ``kept`` tokens are in ``work.ids``/``values``, divided by the temperature.
    """
    inverse = 1.0 / np.float64(temperature)
    scale = np.float32(inverse * LOG2E)
    scaled_top = np.float64(top / temperature)
    if k == 0 and min_p == 0.0:
        total = exp_sums(x, vocab, top, scale, work)
        if top_p >= 1.0:
            token = draw_full(x, vocab, top, inverse, total, u, work)
            return token, -1, scaled_top, math.log(total)
        target = top_p * total
        tail = total - target
        threshold = threshold_for_tail(x, vocab, top, scale, tail, work)
        tries = 0
        while True:
            # Below `bound` lie fewer than V logits of at most this weight: together at most `tail`.
            bound = top + np.float32(math.log(max(tail, 1e-30) / vocab) / inverse)
            if tries == 1 or threshold < bound:
                threshold = bound
            if tries == 2 or not threshold >= LOWEST:
                threshold = LOWEST
            count = gather(x, vocab, threshold, work)
            mass = candidate_weights(count, top, scale, work)
            if mass >= target or threshold == LOWEST:
                break
            tries += 1
        cut, cut_id = top_p_cut(count, top, threshold, target, inverse, work)
        token, total = draw_candidates(count, cut, cut_id, u, work)
        if listed:
            count = keep_from(count, cut, cut_id, work)
            scale_candidates(count, temperature, work)
        return token, count, scaled_top, math.log(total)
    threshold = LOWEST
    if k > 0:
        threshold = threshold_for_count(x, vocab, k, work)
    if min_p > 0.0:
        floor = np.float64(top) + math.log(min_p) / inverse
        threshold = max(threshold, np.float32(floor - abs(floor) * 1e-6))
    count = gather(x, vocab, min(threshold, top), work)
    high = scale_candidates(count, temperature, work)
    if min_p > 0.0:
        count = keep_at_least(count, np.float64(high) + math.log(min_p), work)
    if 0 < k < count:
        for i in range(count):
            work.weights[i] = work.values[i]
        count = keep_at_least(count, np.float64(kth_largest(work.weights, count, k)), work)
    total = candidate_weights(count, high, np.float32(LOG2E), work)
    cut, cut_id = NOTHING, 0
    if top_p < 1.0:
        cut, cut_id = top_p_cut(count, high, NOTHING, top_p * total, 1.0, work)
    token, total = draw_candidates(count, cut, cut_id, u, work)
    if listed:
        count = keep_from(count, cut, cut_id, work)
    return token, count, np.float64(high), math.log(total)


@kernel
def score_raw(
    x: Any, vocab: Any, i: Any, top: Any, extras: Any, mode: Any, work: Any, out: Any
) -> None:
    """Raw scores of call row ``i``, whose token is drawn, from ``x`` and its block maxima."""
    named = extras.named_tokens[extras.named[i] : extras.named[i + 1]]
    out.ranks[i] = score_row(
        x, vocab, top, mode == RAW_LOGITS, out.tokens[i], extras.wanted[i], named,
        out.score_ids[i], out.scores[i], work,
    )  # fmt: skip


@kernel
def draw_row(
    x: Any,
    row: Any,
    owned: Any,
    late: Any,
    vocab: Any,
    i: Any,
    column: Any,
    columns: Any,
    extras: Any,
    mode: Any,
    work: Any,
    out: Any,
) -> None:
    """Sample row ``i`` of this call for ``column`` into ``out``.

    ``x`` holds the logits. ``row`` is float32 room for a copy; where ``owned``, it is ``x`` itself.
    ``late``: the caller takes raw scores itself.
    """
    out.tokens[i] = -1
    top, bad = block_maxima(x, vocab, work)
    if bad or top == np.inf or not top >= LOWEST:
        out.codes[i] = HAS_NAN if bad else HAS_INFINITY if top == np.inf else ALL_MASKED
        return
    raw_top = top
    changed = _overlay(x, vocab, i, column, columns, extras, work)
    temperature = columns.temperature[column]
    greedy = temperature < GREEDY_BELOW
    k = int(columns.top_k[column])
    if k >= vocab or greedy:
        k = 0
    top_p = columns.top_p[column]
    min_p = columns.min_p[column]
    scored = extras.wanted[i] >= 0
    processed = scored and mode >= PROCESSED_LOGPROBS
    token, kept = -1, -1
    high, log_mass = 0.0, 0.0
    if greedy and not processed:
        if changed:
            token = _greedy_overlaid(x, vocab, changed, work)
        else:
            token = _first_maximum(x, vocab, top, work)
    elif k:
        count = candidates_of_top(x, vocab, k, temperature, changed, work)
        if count > 0:
            u = uniform(columns.seed[column], columns.position[column])
            token, kept, high, log_mass = choose_sorted(count, k, min_p, top_p, u, work)
    written = False
    if token < 0:
        written = changed > 0
        if written:
            if not owned:
                copy_row(x, vocab, row)
            top = apply_overlay(row, vocab, changed, work)
        if not top >= LOWEST or top == np.inf:
            out.codes[i] = HAS_INFINITY if top == np.inf else ALL_MASKED
        else:
            if greedy:
                temperature, min_p, top_p = np.float32(1.0), 0.0, 1.0
            u = uniform(columns.seed[column], columns.position[column])
            if written:
                token, kept, high, log_mass = _draw_plain(
                    row, vocab, top, temperature, k, min_p, top_p, u, processed, work
                )
                if greedy:
                    token = _first_maximum(row, vocab, top, work)
            else:
                token, kept, high, log_mass = _draw_plain(
                    x, vocab, top, temperature, k, min_p, top_p, u, processed, work
                )
                if greedy:
                    token = _first_maximum(x, vocab, top, work)
            if processed and kept < 0:
                if written:
                    kept = gather(row, vocab, LOWEST, work)
                else:
                    kept = gather(x, vocab, LOWEST, work)
                scale_candidates(kept, temperature, work)
    if written and owned:
        restore_row(row, changed, work)
    clear_overlay(changed, work)
    if token < 0:
        return
    out.tokens[i] = token
    out.codes[i] = OK
    if processed:
        named = extras.named_tokens[extras.named[i] : extras.named[i + 1]]
        out.ranks[i] = score_kept(
            kept, vocab, high, log_mass, mode == PROCESSED_LOGITS, token, extras.wanted[i], named,
            out.score_ids[i], out.scores[i], work,
        )  # fmt: skip
    elif scored and not late:
        if written:
            block_maxima(x, vocab, work)
        score_raw(x, vocab, i, raw_top, extras, mode, work, out)
