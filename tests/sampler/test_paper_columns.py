"""The paper's sampler by columns, which benchmarks/sampling_columns.py measures, draws exactly."""

import numpy as np
import pytest
from benchmarks.paper_columns import PaperColumns
from benchmarks.sampling import STRATEGIES
from scipy.stats import chisquare
from tests.sampler.naive import processed_logits, softmax

from sipipe.messages.params import SequenceParams

SLOW = pytest.mark.slow  # each compiles kernels of its own; "all" has every one


@pytest.mark.parametrize("kind", [np.float32, pytest.param(np.int8, marks=SLOW)])
@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=SLOW if name != "all" else ()) for name in STRATEGIES]
)
def test_draws_have_the_exact_probabilities(strategy: str, kind: type) -> None:
    vocab, lanes = 700, 4000
    params = SequenceParams(**STRATEGIES[strategy])
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, vocab).astype(np.float32)
    prompt, output = rng.integers(0, vocab, 40), rng.integers(0, vocab, 40)
    columns = PaperColumns(params, vocab, np.tile(prompt, (lanes, 1)), np.tile(output, (lanes, 1)), kind)  # fmt: skip
    z = np.ascontiguousarray(np.tile(logits, (lanes, 1)).T)
    tokens = columns.sample(z, rng.random(lanes))

    found = processed_logits(logits, params, prompt.tolist(), output.tolist())
    if params.greedy:
        assert (tokens == found.argmax()).all()
        return
    exact = softmax(found)
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[exact == 0].any()
    often = exact * lanes >= 5
    seen, expected = counts[often], exact[often] * lanes
    rest = lanes - seen.sum(), lanes - expected.sum()
    if rest[1] >= 1:
        seen, expected = np.append(seen, rest[0]), np.append(expected, rest[1])
    assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4
