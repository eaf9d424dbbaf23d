"""One row from logits to token: the sampler's order of steps.

hide and lift what the request changes ─► maxima of all blocks ─► greedy: first maximum
                                                               ├► top-k, min-p: candidates ─► draw
                                                               └► sums ─► [top-p] ─► draw
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sipipe.jit import entry, kernel
from sipipe.sampler.kernels.choose import choose, divide_candidates, first_maximum
from sipipe.sampler.kernels.overlay import has_extras, hide_by_grammar, lay_over, show_all
from sipipe.sampler.kernels.philox import uniform
from sipipe.sampler.kernels.scan import LOWEST, block_maxima, gather
from sipipe.sampler.kernels.scores import score_kept, score_row
from sipipe.sampler.kernels.state import (
    ALL_MASKED,
    HAS_INFINITY,
    HAS_NAN,
    PROCESSED_LOGITS,
    PROCESSED_LOGPROBS,
    RAW_LOGITS,
    Columns,
    Extras,
    Output,
)
from sipipe.sampler.kernels.work import Work

GREEDY_BELOW = np.float32(1e-5)
"""Temperatures below this are greedy, as in vLLM."""


@kernel
def _score_raw(
    x: Any, vocab: Any, i: Any, top: Any, touched: Any, extras: Any, mode: Any, work: Any, out: Any
) -> None:
    """Raw scores of call row ``i``, whose token is drawn: after the grammar, as in vLLM.

    ``top`` is the row's maximum, unless ``touched``: then the request has hidden some of it.
    """
    if touched:
        show_all(work)
        hide_by_grammar(i, extras, work)
        top, _ = block_maxima(x, vocab, work)
    named = extras.named_tokens[extras.named[i] : extras.named[i + 1]]
    out.ranks[i] = score_row(
        x, vocab, top, mode == RAW_LOGITS, out.tokens[i], extras.wanted[i], named,
        out.score_ids[i], out.scores[i], work,
    )  # fmt: skip


@kernel
def _draw_row(
    x: Any,
    vocab: Any,
    i: Any,
    column: Any,
    columns: Any,
    extras: Any,
    mode: Any,
    work: Any,
    out: Any,
) -> None:
    """Sample row ``i`` of this call, with the logits ``x``, for ``column`` into ``out``."""
    changed, row_top, top, bad = lay_over(x, vocab, i, column, columns, extras, work)
    if bad or top == np.inf or not top >= LOWEST:
        out.codes[i] = HAS_NAN if bad else HAS_INFINITY if top == np.inf else ALL_MASKED
        return
    temperature = columns.temperature[column]
    greedy = temperature < GREEDY_BELOW
    scored = extras.wanted[i] >= 0
    processed = scored and mode >= PROCESSED_LOGPROBS
    token, kept, high, log_mass = np.int64(-1), np.int64(-1), 0.0, 0.0
    if not greedy or processed:
        k, min_p, top_p = (
            np.int64(columns.top_k[column]),
            columns.min_p[column],
            columns.top_p[column],
        )
        if greedy:
            temperature, k, min_p, top_p = np.float32(1.0), np.int64(0), 0.0, 1.0
        u = uniform(columns.seed[column], columns.position[column])
        token, kept, high, log_mass = choose(
            x, vocab, row_top, top, temperature, k, min_p, top_p, u, processed, changed, work
        )
    if greedy:
        token = first_maximum(x, vocab, row_top, top, changed, work)
    out.tokens[i] = token
    if processed:
        if kept < 0:
            kept = gather(x, vocab, LOWEST, changed, work)
            divide_candidates(kept, temperature, work)
        named = extras.named_tokens[extras.named[i] : extras.named[i + 1]]
        out.ranks[i] = score_kept(
            kept, vocab, high, log_mass, mode == PROCESSED_LOGITS, token, extras.wanted[i], named,
            out.score_ids[i], out.scores[i], work,
        )  # fmt: skip
    elif scored:
        touched = changed > 0 or has_extras(i, extras)
        _score_raw(x, vocab, i, row_top, touched, extras, mode, work, out)


@entry
def sample_rows(
    flat: Any,
    starts: Any,
    which: Any,
    vocab: int,
    indices: Any,
    columns: Columns,
    extras: Extras,
    mode: int,
    work: Work,
    out: Output,
) -> None:
    """Rows ``i = which[j]`` of the call, of columns ``indices[i]``: ``flat[starts[j]:][:vocab]``.

    ``out.tokens`` and ``out.codes`` hold -1 and 0 before.
    """
    for j in range(starts.size):
        i = which[j]
        x = flat[starts[j] : starts[j] + vocab]
        _draw_row(x, vocab, i, indices[i], columns, extras, mode, work, out)
        show_all(work)
