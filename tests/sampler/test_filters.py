"""Each filter and penalty against transformers' processors, and all against the naive twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampler import naive
from tests.sampler.support import bitmask, processed

from sipipe.messages.params import SequenceParams
from sipipe.sampler.state import SequenceColumns
from sipipe.sampling import sample

SIZES = [7, 255, 256, 257, 1000, 5000]
SHAPES = ["flat", "peaked", "tied", "zipf"]


def logits(shape: str, size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if shape == "flat":
        x = rng.normal(0, 0.01, size)
    elif shape == "peaked":
        x = rng.normal(0, 3, size)
        x[rng.integers(size)] = 25.0
    elif shape == "tied":
        x = rng.integers(-2, 3, size).astype(float)
    else:
        x = rng.permutation(-1.1 * np.log(np.arange(1, size + 1))) * 2
    return x.astype(np.float32)


def kept_equal(ours: np.ndarray, theirs: np.ndarray, tolerance: float = 0.0) -> None:
    """The same tokens kept, with the same logits, but for tokens within rounding of the cut."""
    differ = np.isfinite(ours) != np.isfinite(theirs)
    if tolerance and differ.any():
        cut = theirs[np.isfinite(theirs)].min()
        x = np.where(np.isfinite(ours), ours, theirs)[differ]
        assert np.abs(x - cut).max() <= tolerance
        both = ~differ
    else:
        assert not differ.any()
        both = np.full(ours.size, True)
    np.testing.assert_allclose(ours[both], theirs[both], rtol=1e-6, atol=1e-6)


def by_transformers(x: np.ndarray, processors: list, tokens: list[int] = ()) -> np.ndarray:
    torch = pytest.importorskip("torch")
    scores = torch.from_numpy(x.copy()).reshape(1, -1)
    ids = torch.tensor([list(tokens)], dtype=torch.long)
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0].numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
class TestAgainstTransformers:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("transformers")

    @pytest.mark.parametrize("k", [1, 2, 5, 50, 300, 100_000])
    def test_top_k(self, shape: str, size: int, k: int) -> None:
        from transformers import TopKLogitsWarper

        x = logits(shape, size)
        theirs = by_transformers(x, [TopKLogitsWarper(k)])
        kept_equal(processed(x, SequenceParams(top_k=k)), theirs)

    @pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999])
    def test_top_p(self, shape: str, size: int, p: float) -> None:
        from transformers import TopPLogitsWarper

        x = logits(shape, size)
        theirs = by_transformers(x, [TopPLogitsWarper(p)])
        ours = processed(x, SequenceParams(top_p=p))
        if shape == "tied":  # their sort decides which of tied tokens stay; how many is the rule
            values, counts = np.unique(ours[np.isfinite(ours)], return_counts=True)
            other, others = np.unique(theirs[np.isfinite(theirs)], return_counts=True)
            np.testing.assert_array_equal(values, other)
            assert np.abs(counts - others).max() <= max(1, size * 2e-4)
        else:
            kept_equal(ours, theirs, tolerance=2e-4 if size > 300 else 1e-5)

    @pytest.mark.parametrize("p", [0.001, 0.05, 0.5, 1.0])
    def test_min_p(self, shape: str, size: int, p: float) -> None:
        from transformers import MinPLogitsWarper

        x = logits(shape, size)
        theirs = by_transformers(x, [MinPLogitsWarper(p)])
        kept_equal(processed(x, SequenceParams(min_p=p)), theirs, tolerance=2e-6)

    @pytest.mark.parametrize("temperature", [0.01, 0.5, 1.7])
    def test_temperature(self, shape: str, size: int, temperature: float) -> None:
        from transformers import TemperatureLogitsWarper

        x = logits(shape, size)
        theirs = by_transformers(x, [TemperatureLogitsWarper(temperature)])
        kept_equal(processed(x, SequenceParams(temperature=temperature)), theirs)

    def test_repetition(self, shape: str, size: int) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor

        x = logits(shape, size)
        tokens = np.random.default_rng(1).integers(0, size, 60).tolist()
        theirs = by_transformers(x, [RepetitionPenaltyLogitsProcessor(1.3)], tokens)
        ours = processed(
            x,
            SequenceParams(repetition_penalty=1.3),
            prompt_token_ids=tokens[:20],
            output_token_ids=tokens[20:],
        )
        kept_equal(ours, theirs)


EDGES = [
    {"top_k": 1},
    {"top_k": -1},
    {"top_k": 6},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"temperature": 9e-6},
    {"temperature": 1e-5},
    {"temperature": 0.0},
    {"repetition_penalty": 0.5, "presence_penalty": -2.0, "frequency_penalty": -1.0},
    {"repetition_penalty": 3.0, "temperature": 0.0},
    {"logit_bias": {0: 100.0}, "temperature": 0.0},
    {"logit_bias": {6: -100.0, 1: 3.0}},
    {"logit_bias": {6: -np.inf, 1: 3.0}, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    {"logit_bias": {0: -np.inf, 1: -np.inf}, "temperature": 0.0},
    {"allowed_token_ids": [3]},
    {"allowed_token_ids": [5, 1, 3], "top_k": 2},
    {"min_tokens": 100, "all_stop_token_ids": [0, 2]},
    {"bad_words_token_ids": [[4], [1, 5], [2, 3, 6]]},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [7, 256, 700])
@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_edges(shape: str, size: int, edge: dict) -> None:
    x = logits(shape, size)
    params = SequenceParams(**edge)
    tokens = {"prompt_token_ids": [0, 1, 2], "output_token_ids": [2, 5, 2, 3]}
    theirs = naive.processed_logits(x, params, [0, 1, 2], [2, 5, 2, 3])
    kept_equal(processed(x, params, **tokens), theirs, tolerance=1e-5)


def kept(x: np.ndarray, **given: object) -> list[int]:
    return np.flatnonzero(np.isfinite(processed(x, SequenceParams(**given)))).tolist()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [7, 256, 300, 5000])
def test_filters_that_filter_nothing(shape: str, size: int) -> None:
    x = logits(shape, size)
    for k in (0, -1, size, size + 1, 2**31 - 1):
        assert len(kept(x, top_k=k)) == size
    assert len(kept(x, top_p=1.0)) == len(kept(x, min_p=0.0)) == size
    assert len(kept(x, top_k=size - 1)) == (x > x.min()).sum() or shape == "tied"


def test_ties_at_the_cut() -> None:
    """Top-k keeps all tied with the k-th, min-p all at its bound, top-p as few as reach p."""
    x = np.zeros(600, np.float32)
    best, second = [3, 300, 599], [0, 255, 256, 511, 512]
    x[best], x[second] = 4.0, 2.0
    assert kept(x, top_k=1) == kept(x, top_k=3) == best
    assert kept(x, top_k=4) == kept(x, top_k=8) == sorted(best + second)
    assert len(kept(x, top_k=9)) == 600
    assert kept(x, min_p=1.0) == best
    assert kept(x, min_p=float(np.exp(np.float32(-1.9)))) == best
    assert kept(x, min_p=float(np.exp(np.float32(-2.1)))) == sorted(best + second)
    assert kept(x, top_p=5e-324) == kept(x, top_p=1e-9) == [599]  # of tied ones the highest ids
    p = np.exp(x.astype(float)) / np.exp(x.astype(float)).sum()
    assert kept(x, top_p=1.5 * p[3]) == [300, 599]
    assert kept(x, top_p=3 * p[3] + 1.5 * p[0]) == [3, 300, 511, 512, 599]
    assert kept(x, top_k=8, top_p=1e-9) == [599]


def test_greedy_begins_below_1e_5() -> None:
    x = np.zeros((200, 300), np.float32)
    x[:, [290, 7, 256]] = 1.0
    seeds = range(200)
    for temperature in (0.0, 1e-9, 9.9e-6):
        params = [SequenceParams(temperature=temperature, seed=i) for i in seeds]
        assert set(sample(x, params).tolist()) == {7}  # ties to the lowest id
    params = [SequenceParams(temperature=1.1e-5, seed=i) for i in seeds]
    assert set(sample(x, params).tolist()) == {7, 256, 290}


@pytest.mark.parametrize("seen", [1, 255, 256, 257, 300, 2500])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"top_k": 2},
        {"top_k": 280},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.001},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_long_texts(seen: int, given: dict) -> None:
    """Up to every token of the vocabulary seen, so that nothing of the row is left as it was."""
    size = 3000 if seen > 300 else 300
    x = logits("zipf", size, seen)
    rng = np.random.default_rng(seen)
    output = rng.permutation(size)[:seen].tolist()
    output += rng.choice(output, 50).tolist()
    params = SequenceParams(
        repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1, **given
    )
    theirs = naive.processed_logits(x, params, output[:5], output)
    ours = processed(x, params, prompt_token_ids=output[:5], output_token_ids=output)
    kept_equal(ours, theirs, tolerance=1e-4)
    token = sample(
        x.reshape(1, -1), params, prompt_token_ids=[output[:5]], output_token_ids=[output]
    )
    assert np.isfinite(theirs[token[0]])
    if params.greedy:
        assert token[0] == theirs.argmax()


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_everything_equals_the_naive_twin(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([5, 64, 256, 300, 3000]))
    shape = data.draw(st.sampled_from(SHAPES))
    x = logits(shape, size, data.draw(st.integers(0, 1000)))
    token = st.integers(0, size - 1)
    params = SequenceParams(
        temperature=data.draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0])),
        top_k=data.draw(st.sampled_from([0, 1, 3, 40, size, size + 5])),
        top_p=data.draw(st.sampled_from([1.0, 0.95, 0.5, 0.01])),
        min_p=data.draw(st.sampled_from([0.0, 0.01, 0.3])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.2, 0.7])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.1, -0.3])),
        logit_bias=data.draw(
            st.none() | st.dictionaries(token, st.sampled_from([-5.0, 2.5, -np.inf]))
        ),
        bad_words_token_ids=data.draw(
            st.none() | st.lists(st.lists(token, min_size=1, max_size=3), max_size=2)
        ),
        min_tokens=data.draw(st.sampled_from([0, 3])),
        all_stop_token_ids=[1, 2],
        allowed_token_ids=data.draw(
            st.none() | st.lists(token, min_size=3, max_size=size, unique=True)
        ),
    )
    prompt = data.draw(st.lists(token, max_size=20))
    output = data.draw(st.lists(token, max_size=20))
    allowed = None
    if data.draw(st.booleans()):
        allowed = np.random.default_rng(data.draw(st.integers(0, 99))).random(size) < 0.7
        stops_only = not np.isfinite(
            naive.processed_logits(x, params, prompt, output, allowed=allowed)
        ).any()
        if stops_only and params.min_tokens:  # then min_tokens gives way: see test_options
            allowed = None
    theirs = naive.processed_logits(x, params, prompt, output, allowed=allowed)
    given = {"prompt_token_ids": prompt, "output_token_ids": output}
    if allowed is not None:
        given["bitmask"] = bitmask(allowed)
    if not np.isfinite(theirs).any():
        with pytest.raises(ValueError, match="no token is left"):
            processed(x, params, **given)
        return
    ours = processed(x, params, **given)
    if params.top_p < 1:  # a token whose mass lies within rounding of p may fall on either side
        finite, other = np.isfinite(ours), np.isfinite(theirs)
        assert abs(int(finite.sum()) - int(other.sum())) <= 1 + size // 500
        np.testing.assert_allclose(ours[finite & other], theirs[finite & other], rtol=2e-6)
    else:
        kept_equal(ours, theirs, tolerance=3e-6)
    columns = SequenceColumns(size)
    columns.join(0, params, prompt, output)
    drawn = columns.sample([0], x.reshape(1, -1), bitmask=given.get("bitmask"))
    token_id = drawn.token_ids[0]
    if params.greedy:
        assert token_id == int(np.argmax(theirs))
    else:
        assert np.isfinite(ours[token_id])
