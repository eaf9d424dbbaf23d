"""One row from logits to token: the sampler's order of steps.

mask and edit what the request changes ─► maxima of all blocks ─► greedy: first maximum
                                                                ├► top-k, min-p: candidates ─► draw
                                                                └► sums ─► [top-p] ─► draw
"""

from typing import Any

import numpy as np

from sipipe.jit import entry, kernel
from sipipe.sampler.kernels.choose import choose, draws_from_row, first_maximum
from sipipe.sampler.kernels.logit_edits import (
    apply_edits,
    clear_mask,
    has_edits,
    mask_by_grammar,
    mask_no_numbers,
)
from sipipe.sampler.kernels.scan import LOWEST, block_maxima
from sipipe.sampler.kernels.scores import score_kept, score_raw, score_row
from sipipe.sampler.kernels.state import (
    ALL_MASKED,
    HAS_INFINITY,
    HAS_NAN,
    Filters,
    Output,
    RequestState,
    RowOptions,
    Scores,
    Work,
)

GREEDY_BELOW = np.float32(1e-5)
"""Temperatures below this are greedy, as in vLLM."""
NOT_DRAWN = -2
"""The token of a row behind a draft that was not drawn."""
LATER = -2
"""Value of ``follows`` that leaves the row out."""


@kernel
def _filters(request: Any, ahead: Any, top: Any, state: Any) -> Any:
    """Filters by which the token of ``request`` is chosen, ``ahead`` tokens behind those that its state
    has. ``top`` is the largest logit."""
    temperature = state.temperature[request]
    if temperature < GREEDY_BELOW:
        return Filters(np.float32(1.0), np.int64(0), 1.0, 0.0, np.uint64(0), np.int64(0))
    if abs(top / temperature) == np.inf:
        # Logits that large are 1e26 apart, or the same: the draw is that of any temperature.
        temperature = np.float32(1.0)
    return Filters(
        temperature,
        np.int64(state.top_k[request]),
        np.float64(state.top_p[request]),
        np.float64(state.min_p[request]),
        state.seed[request],
        state.position[request] + ahead,
    )


@kernel
def _draw_row(
    x: Any, i: Any, request: Any, ahead: Any, state: Any, options: Any, scores: Any, work: Any,
    out: Any,
) -> None:  # fmt: skip
    """Sample row ``i`` of this call, with the logits ``x``, for ``request`` into ``out``."""
    greedy = state.temperature[request] < GREEDY_BELOW
    grouped = not greedy and draws_from_row(
        x.size, _filters(request, ahead, np.float32(0.0), state)
    )
    edited, row_top, top, bad = apply_edits(x, i, request, grouped, state, options, work)
    if bad or top == np.inf or not top >= LOWEST:
        out.codes[i] = HAS_NAN if bad else HAS_INFINITY if top == np.inf else ALL_MASKED
        return
    filters = _filters(request, ahead, top, state)
    scored = options.wanted[i] >= 0
    processed = scored and scores.processed
    token = np.int64(-1)
    candidates = np.int64(-1)
    high = 0.0
    log_mass = 0.0
    if not greedy or processed:
        token, candidates, high, log_mass = choose(
            x, row_top, top, grouped, filters, processed, edited, work
        )
    if greedy:
        token = first_maximum(x, row_top, top, edited, work)
    out.tokens[i] = token
    if processed:
        shift = np.float32(high)
        offset = np.float32(log_mass)
        if scores.logits:
            shift = np.float32(0.0)
            offset = np.float32(0.0)
        if candidates < 0:
            divisor = filters.temperature
            score_row(x, row_top, divisor, shift, offset, i, edited, options, work, out)
        else:
            score_kept(candidates, shift, offset, i, edited, options, work, out)
    elif scored:
        if edited > 0 or has_edits(i, options):
            # Raw scores are after the grammar and before all else, as in vLLM.
            clear_mask(work)
            mask_by_grammar(i, options, work)
            row_top, bad = block_maxima(x, False, work)
            if bad or row_top == np.inf:  # behind the request's other masks
                mask_no_numbers(x, work)
                row_top, _ = block_maxima(x, False, work)
        score_raw(x, row_top, scores.logits, i, options, work, out)


@entry
def sample_rows(
    flat: Any,
    starts: Any,
    vocab: int,
    requests: Any,
    follows: Any,
    ahead: Any,
    state: RequestState,
    options: RowOptions,
    scores: Scores,
    work: Work,
    out: Output,
) -> None:
    """Each row i of the call, of ``requests[i]``: ``flat[starts[i]:][:vocab]``.
    ``follows[i]``: the draft that row i stands behind, which row i - 1 has to draw; negative: none.
    ``ahead[i]``: how many drafts are before it. ``out.tokens`` and ``out.codes``: -1 and 0 before."""
    for i in range(starts.size):
        if follows[i] == LATER or (ahead[i] > 0 and out.tokens[i - 1] != follows[i]):
            out.tokens[i] = NOT_DRAWN
            continue
        x = flat[starts[i] : starts[i] + vocab]
        _draw_row(x, i, requests[i], ahead[i], state, options, scores, work, out)
        clear_mask(work)
