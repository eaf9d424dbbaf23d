"""Bias, bans, grammars, min tokens, thinking: against the naive twin and vLLM's own state."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tests.sampler.support import bitmask
from tests.sampler.test_filters import logits

from sipipe.messages.params import SequenceParams
from sipipe.sampler.options import ThinkingBudget
from sipipe.sampler.state import SequenceColumns

V = 600


def greedy(row: np.ndarray, params: SequenceParams, output=(), prompt=(), **options) -> int:
    columns = SequenceColumns(V, **options.pop("state", {}))
    columns.join(0, params, prompt, output)
    result = columns.sample([0], row.reshape(1, -1), **options)
    assert not result.errors
    return int(result.token_ids[0])


def mask(*tokens: int) -> np.ndarray:
    return bitmask(np.isin(np.arange(V), tokens))


def test_a_grammar_that_can_only_stop_overrides_min_tokens() -> None:
    row = logits("zipf", V)
    params = SequenceParams(temperature=0.0, min_tokens=9, all_stop_token_ids=[4, 5])
    assert greedy(row, params, bitmask=mask(4, 5)) == (4 if row[4] >= row[5] else 5)
    assert greedy(row, params, bitmask=mask(4, 5, 6)) == 6
    banned = SequenceParams(
        temperature=0.0, min_tokens=9, all_stop_token_ids=[4, 5], bad_words_token_ids=[[4]]
    )
    assert greedy(row, banned, bitmask=mask(4, 5)) == 5


def test_prompt_tokens_behind_the_vocabulary_are_no_ones() -> None:
    """Those that stand for an image in some models; vLLM's penalties do not see them either."""
    row = np.zeros(V, np.float32)
    row[[3, 4]] = 1.0, 0.9
    params = SequenceParams(temperature=0.0, repetition_penalty=2.0)
    assert greedy(row, params, prompt=[3, V, V + 7]) == 4
    with pytest.raises(ValueError, match="prompt_token_ids"):
        greedy(row, params, prompt=[-1])


def test_min_tokens_end() -> None:
    row = np.zeros(V, np.float32)
    row[9] = 1
    params = SequenceParams(temperature=0.0, min_tokens=2, all_stop_token_ids=[9])
    assert [greedy(row, params, [1] * n) for n in range(4)] == [0, 0, 9, 9]


def test_what_the_model_cannot_draw_need_not_be_ruled_out() -> None:
    """A tokenizer may have tokens that the model has not: vLLM lets them be bad words, and ends."""
    row = np.zeros(V, np.float32)
    row[[3, 4, 5]] = 3.0, 2.0, 1.0
    params = SequenceParams(
        temperature=0.0,
        bad_words_token_ids=[[V], [1, V + 7], [V, 3], [3]],
        min_tokens=2,
        all_stop_token_ids=[4, V, V + 100],
    )
    assert greedy(row, params, [1]) == 5
    assert greedy(row, params, [1, 1]) == 4


def test_a_token_that_the_model_has_not_is_not_forced() -> None:
    """It would be written behind the mask."""
    params = SequenceParams(temperature=0.0, thinking_token_budget=0)
    row = logits("zipf", V)
    reasoning = {"reasoning_start_token_ids": [7], "reasoning_end_token_ids": [8, V]}
    with pytest.raises(ValueError, match=f"thinking_token_budget: token ids .{V}. are outside"):
        greedy(row, params, prompt=[7], state=reasoning)
    reasoning["reasoning_start_token_ids"] = [V + 1]  # thinking cannot begin
    assert greedy(row, params, prompt=[7], state=reasoning) == row.argmax()


def test_bad_words_follow_the_output() -> None:
    row = np.zeros(V, np.float32)
    row[3] = 1
    columns = SequenceColumns(V)
    params = SequenceParams(temperature=0.0, bad_words_token_ids=[[1, 2, 3], [8]])
    columns.join(0, params, [1, 2])  # the prompt does not count
    drawn = []
    for token in (1, 2, 2, 1, 2):
        drawn.append(int(columns.sample([0], row.reshape(1, -1)).token_ids[0]))
        columns.append(0, token)
    drawn.append(int(columns.sample([0], row.reshape(1, -1)).token_ids[0]))
    assert drawn == [3, 3, 0, 3, 3, 0]


