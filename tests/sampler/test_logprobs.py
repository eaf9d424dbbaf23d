"""Logprobs, ranks and their modes against the naive twin; with masks and odd logits: fuzz.py."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from tests.sampler import naive
from tests.sampler.test_filters import SHAPES, logits

from sipipe.messages.params import SequenceParams
from sipipe.sampler.state import SequenceColumns
from sipipe.sampling import sample_with_logprobs

MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
PARAMS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 10, "repetition_penalty": 1.2},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"top_p": 0.8, "presence_penalty": 0.5},
    {"min_p": 0.05, "temperature": 1.5},
    {"allowed_token_ids": [1, 2, 5, 6]},
]
PROMPT, OUTPUT = [0, 1, 2], [2, 3]


def scores(x: np.ndarray, params: SequenceParams, mode: str) -> np.ndarray:
    """What vLLM's sampler would hand to its gathering of logprobs."""
    if mode.startswith("raw"):
        row = x.astype(np.float32)
    else:
        row = naive.processed_logits(x, params, PROMPT, OUTPUT)
    return naive.log_softmax(row) if mode.endswith("logprobs") else row.astype(float)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["peaked", "zipf", "tied"])
@pytest.mark.parametrize("given", PARAMS, ids=str)
@pytest.mark.parametrize(("size", "wanted"), [(7, 3), (700, 1), (700, 5), (700, 600), (700, -1)])
def test_modes(mode: str, shape: str, given: dict, size: int, wanted: int) -> None:
    x = logits(shape, size)
    params = SequenceParams(**given, logprobs=wanted, seed=3)
    tokens, found = sample_with_logprobs(
        x.reshape(1, -1),
        params,
        prompt_token_ids=[PROMPT],
        output_token_ids=[OUTPUT],
        logprobs_mode=mode,
    )
    token = int(tokens[0])
    row = found[0]
    expected = scores(x, params, mode)
    k = size if wanted == -1 else wanted
    assert row.token_ids.shape == row.logprobs.shape == (1 + k,)
    assert row.token_ids[0] == token
    np.testing.assert_allclose(row.logprobs[0], expected[token], rtol=1e-5, atol=2e-6)
    assert len(set(row.token_ids[1:].tolist())) == k
    np.testing.assert_allclose(row.logprobs[1:], expected[row.token_ids[1:]], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(row.logprobs[1:], np.sort(expected)[::-1][:k], rtol=1e-5, atol=2e-6)
    if shape != "tied" or mode.startswith("raw"):
        rounded = expected.astype(np.float32)
        slack = 1e-6 * max(1.0, abs(float(rounded[token])))
        low = (rounded >= rounded[token] + slack).sum()
        high = (rounded >= rounded[token] - slack).sum()
        assert low <= row.rank <= high


def test_one_wide_request_costs_the_others_no_memory() -> None:
    """1,024 sequences, one of which asks for the whole vocabulary."""
    vocab, rows = 20_000, 1024
    columns = SequenceColumns(vocab)
    for handle in range(rows):
        columns.join(handle, SequenceParams(top_k=50, logprobs=-1 if handle == 7 else None))
    x, where = logits("zipf", vocab).reshape(1, -1), np.zeros(rows, int)
    columns.sample(range(rows), x, where)
    tracemalloc.start()
    found = columns.sample(range(rows), x, where)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.logprobs.keys() == {7}
    assert found.logprobs[7].token_ids.size == 1 + vocab
    assert peak < 8 * vocab + (1 << 18)
    parts = columns.shares(np.arange(rows, dtype=np.int32), 1000)
    assert np.concatenate(parts).tolist() == list(range(rows))
    assert [len(part) for part in parts] == [7, rows - 7]


def test_equal_scores_are_listed_by_token_id() -> None:
    x = np.zeros((1, 600), np.float32)
    x[0, [500, 20, 300]] = 1.0
    _, found = sample_with_logprobs(x, SequenceParams(temperature=0.0, logprobs=5))
    assert found[0].token_ids.tolist() == [20, 20, 300, 500, 0, 1]
    assert found[0].rank == 3


@pytest.mark.parametrize("mode", MODES)
def test_named_tokens(mode: str) -> None:
    x = logits("zipf", 700)
    params = SequenceParams(top_k=5, seed=1, logprob_token_ids=[650, 3, 3, 0])
    tokens, found = sample_with_logprobs(x.reshape(1, -1), params, logprobs_mode=mode)
    expected = scores(x, params, mode)
    ids = [int(tokens[0]), 650, 3, 3, 0]
    assert found[0].token_ids.tolist() == ids
    np.testing.assert_allclose(found[0].logprobs, expected[ids], rtol=1e-5, atol=2e-6)


def test_rows_ask_for_what_they_like() -> None:
    x = np.stack([logits(shape, 700) for shape in SHAPES])
    params = [SequenceParams(logprobs=k, seed=k or 0) for k in (None, 0, 4, 2)]
    tokens, found = sample_with_logprobs(x, params)
    assert sorted(found) == [1, 2, 3]
    assert [len(found[i].token_ids) for i in (1, 2, 3)] == [1, 5, 3]
    np.testing.assert_array_equal([found[i].token_ids[0] for i in (1, 2, 3)], tokens[1:])
