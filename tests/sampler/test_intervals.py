"""A draw among filtered tokens is the one whose interval of the CDF, in float64, holds the number
that seed and position give."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tests.sampler import naive
from tests.sampler.support import bfloat16, draws, from_bfloat16
from tests.sampler.test_filters import logits

from sipipe.messages.params import SequenceParams
from sipipe.sampler.kernels.bounds import UNIT
from sipipe.sampler.kernels.philox import uniform, uniforms

SEEDS = 400
PROMPT, OUTPUT = [0, 1, 2, 3], [3, 4, 4, 5]
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {7: 1.5}}


def drawn(x: np.ndarray, dtype: str, given: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens that each seed draws from logits stored as ``dtype``, these logits, and what is kept."""
    stored = bfloat16(x) if dtype == "bfloat16" else x
    exact = from_bfloat16(stored) if dtype == "bfloat16" else x
    params = SequenceParams(**given)
    tokens = draws(stored, params, SEEDS, prompt_token_ids=PROMPT, output_token_ids=OUTPUT)
    kept = naive.processed_logits(exact, params, PROMPT, OUTPUT)
    return tokens, exact, kept


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
    tokens, _, kept = drawn(logits(shape, size), dtype, given)
    ids = np.flatnonzero(np.isfinite(kept))
    assert np.isin(tokens, ids).all()
    if "min_p" in given and shape in ("flat", "tied"):
        return  # many survive: drawn from the row, by pairs of numbers (below), or tied at top-p's cut
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


def twins(x: np.ndarray, kept: np.ndarray, given: dict, position: int) -> np.ndarray:
    """The tokens that `draw_row` takes of a row without edits; -1 where rounding may decide."""
    temperature = given.get("temperature", 1.0)
    blocks = -(-x.size // 256)
    padded = np.full(blocks * 256, -np.inf)
    padded[: x.size] = x
    tokens = np.arange(padded.size).reshape(blocks, 8, 32).transpose(0, 2, 1).reshape(-1, 8)
    slope = float(np.float32(np.log2(np.e) / np.float64(np.float32(temperature)) * UNIT))
    below = padded[tokens].max(axis=1) - x.max()
    bits = np.maximum(below * slope + 127 * UNIT, 0.0)
    bounds = bits.astype(np.int32).view(np.float32).astype(float)
    if "min_p" in given:
        bounds[np.exp(below / temperature) < given["min_p"]] = 0.0
    # By 256 groups, and among them by the 16 lanes first.
    order = np.arange(-(-bounds.size // 256) * 256).reshape(-1, 16, 16).transpose(0, 2, 1)
    order = order[order < bounds.size]
    ends = np.cumsum(bounds[order])

    def twin(seed: int) -> int:
        for attempt in range(1000):
            u, v = uniforms(np.uint64(seed), np.int64(position), attempt)
            at = int(np.searchsorted(ends, u * ends[-1], side="right"))
            if np.abs(ends[max(at - 1, 0) : at + 1] / ends[-1] - u).min() < 1e-6:
                return -1
            group = order[at]
            token = tokens[group, int(v * 8)]
            ratio = np.exp2((padded[token] - x.max()) * slope / UNIT) / bounds[group]
            if abs(v * 8 % 1 - ratio) < 1e-4:
                return -1
            if v * 8 % 1 < ratio and np.isfinite(kept[token]):
                return int(token)
        raise AssertionError("no attempt of 1,000")

    return np.array([twin(seed) for seed in range(SEEDS)])


MANY = [{"temperature": 0.7}, {"top_p": 0.9}, {"top_p": 0.3, "temperature": 1.5}, {"top_k": 1000}]
TIES = [
    {"min_p": 0.01, "temperature": 2.0},
    {"min_p": 0.5, "top_p": 0.6},
    {"min_p": 0.5, "top_k": 1000},
]
"""Of other shapes few survive these: drawn from a list, by one number (above)."""


@pytest.mark.parametrize("size", [7, 2000, 9001])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "given"),
    [
        *product(("peaked", "zipf", "tied", "flat"), MANY),
        *product(("tied", "flat"), TIES),
    ],
    ids=str,
)
def test_pairs_of_numbers_draw_from_a_row(shape: str, size: int, dtype: str, given: dict) -> None:
    """By groups of 8 tokens: the draw that a plain twin with every bound and filter makes."""
    tokens, exact, kept = drawn(logits(shape, size), dtype, given)
    expected = twins(exact, kept, given, len(OUTPUT))
    sure = expected >= 0
    assert sure.sum() > SEEDS * 0.8
    np.testing.assert_array_equal(tokens[sure], expected[sure])
