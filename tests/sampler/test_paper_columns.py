"""The paper's sampler by columns, which benchmarks/sampling_columns.py measures, draws exactly."""

import numpy as np
import pytest
from benchmarks.paper_columns import PaperColumns
from benchmarks.sampling import STRATEGIES, joined, ours
from benchmarks.sampling_columns import PaperShards
from tests.sampler.naive import processed_logits, softmax
from tests.sampler.test_draws import chi_square

from sipipe.messages.params import SequenceParams

SLOW = pytest.mark.slow
KINDS = [np.float32, pytest.param(np.int8, marks=SLOW)]
WAYS = [
    # Those compile for more than 3 s; "all" has the kernels of top-k.
    pytest.param(name, marks=SLOW if name not in ("top-p", "all") else ())
    for name in STRATEGIES
]


def test_what_it_is_compared_with_draws_every_row() -> None:
    logits = np.random.default_rng(5).normal(0, 3, (3, 700)).astype(np.float32)
    columns, drawn = joined("greedy", *logits.shape), []
    draw = columns.sample
    columns.sample = lambda handles, x: drawn.extend(draw(handles, x).token_ids)
    ours(columns, logits)()
    assert len(drawn) == 3


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.parametrize("t", [0, pytest.param(1, marks=SLOW), 3])
def test_draws_have_the_exact_probabilities(strategy: str, kind: type, t: int) -> None:
    """``t``: behind so many workers; 0: of logits that are transposed already."""
    vocab, lanes = 700, 4000
    params = SequenceParams(**STRATEGIES[strategy])
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, vocab).astype(np.float32)
    prompt, output = rng.integers(0, vocab, 40), rng.integers(0, vocab, 40)
    texts = np.tile(prompt, (lanes, 1)), np.tile(output, (lanes, 1))
    x, uniform = np.tile(logits, (lanes, 1)), rng.random(lanes)
    if t:
        tokens = drawn_behind(PaperShards(params, vocab, *texts, kind, t=t), x, uniform)
    else:
        columns = PaperColumns(params, vocab, *texts, kind)
        tokens = columns.sample(np.ascontiguousarray(x.T), uniform)

    found = processed_logits(logits, params, prompt.tolist(), output.tolist())
    if params.greedy:
        assert (tokens == found.argmax()).all()
        return
    assert chi_square(tokens, softmax(found)) > 1e-4


@pytest.mark.ci
@pytest.mark.parametrize("strategy", WAYS)
def test_behind_workers_each_sequence_has_its_own_token(strategy: str) -> None:
    """The same as of logits that were whole, but where sums round by a lane's place in a vector."""
    vocab, lanes = 5000, 301
    params = SequenceParams(**STRATEGIES[strategy])
    rng = np.random.default_rng(6)
    x, uniform = rng.normal(0, 3, (lanes, vocab)).astype(np.float32), rng.random(lanes)
    texts = rng.integers(0, vocab, (2, lanes, 40))
    whole, shards = PaperColumns(params, vocab, *texts), PaperShards(params, vocab, *texts, t=3)
    tokens = whole.sample(np.ascontiguousarray(x.T), uniform)
    assert (drawn_behind(shards, x, uniform) != tokens).mean() < 0.02
    for sampler, seen in zip(shards.samplers, shards.lanes, strict=True):
        assert (sampler.dense == whole.dense[:, :, seen]).all()


def drawn_behind(shards: PaperShards, x: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Tokens of logits [B, V], of which each worker has its shard."""
    for worker, tokens in enumerate(shards.tokens):
        shards.transpose(worker, np.ascontiguousarray(x[:, tokens]))
    samplers = range(len(shards.samplers))
    return np.concatenate([shards.sample(sampler, uniform) for sampler in samplers])
