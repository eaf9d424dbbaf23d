"""The order of rows in a batch: the scheduling output's, or what an attention backend wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def scheduling_order(req_ids: Sequence[str], scheduled: Iterable[str]) -> np.ndarray:
    """[B] where in ``req_ids`` each request of ``scheduled`` stands (both have the same ones)."""
    place = {req_id: index for index, req_id in enumerate(req_ids)}
    return np.array([place[req_id] for req_id in scheduled], np.int64)


def decodes_first(
    computed: np.ndarray, scheduled: np.ndarray, prompt_lens: np.ndarray, threshold: int
) -> np.ndarray | None:
    """The permutation that backends with a decode kernel want, or None if it is so already.

    Decodes, then short continued prompts, then long ones, then fresh prompts; otherwise the
    given order, so that a microbatch which only decodes never changes its own. All arguments
    are [B]: tokens computed, tokens scheduled, prompt lengths; queries of up to ``threshold``
    tokens are short.
    """
    long = scheduled > threshold
    region = np.where(computed == 0, 3, np.where(long, 2, np.where(computed < prompt_lens, 1, 0)))
    if (np.diff(region) >= 0).all():
        return None
    return np.argsort(region, kind="stable")
