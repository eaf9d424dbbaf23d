"""Broken rows fail alone; wrong arguments say what is wrong."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from tests.sampler.support import bitmask

from sipipe.messages.params import SequenceParams
from sipipe.sampler.state import SequenceColumns
from sipipe.sampling import sample

V = 600


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "NaN"), (np.inf, r"\+inf"), (-np.inf, "no token is left")]
)
@pytest.mark.parametrize("where", [0, 300, V - 1])
@pytest.mark.parametrize(
    "params",
    [
        SequenceParams(temperature=0.0),
        SequenceParams(),
        SequenceParams(top_k=5),
        SequenceParams(top_p=0.5, repetition_penalty=1.2),
    ],
    ids=["greedy", "temperature", "top_k", "top_p"],
)
def test_a_broken_row_fails_alone(value: float, message: str, where: int, params) -> None:
    matrix = np.random.default_rng(0).normal(size=(3, V)).astype(np.float32)
    good = matrix.copy()
    matrix[1] = value if value == -np.inf else matrix[1]
    matrix[1, where] = value
    columns = SequenceColumns(V)
    for handle in range(3):
        columns.join(handle, params, [1, 2, where])
    result = columns.sample([0, 1, 2], matrix)
    assert list(result.errors) == [1]
    with pytest.raises(ValueError, match=message):
        raise ValueError(result.errors[1])
    assert result.token_ids[1] == -1
    fine = columns.sample([0, 1, 2], good)
    assert not fine.errors
    np.testing.assert_array_equal(result.token_ids[[0, 2]], fine.token_ids[[0, 2]])
    with pytest.raises(ValueError, match=f"sequence 1: .*{message}"):
        sample(matrix, params, prompt_token_ids=[[1, 2, where]] * 3)


@pytest.mark.parametrize(
    "mask",
    [
        {"allowed_token_ids": [417]},
        {"bad_words_token_ids": [[t] for t in range(V) if t != 417]},
        {"min_tokens": 3, "all_stop_token_ids": [t for t in range(V) if t != 417]},
        {},
        None,
    ],
    ids=["allow list", "bad words", "min tokens", "grammar", "logits"],
)
def test_all_but_one_masked(mask: dict | None) -> None:
    row = np.random.default_rng(0).normal(size=(1, V)).astype(np.float32)
    allowed = np.arange(V) == 417
    if mask is None:
        row[0, ~allowed] = -np.inf
    for given in (
        {},
        {"temperature": 0.0},
        {"top_k": 3, "top_p": 0.2, "min_p": 0.5},
        {"top_p": 0.1},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0},
    ):
        columns = SequenceColumns(V)
        columns.join(0, SequenceParams(**(mask or {}), **given), range(V), [1, 417])
        options = {"bitmask": bitmask(allowed)} if mask == {} else {}
        assert columns.sample([0], row, **options).token_ids.tolist() == [417]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", math.nan),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logprobs", -2),
        ("min_tokens", -1),
        ("min_tokens", 2**64),
        ("thinking_token_budget", -1),
        ("bad_words_token_ids", [[]]),
        ("logit_bias", {1: math.inf}),
    ],
)
def test_parameters_name_the_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SequenceParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {V: 1.0}),
        ("logprob_token_ids", [V]),
        ("allowed_token_ids", [-1]),
        ("all_stop_token_ids", [-3]),
        ("bad_words_token_ids", [[1, -1]]),
    ],
)
def test_token_ids_are_checked_against_the_vocabulary(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}: token ids .* vocabulary of {V}"):
        SequenceColumns(V).join(0, SequenceParams(**{field: value}))


def test_parameters_travel() -> None:
    params = SequenceParams(top_k=3, logit_bias={4: 1.5}, bad_words_token_ids=[[1, 2]], seed=2**63)
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SequenceParams) == params
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"top_p": 7.0}), type=SequenceParams)


PENALTY = SequenceParams(repetition_penalty=1.5)


def test_wrong_arguments() -> None:
    columns = SequenceColumns(V)
    columns.join(0, SequenceParams())
    row = np.zeros((1, V), np.float32)
    for call, message in (
        (lambda: columns.sample([0], row[0]), "2 dimensions"),
        (lambda: columns.sample([0], row[:, :-1]), "fewer than vocab_size"),
        (lambda: columns.sample([0], row, [1]), r"rows must be in \[0, 1\)"),
        (lambda: columns.sample([0], row, [0, 0]), "rows: 2 for 1"),
        (lambda: columns.sample([0], np.zeros((V, 2), np.float32).T), "contiguous"),
        (lambda: columns.sample([0], row, bitmask=np.zeros((1, 2), np.int32)), "bitmask"),
        (lambda: columns.append([0], [V]), "token_ids"),
        (lambda: columns.join(1, SequenceParams(), (), [V]), "output_token_ids"),
        (lambda: columns.join(1, SequenceParams(), (), [2**31]), "output_token_ids"),
        (lambda: columns.join(1, SequenceParams(), (), np.array([2**32 + 5])), "output_token_ids"),
        (lambda: columns.join(1, PENALTY, [-(2**40)]), "prompt_token_ids"),
        (lambda: SequenceColumns(0), "vocab_size"),
        (lambda: SequenceColumns(3, logprobs_mode="raw"), "logprobs_mode"),
        (lambda: sample(row, [SequenceParams()] * 2), "params: 2 for 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="float64"):
        columns.sample([0], row.astype(np.float64))
