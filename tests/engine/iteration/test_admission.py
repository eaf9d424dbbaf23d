"""Requests whose parameters no worker can have: nested too deep, or beyond what a float32 can be."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see make setup")

from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sipipe.engine.iteration.admission import MOST_NESTED, is_nested, refusal


def nested(depth, kinds):
    """A value with this many levels, of objects and lists in turn."""
    value = 1
    for level in range(depth):
        value = {"a": value, "b": 2} if kinds[level % len(kinds)] else [0, value]
    return value


def reason(params):
    request = SimpleNamespace(
        sampling_params=params,
        resumable=False,
        num_prompt_tokens=3,
        prompt_token_ids=[5, 6, 7],
        mm_features=None,
    )
    model = SimpleNamespace(max_model_len=64, runner_type="generate", skip_tokenizer_init=False)
    return refusal(request, None, SimpleNamespace(model_config=model))


@given(st.integers(0, 1200), st.lists(st.booleans(), min_size=1, max_size=4))
def test_what_is_served_can_be_pickled(depth, kinds):
    value = nested(depth, kinds)
    assert is_nested(value) == (depth > MOST_NESTED)
    for params in (
        SamplingParams(extra_args={"kv_transfer_params": value}),
        SamplingParams(structured_outputs=StructuredOutputsParams(json={"a": value})),
    ):
        if reason(params):
            assert depth >= MOST_NESTED
        else:
            pickle.dumps(params, 5)


def test_the_reason_names_the_parameter():
    deep = nested(900, [True])
    said = reason(SamplingParams(extra_args={"kv_transfer_params": deep}))
    assert said == (
        "its parameters (vllm_xargs, kv_transfer_params) are nested more than 500 levels deep"
    )
    assert not reason(SamplingParams())


@given(st.floats(0, 1, exclude_min=True) | st.floats(1, allow_infinity=False))
def test_logits_stay_numbers_under_a_penalty_that_is_served(penalty):
    """vLLM divides those above 0 and multiplies the others: infinity times 0 is no number."""
    if not reason(SamplingParams(repetition_penalty=penalty)):
        with np.errstate(over="raise"):
            assert np.isfinite(np.float32(1e4) / np.float32(penalty))
            assert np.isfinite(np.float32(1e4) * np.float32(penalty))
