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

from sipipe.engine.iteration.admission import (
    MOST_NESTED,
    bound_counts,
    is_nested,
    leave_out_unknown_tokens,
    refusal,
    refusal_of_sampler,
)


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


@pytest.mark.parametrize(
    ("rows", "start"), [(1, None), (2, None), (3, None), (1, 1), (2, 1), (0, 9)]
)
def test_a_prompt_is_scored_by_as_many_rows_as_it_has_tokens_to_score(rows, start):
    """The prompt has 3 tokens, of which the first is not scored. A worker would end at another number."""
    ids = np.zeros((rows, 2), np.int32)
    params = SamplingParams(prompt_logprob_token_ids=ids, prompt_logprob_start=start)
    assert (reason(params) == "") == (rows == max(2 - (start or 0), 0))


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 2**64 - 1, -(2**63)])
def test_a_seed_has_64_bits(seed):
    """With or without a sign, as torch's generators take them."""
    torch = pytest.importorskip("torch")
    try:
        torch.Generator().manual_seed(seed)
    except (RuntimeError, ValueError):
        assert reason(SamplingParams(seed=seed)) == f"seed {seed} does not fit into 64 bits"
    else:
        assert not reason(SamplingParams(seed=seed))


@given(st.floats(0, 1, exclude_min=True) | st.floats(1, allow_infinity=False))
def test_logits_stay_numbers_under_a_penalty_that_is_served(penalty):
    """vLLM divides those above 0 and multiplies the others: infinity times 0 is no number."""
    if not reason(SamplingParams(repetition_penalty=penalty)):
        with np.errstate(over="raise"):
            assert np.isfinite(np.float32(1e4) / np.float32(penalty))
            assert np.isfinite(np.float32(1e4) * np.float32(penalty))


@pytest.mark.parametrize("count", [0, 5, 64, 65, 2**31 - 1, 2**31, 2**63, 10**30])
def test_a_count_of_tokens_fits_into_a_stages_tables(count):
    """vLLM's stages add it to the prompt's length, in 32 bits."""
    params = SamplingParams(min_tokens=count, max_tokens=max(count, 1))
    request = SimpleNamespace(sampling_params=params, max_tokens=params.max_tokens)
    bound_counts(request, 64)
    assert request.max_tokens == params.max_tokens == min(max(count, 1), 64)
    assert params.min_tokens == min(count, 64)
    np.zeros(1, np.int32)[0] = 64 + params.max_tokens + params.min_tokens


def test_what_the_model_has_not_is_written_to_no_other_requests_row():
    params = SamplingParams(stop_token_ids=[3, 99, 100], min_tokens=1)
    params._bad_words_token_ids = [[99], [100], [2, 100], [101, 2]]  # noqa: SLF001
    leave_out_unknown_tokens(SimpleNamespace(sampling_params=params), 100)
    assert params.bad_words_token_ids == [[99]]
    assert params.all_stop_token_ids == {3, 99}
    leave_out_unknown_tokens(SimpleNamespace(sampling_params=SamplingParams()), 100)
    leave_out_unknown_tokens(SimpleNamespace(sampling_params=None), 100)


@pytest.fixture(scope="module")
def tables():
    """The tables of parameters of vLLM's second sampler, for one request."""
    torch = pytest.importorskip("torch")
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    of_requests = SimpleNamespace(
        max_num_reqs=1,
        device=torch.device("cpu"),
        prompt_len=SimpleNamespace(np=np.ones(1, np.int32)),
    )
    kinds = (LogitBiasState, BadWordsState)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(buffer_utils, "is_uva_available", lambda: False)
        return [SamplingStates(1, 5000), *(kind(None, of_requests) for kind in kinds)]


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.5, "top_k": 10**6},
        {"allowed_token_ids": list(range(1024))},
        {"allowed_token_ids": list(range(1025))},
        {"logit_bias": dict.fromkeys(range(1024), 1.0)},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"stop_token_ids": list(range(128)), "min_tokens": 1},
        {"stop_token_ids": list(range(129)), "min_tokens": 1},
        {"stop_token_ids": list(range(129))},
        {"bad": [[1]] * 128},
        {"bad": [[1]] * 100_000},
        {"bad": [list(range(2000))] * 3},
        {"seed": 2**63 - 1},
        {"seed": 2**63},
        {"seed": -(2**63)},
        {"seed": -(2**63) - 1},
    ],
)
def test_what_a_table_of_vllms_sampler_has_no_room_for_is_refused(tables, given):
    """As the table says itself: in a worker, which it ends."""
    params = SamplingParams(**{name: value for name, value in given.items() if name != "bad"})
    if "bad" in given:
        params._bad_words_token_ids = given["bad"]  # noqa: SLF001
    said = refusal_of_sampler(SimpleNamespace(sampling_params=params))
    try:
        for table in tables:
            table.add_request(0, params)
    except (ValueError, OverflowError):
        assert said
    else:
        assert not said
