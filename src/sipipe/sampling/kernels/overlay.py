"""The few logits of a row that its request changes: masks, bias, penalties, a forced token.

A request touches the tokens it has seen, biased, banned: hundreds of 150,000. They are kept beside
the row, as (token, logit before, logit after), and either stay there (top-k and greedy rows, which
are then read once and never copied) or are written into a float32 copy of this one row.

The order is vLLM's: bad words, min tokens, logit bias, repetition, frequency and presence penalty,
thinking budget; arithmetic is float32, rounded where vLLM rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sipipe.sampling.kernels._jit import kernel
from sipipe.sampling.kernels.blocks import block_max, element
from sipipe.sampling.kernels.scan import NOTHING

FORCED = np.float32(1e9)
"""Logit of a token that the thinking budget forces, as in vLLM."""


@kernel
def change(x: Any, token: Any, count: Any, work: Any) -> Any:
    """(index of ``token`` in the overlay, entering it if new, and the overlay's length)."""
    slot = work.slots[token]
    if slot:
        return slot - 1, count
    value = element(x, token)
    work.slots[token] = count + 1
    work.changed_ids[count] = token
    work.changed_raw[count] = value
    work.changed[count] = value
    return count, count + 1


@kernel
def change_bans(x: Any, tokens: Any, first: Any, last: Any, count: Any, work: Any) -> Any:
    for i in range(first, last):
        index, count = change(x, tokens[i], count, work)
        work.changed[index] = NOTHING
    return count


@kernel
def change_biases(
    x: Any, tokens: Any, biases: Any, first: Any, last: Any, count: Any, work: Any
) -> Any:
    for i in range(first, last):
        index, count = change(x, tokens[i], count, work)
        work.changed[index] += biases[i]
    return count


@kernel
def change_penalties(
    x: Any,
    tokens: Any,
    counts: Any,
    first: Any,
    last: Any,
    repetition: Any,
    presence: Any,
    frequency: Any,
    count: Any,
    work: Any,
) -> Any:
    """Penalties of the seen tokens ``tokens[first:last]`` (-1: empty), ``counts`` in the output."""
    inverse = np.float32(1.0) / repetition
    for i in range(first, last):
        token = tokens[i]
        if token < 0:
            continue
        index, count = change(x, token, count, work)
        value = work.changed[index]
        value *= inverse if value > np.float32(0.0) else repetition
        n = counts[i]
        if n > 0:
            value -= frequency * np.float32(n)
            value -= presence
        work.changed[index] = value
    return count


@kernel
def apply_overlay(row: Any, vocab: Any, count: Any, work: Any) -> Any:
    """Write the overlay into ``row`` (float32) and put ``work.peaks`` right; the row's maximum."""
    for i in range(count):
        token = work.changed_ids[i]
        value = work.changed[i]
        row[token] = value
        b = token >> 8
        if work.changed_raw[i] == work.peaks[b]:
            work.stale[b] = 1
    full = vocab >> 8
    if vocab & 255:
        for i in range(vocab & 255):
            work.tail[i] = row[(full << 8) + i]
    for i in range(count):
        b = work.changed_ids[i] >> 8
        if work.stale[b]:
            work.stale[b] = 0
            if b < full:
                work.peaks[b], _ = block_max(row, b << 8)
            else:
                work.peaks[b], _ = block_max(work.tail, 0)
        elif work.changed[i] > work.peaks[b]:
            work.peaks[b] = work.changed[i]
    top = NOTHING
    for b in range(work.peaks.size):
        top = max(top, work.peaks[b])
    return top


@kernel
def restore_row(row: Any, count: Any, work: Any) -> None:
    """Take the overlay out of a row that `apply_overlay` changed."""
    for i in range(count):
        row[work.changed_ids[i]] = work.changed_raw[i]


@kernel
def clear_overlay(count: Any, work: Any) -> None:
    for i in range(count):
        work.slots[work.changed_ids[i]] = 0
