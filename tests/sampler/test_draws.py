"""Draw frequencies against exact float64 probabilities: chi-square, seeds fixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampler import naive
from tests.sampler.support import bfloat16, bitmask, draws, from_bfloat16
from tests.sampler.test_filters import logits

from sipipe.messages.params import SequenceParams, derive_seed
from sipipe.sampler.state import SequenceColumns
from sipipe.sampling import sample

STRATEGIES = {
    "temperature": {"temperature": 0.9},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "all": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    },
    "large_top_k": {"top_k": 5000, "top_p": 0.99},
    "half": {"top_k": 3000, "temperature": 1.3},
    "nearly_all": {"top_p": 0.999, "temperature": 1.3},
    "many_of_min_p": {"min_p": 0.1, "top_p": 0.7, "temperature": 1.3},
    "little": {"top_p": 0.04},
    "very_little": {"top_p": 0.01},
}
PROMPT, OUTPUT = [0, 1, 2, 3], [3, 4, 4, 5]


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of the observed tokens, rare ones pooled by likelihood to at least 8 expected."""
    stats = pytest.importorskip("scipy.stats")
    observed = np.bincount(tokens, minlength=probabilities.size).astype(float)
    assert observed[probabilities == 0].sum() == 0  # nothing filtered is ever drawn
    order = np.argsort(-probabilities, kind="stable")
    expected = probabilities[order] * tokens.size
    pool = np.floor(np.cumsum(expected) / 8).astype(int)
    pool[expected >= 8] = np.arange((expected >= 8).sum())
    pool[expected < 8] += tokens.size
    _, pool = np.unique(pool, return_inverse=True)
    e = np.bincount(pool, expected)
    o = np.bincount(pool, observed[order])
    while len(e) > 1 and e[-1] < 4:
        e[-2] += e[-1]
        o[-2] += o[-1]
        e, o = e[:-1], o[:-1]
    if len(e) == 1:
        return 1.0
    return float(stats.chisquare(o, e * o.sum() / e.sum()).pvalue)


SHAPES = [
    "flat",
    "zipf",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("peaked", "tied")),
]


def check(x: np.ndarray, strategy: str, count: int, **options: object) -> None:
    params = SequenceParams(**STRATEGIES[strategy])
    probabilities = naive.softmax(naive.processed_logits(x, params, PROMPT, OUTPUT))
    tokens = draws(x, params, count, prompt_token_ids=PROMPT, output_token_ids=OUTPUT, **options)
    assert chi_square(tokens, probabilities) > 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", ["flat", "peaked", "tied", "zipf"])
