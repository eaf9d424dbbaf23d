"""A draw among filtered tokens is the one whose interval of the CDF, in float64, holds the number
that seed and position give."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sampler import naive
from tests.sampler.support import bfloat16, from_bfloat16
from tests.sampler.test_filters import logits

from sipipe.messages.params import SequenceParams
from sipipe.sampler.kernels.philox import uniform
from sipipe.sampler.state import SequenceColumns

SEEDS = 400
PROMPT, OUTPUT = [0, 1, 2, 3], [3, 4, 4, 5]
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {7: 1.5}}


@pytest.mark.parametrize("shape", ["peaked", "zipf", "tied", "flat"])
@pytest.mark.parametrize("size", [2000, 5000, 151_936])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "given",
    [
        {"top_k": 50, "temperature": 0.7},
        {"top_k": 200, "top_p": 0.9, "min_p": 0.001, **PENALTIES},
        {"min_p": 0.1, "temperature": 2.0},
    ],
    ids=["top_k", "all", "min_p"],
)
def test_a_number_draws_the_token_of_its_interval(
    shape: str, size: int, dtype: str, given: dict
) -> None:
    x = logits(shape, size)
    stored = bfloat16(x) if dtype == "bfloat16" else x
    exact = from_bfloat16(stored) if dtype == "bfloat16" else x
    columns = SequenceColumns(size)
    for seed in range(SEEDS):
        columns.join(seed, SequenceParams(seed=seed, **given), PROMPT, OUTPUT)
    tokens = columns.sample(
        range(SEEDS), stored.reshape(1, -1), np.zeros(SEEDS, np.int64)
    ).token_ids
    kept = naive.processed_logits(exact, SequenceParams(**given), PROMPT, OUTPUT)
    ids = np.flatnonzero(np.isfinite(kept))
    assert np.isin(tokens, ids).all()
    if given.get("top_p", 1.0) < 1.0 and shape in ("flat", "tied"):
        return  # which tokens stay at the cut depends on rounding: only how many is the rule
    # Few are in the order of likelihood, then of their ids downwards; many in the order of ids.
    if "top_k" in given and ids.size <= 256:
        ids = ids[np.lexsort((-ids, -kept[ids]))]
    ends = np.cumsum(np.exp(kept[ids].astype(float) - kept[ids].max()))
    place = {int(token): i for i, token in enumerate(ids)}
    at = np.array([place[int(token)] for token in tokens])
    u = np.array([uniform(seed, len(OUTPUT)) for seed in range(SEEDS)])
    begins = np.concatenate([[0.0], ends[:-1]])
    assert (u >= begins[at] / ends[-1] - 2e-6).all()
    assert (u <= ends[at] / ends[-1] + 2e-6).all()
