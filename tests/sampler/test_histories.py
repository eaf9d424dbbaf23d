"""Random histories against their twins: the sequence alone and rebuilt, and NumPy's order of steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampler import naive
from tests.sampler.support import bitmask, processed
from tests.sampler.test_filters import kept_equal, logits

from sipipe.messages.params import SequenceParams
from sipipe.sampler.state import SequenceColumns

V = 700
KINDS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {3: 2.5, 9: -np.inf, 11: 0.5}},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
    {"top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"min_p": 0.02, "bad_words_token_ids": [[1], [2, 3]], "logprobs": 3},
    {"top_k": 500, "min_tokens": 3, "all_stop_token_ids": [0, 1, 2]},
    {"allowed_token_ids": list(range(0, V, 3)), "frequency_penalty": 0.2},
    {"logprobs": -1, "repetition_penalty": 0.8},
    {"thinking_token_budget": 2},
]
REASONING = {"reasoning_start_token_ids": [7], "reasoning_end_token_ids": [8, 9]}


def found(result, i: int) -> tuple:
    """All that row ``i`` of a call gave, as bytes."""
    if i not in result.logprobs:
        return (int(result.token_ids[i]),)
    lp = result.logprobs[i]
    return (int(result.token_ids[i]), lp.rank, lp.token_ids.tobytes(), lp.logprobs.tobytes())


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_history_draws_as_the_sequence_alone(data: st.DataObject) -> None:
    """Joins, draws of any of them in any order, preemption, ends, and lost state."""
    mode = data.draw(st.sampled_from(["raw_logprobs", "processed_logprobs", "processed_logits"]))
    made = {"logprobs_mode": mode, **REASONING}
    columns = SequenceColumns(V, **made)
    texts: dict[int, tuple[SequenceParams, list[int], list[int]]] = {}
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for step in range(data.draw(st.integers(2, 10))):
        for _ in range(data.draw(st.integers(0, 3))):
            handle = len(texts)
            kind = data.draw(st.sampled_from(KINDS))
            params = SequenceParams(**kind, seed=int(rng.integers(2**63)))
            prompt = [*rng.integers(0, V, rng.integers(0, 300)).tolist(), 7]
            texts[handle] = (params, prompt, [])
            columns.join(handle, params, prompt)
        here = [handle for handle in texts if handle in columns]
        if here and data.draw(st.booleans()):
            columns.leave(handle := int(rng.choice(here)))
            here.remove(handle)
            if data.draw(st.booleans()):  # it was preempted
                columns.join(handle, *texts[handle])
                here.append(handle)
        if data.draw(st.integers(0, 5)) == 0:  # its sampler has died
            columns = SequenceColumns(V, **made)
            for handle in here:
                columns.join(handle, *texts[handle])
        drawn = rng.permutation(here)[: data.draw(st.integers(0, len(here)))].tolist()
        if not drawn:
            continue
        x = rng.normal(0, 2, (len(drawn), V)).astype(np.float32)
        masks = np.concatenate([bitmask(rng.random(V) < 0.6) for _ in drawn])
        rows = np.where(rng.random(len(drawn)) < 0.4, np.arange(len(drawn)), -1)
        result = columns.sample(drawn, x, bitmask=masks, bitmask_rows=rows)
        assert not result.errors
        for i, handle in enumerate(drawn):
            alone = SequenceColumns(V, **made)
            alone.join(0, *texts[handle])
            mask = {"bitmask": masks[i : i + 1]} if rows[i] >= 0 else {}
            twin = alone.sample([0], x[i : i + 1], **mask)
            assert found(result, i) == found(twin, 0), (step, texts[handle][0])
            texts[handle][2].append(int(result.token_ids[i]))
        columns.append(drawn, result.token_ids)


@pytest.mark.parametrize("seen", [1, 255, 256, 257, 2500])
@pytest.mark.parametrize("biased", [0, 1, 300, 2900])
@pytest.mark.parametrize("masked", [False, True])
def test_long_texts_with_masks_and_biases(seen: int, biased: int, masked: bool) -> None:
    """Seen tokens with and without a bias, and biased ones not seen, some behind a grammar."""
    size = 3000
    x = logits("zipf", size, seen)
    rng = np.random.default_rng(seen + biased)
    output = rng.permutation(size)[:seen].tolist()
    output += rng.choice(output, 50).tolist()
    biases = rng.choice([-3.0, 0.5, 2.0, -np.inf], biased)
    params = SequenceParams(
        temperature=0.8,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias=dict(zip(rng.permutation(size)[:biased].tolist(), biases.tolist(), strict=True)),
        allowed_token_ids=list(range(0, size, 2)) if masked else None,
        bad_words_token_ids=[[output[0]]],
    )
    allowed = rng.random(size) < 0.5 if masked else None
    x[7] = np.nan if masked and allowed is not None and not allowed[7] else x[7]
    theirs = naive.processed_logits(x, params, output[:5], output, allowed=allowed)
    ours = processed(
        x,
        params,
        prompt_token_ids=output[:5],
        output_token_ids=output,
        bitmask=None if allowed is None else bitmask(allowed),
    )
    kept_equal(ours, theirs)


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("shape", ["flat", "zipf", "tied"])
@pytest.mark.parametrize("size", [3000, 40_000])
@pytest.mark.parametrize("wanted", [0, 20, 2500, -1])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_scores_of_unfiltered_rows(
    mode: str, shape: str, size: int, wanted: int, temperature: float
) -> None:
    """Against NumPy's float32 steps, bit by bit up to one offset of the row; ties by token id."""
    x = logits(shape, size)
    rng = np.random.default_rng(size)
    output = rng.integers(0, size, 800).tolist()
    params = SequenceParams(
        temperature=temperature, repetition_penalty=1.2, logit_bias={5: 30.0, 6: -np.inf}, seed=3,
        logprobs=wanted, bad_words_token_ids=[[8]],
    )  # fmt: skip
    columns = SequenceColumns(size, logprobs_mode=mode)
    columns.join(0, params, output[:9], output)
    lp = columns.sample([0], x.reshape(1, -1)).logprobs[0]
    exact = naive.processed_logits(x, params, output[:9], output)
    scores = exact.astype(float)
    if mode.endswith("logprobs"):
        scores = naive.log_softmax(scores)
    np.testing.assert_allclose(lp.logprobs, scores[lp.token_ids], rtol=1e-5, atol=4e-6)
    best = np.lexsort((np.arange(size), -exact))[: len(lp.token_ids) - 1]
    np.testing.assert_array_equal(lp.token_ids[1:], best)
    least, most = (exact > exact[lp.token_ids[0]]).sum(), (exact >= exact[lp.token_ids[0]]).sum()
    own = lp.logprobs[0]  # logits that differ may have equal scores after rounding
    close = (np.abs(scores - own) <= 4e-6 * max(1.0, abs(own))).sum()
    assert least < lp.rank <= max(most, least + close)