@pytest.mark.parametrize(
    "size", [300, *(pytest.param(size, marks=pytest.mark.slow) for size in (7, 6000))]
)
def test_frequencies(strategy: str, shape: str, size: int) -> None:
    check(logits(shape, size), strategy, 4000, seed=size)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_frequencies_at_a_large_vocabulary(strategy: str, shape: str) -> None:
    check(logits(shape, 200_000), strategy, 1024, seed=7)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_small_top_p_keeps_what_it_should(data: st.DataObject) -> None:
    """No token drawn has ``top_p`` of the mass before it, in float64; ties by their ids."""
    size = data.draw(st.sampled_from([1, 7, 256, 300, 6000, 40_000]))
    shape = data.draw(st.sampled_from(["flat", "peaked", "tied", "zipf", "equal"]))
    x = np.zeros(size, np.float32) if shape == "equal" else logits(shape, size)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x[rng.random(size) < data.draw(st.sampled_from([0.0, 0.5, 0.99]))] = -np.inf
    x[rng.integers(size)] = 0.5
    masks, allowed = {}, np.ones(size, bool)
    if data.draw(st.booleans()):
        allowed = rng.random(size) < 0.7
        allowed[x.argmax()] = True
        x[rng.integers(size, size=size // 9)] = data.draw(st.sampled_from([-1.0, np.nan]))
        x[allowed & np.isnan(x)] = 0.25  # NaN behind a mask only
        masks["bitmask"] = np.repeat(bitmask(allowed), 16, 0)
    biased = rng.choice(size, min(size, 3), replace=False)
    bias = data.draw(st.sampled_from([0.0, 0.125]))
    if data.draw(st.booleans()):
        x = bfloat16(x)
    top_p = data.draw(st.sampled_from([1e-45, 1e-6, 0.001, 0.03, 1 / 32]))
    min_p = data.draw(st.sampled_from([0.0, 0.0, 0.9, 1e-3]))
    columns = SequenceColumns(size)
    for handle in range(16):
        edit = {"logit_bias": {int(token): bias for token in biased}} if bias else {}
        columns.join(handle, SequenceParams(seed=handle, top_p=top_p, min_p=min_p, **edit))
    rows = np.repeat(x[None], 16, 0)
    result = columns.sample(range(16), rows, **masks)
    exact = (from_bfloat16(x) if x.dtype == np.uint16 else x).astype(float)
    exact[biased] += bias
    exact[~allowed] = -np.inf
    weights = np.exp(exact - exact.max())
    weights[weights < float(np.float32(min_p)) * (1 - 1e-6)] = 0.0
    assert not result.errors
    for token in result.token_ids:
        before = weights[exact > exact[token]].sum()
        before += weights[token + 1 :][exact[token + 1 :] == exact[token]].sum()
        assert before <= float(np.float32(top_p)) * weights.sum() * (1 + 1e-5)


@pytest.mark.parametrize("top_k", [6_500, 100_000, 199_999])
@pytest.mark.parametrize("shape", SHAPES)
def test_frequencies_of_a_large_top_k(shape: str, top_k: int) -> None:
    x = logits(shape, 200_000)
    probabilities = naive.softmax(naive.processed_logits(x, SequenceParams(top_k=top_k)))
    assert chi_square(draws(x, SequenceParams(top_k=top_k), 1024), probabilities) > 1e-4


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", ["flat", "peaked", "tied", "zipf"])
def test_logprobs_change_no_draw(strategy: str, shape: str) -> None:
    """With processed logprobs the filtered tokens are listed, without they often are not found."""
    x = logits(shape, 6000)
    drawn = []
    for logprobs in (None, 2):
        columns = SequenceColumns(6000, logprobs_mode="processed_logprobs")
        for handle in range(200):
            params = SequenceParams(seed=handle, logprobs=logprobs, **STRATEGIES[strategy])
            columns.join(handle, params, PROMPT, OUTPUT)
        result = columns.sample(range(200), x.reshape(1, -1), np.zeros(200, int))
        assert not result.errors
        drawn.append(result.token_ids.tolist())
        for found in result.logprobs.values() if logprobs else ():
            assert np.isfinite(found.logprobs[0])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("strategy", ["temperature", "penalties", "top_p", "all", "half"])
def test_frequencies_after_a_long_text(strategy: str) -> None:
    """2,000 distinct seen tokens of 3,000: most draws come from beside the row."""
    x = logits("zipf", 3000)
    text = np.random.default_rng(0).permutation(3000)[:2000].tolist()
    fields = {"repetition_penalty": 1.1, "presence_penalty": 0.3, **STRATEGIES[strategy]}
    params = SequenceParams(**fields)
    probabilities = naive.softmax(naive.processed_logits(x, params, text[:5], text))
    tokens = draws(x, params, 4000, prompt_token_ids=text[:5], output_token_ids=text)
    assert chi_square(tokens, probabilities) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", ["flat", "peaked", "tied", "zipf"])
def test_many_draws_of_a_real_vocabulary(strategy: str, shape: str) -> None:
    check(logits(shape, 151_936), strategy, 20_000)


def test_a_long_sequence_draws_independently() -> None:
    """Successive positions of one seed are as good as seeds."""
    x = logits("zipf", 300).reshape(1, -1)
    columns = SequenceColumns(300)
    columns.join(0, SequenceParams(seed=11))
    tokens = []
    for _ in range(3000):
        token = int(columns.sample([0], x).token_ids[0])
        columns.append(0, token)
        tokens.append(token)
    assert chi_square(np.array(tokens), naive.softmax(x[0])) > 1e-4
    pairs = np.array(tokens[:-1]) * 300 + np.array(tokens[1:])
    joint = np.outer(naive.softmax(x[0]), naive.softmax(x[0])).reshape(-1)
    assert chi_square(pairs, joint) > 1e-4


def test_rows_of_one_params_draw_with_numbers_of_their_own() -> None:
    same = np.zeros((400, 64), np.float32)
    tokens = sample(same, SequenceParams(seed=7))
    assert np.bincount(tokens, minlength=64).max() < 40
    np.testing.assert_array_equal(tokens, sample(same, SequenceParams(seed=7)))
    np.testing.assert_array_equal(tokens[:3], sample(same[:3], SequenceParams(seed=7)))
    own = [SequenceParams(seed=7), SequenceParams(seed=derive_seed(7, "1"))]
    np.testing.assert_array_equal(tokens[:2], sample(same[:2], own))


def test_without_a_seed_each_call_draws_anew() -> None:
    same = np.zeros((400, 64), np.float32)
    first, second = (sample(same, SequenceParams()) for _ in range(2))
    assert np.bincount(first, minlength=64).max() < 40
    assert (first == second).mean() < 0.2
    columns = SequenceColumns(64)
    for handle in range(400):
        columns.join(handle, SequenceParams())
    assert np.bincount(columns.sample(range(400), same).token_ids, minlength=64).max() < 40