def test_long_lists_travel_as_bytes() -> None:
    vocab = 5000
    rng = np.random.default_rng(0)
    bias = dict(
        zip(rng.permutation(vocab)[:3000].tolist(), rng.normal(size=3000).tolist(), strict=True)
    )
    bias |= {7: -np.inf, 9: 3}
    allowed = rng.permutation(vocab)[:4000].tolist()
    row = logits("zipf", vocab).reshape(1, -1)
    found = []
    for given in (
        SequenceParams(logit_bias=bias, allowed_token_ids=allowed),
        SequenceParams.of(SimpleNamespace(logit_bias=bias, allowed_token_ids=allowed)),
    ):
        params = msgspec.structs.replace(given, logprobs=-1, repetition_penalty=1.2, seed=3)
        travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SequenceParams)
        assert travelled == params
        columns = SequenceColumns(vocab, logprobs_mode="processed_logits")
        columns.join(0, travelled, range(0, vocab, 3))
        found.append(columns.sample([0], row).logprobs[0])
    assert isinstance(given.logit_bias, tuple)
    assert isinstance(given.allowed_token_ids, bytes)
    np.testing.assert_array_equal(found[0].token_ids, found[1].token_ids)
    np.testing.assert_array_equal(found[0].logprobs, found[1].logprobs)
    for field, value in (
        ("logit_bias", (b"1234", bytes(4))),
        ("logit_bias", (b"1234", np.array([np.inf]).tobytes())),
        ("allowed_token_ids", b"123"),
    ):
        with pytest.raises(ValueError, match=field):
            SequenceParams(**{field: value})
    for field, value in (("allowed_token_ids", [2**40] * 2000), ("logit_bias", {"a": 1.0} | bias)):
        with pytest.raises(ValueError, match=field):
            SequenceParams.of(SimpleNamespace(**{field: value}))
    with pytest.raises(ValueError, match=r"allowed_token_ids: token ids .* vocabulary"):
        SequenceColumns(5).join(0, SequenceParams(allowed_token_ids=np.int32(5).tobytes()))


@pytest.mark.parametrize("natural", [[8], [8, 9]])
def test_what_a_model_ends_its_thinking_with_is_not_what_is_forced(natural: list[int]) -> None:
    """As with a ``reasoning_end_str`` that has a phrase before the model's own end."""
    budget = ThinkingBudget(3, [7], [20, *natural], natural, [7])
    for token in (1, *natural, 2, 3, 4, 5):
        assert budget.forced == -1
        budget.observe(token)
    assert not budget.thinking
    assert not ThinkingBudget(0, [7], [20, *natural], natural, [7, 1, *natural]).thinking
    used_up = ThinkingBudget(1, [7], [20, *natural], natural, [7])
    used_up.observe(1)
    for token in (20, *natural, -1):
        assert used_up.forced == token
        used_up.observe(token)


def test_force_is_stronger_than_any_mask() -> None:
    """As in vLLM, whose thinking budget comes last."""
    reasoning = {"reasoning_start_token_ids": [7], "reasoning_end_token_ids": [8]}
    row = logits("zipf", V)
    for given in ({}, {"temperature": 0.0}, {"top_p": 0.5, "repetition_penalty": 1.5}):
        params = SequenceParams(
            thinking_token_budget=0, bad_words_token_ids=[[8]], logit_bias={8: -50.0}, **given
        )
        options = {"state": reasoning, "bitmask": mask(3, 4)}
        assert greedy(row, params, prompt=[7], **options) == 8
        assert greedy(np.full(V, -np.inf, np.float32), params, prompt=[7], state=reasoning) == 8


@pytest.mark.engine
@pytest.mark.parametrize("budget", [0, 1, 3, 6])
@pytest.mark.parametrize("end", [[8], [8, 9]])
@pytest.mark.parametrize("prompt", [[1, 2], [1, 7], [7, 1, 2, 3], [7, 1, 8, 9, 5]])
def test_thinking_budget_against_vllm(budget: int, end: list, prompt: list) -> None:
    """Random streams that obey what is forced, as a sampler's do."""
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    config = SimpleNamespace(reasoning_start_token_ids=[7], reasoning_end_token_ids=end)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        holder = ThinkingBudgetStateHolder(config, 4, 0, torch.device("cpu"), False)
        output: list[int] = []
        params = SimpleNamespace(thinking_token_budget=budget)
        holder.sync_batch(
            SimpleNamespace(removed=[], added=[(0, params, prompt, output)], moved=[])
        )
        ours = ThinkingBudget(budget, [7], end, [], prompt)
        thinking = ours.thinking
        for _ in range(30):
            holder.update_state([output], None)
            forced = holder.apply_to_logits(torch.zeros(1, 20), False, None)[0]
            theirs = int(forced.argmax()) if forced.max() > 0 else -1
            assert ours.forced == theirs, (seed, output)
            choices = [1, 2, 3, 7] + ([8] if thinking and len(end) == 1 else [])
            token = theirs if theirs >= 0 else int(rng.choice(choices))
            output.append(token)
            ours.observe(token)
            thinking = ours.thinking


def test_biases_of_a_token_that_the_bytes_name_twice_are_added() -> None:
    ids, values = np.array([9, 2, 9, 2], "<i4"), np.array([3.0, 1.0, 2.0, -np.inf], "<f8")
    twice = SequenceParams(logit_bias=(ids.tobytes(), values.tobytes()), logprobs=-1, seed=1)
    once = msgspec.structs.replace(twice, logit_bias={9: 5.0, 2: -np.inf})
    found = []
    for params in (twice, once):
        columns = SequenceColumns(V, logprobs_mode="processed_logprobs")
        columns.join(0, params)
        found.append(columns.sample([0], logits("zipf", V).reshape(1, -1)).logprobs[0])
    np.testing.assert_array_equal(found[0].token_ids, found[1].token_ids)
    np.testing.assert_array_equal(found[0].logprobs, found[1].logprobs)
