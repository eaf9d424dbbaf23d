"""What is encoded comes back; loads are shared by cost."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sipipe.messages.header import Kind, decode_header, encode_header
from sipipe.messages.params import SequenceParams
from sipipe.messages.step import (
    Added,
    Grammar,
    Logprobs,
    Sampled,
    Step,
    decode_grammar,
    decode_sampled,
    decode_step,
    encode,
    int32_bytes,
    int32_view,
)

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, TOKENS, st.integers(0, 2**40), st.booleans())
def test_a_step_comes_back(prompt, outputs, iteration, grammar):
    params = SequenceParams(temperature=0.5, seed=2**63, logit_bias={3: -1.0}, top_k=7)
    join = Added(12, 1, params, int32_bytes(prompt), int32_bytes(outputs))
    step = Step(
        iteration=iteration,
        removed=int32_bytes([1, 2]),
        added=[join],
        rows=int32_bytes([12]),
        owners=int32_bytes([1]),
        grammar=grammar,
    )
    found = decode_step(encode(step))
    assert found == step
    assert int32_view(found.added[0].prompt).tolist() == prompt
    assert int32_view(found.added[0].outputs).tolist() == outputs


def test_tokens_with_logprobs_and_errors_come_back():
    logprobs = Logprobs(0, 3, int32_bytes([5, 6]), np.array([-1.5, -2.0], "<f4").tobytes())
    sampled = Sampled(9, int32_bytes([0, 2]), int32_bytes([5, -1]), [logprobs], [(2, "NaN")])
    assert decode_sampled(encode(sampled)) == sampled
    grammar = Grammar(9, int32_bytes([12]), 2, int32_bytes([-1, 7]))
    assert decode_grammar(memoryview(encode(grammar))) == grammar


@given(st.sampled_from(list(Kind)), st.integers(0, 100), st.integers(0, 2**60))
def test_a_header_comes_back(kind, slot, number):
    header = decode_header(encode_header(kind, slot, number))
    assert (header.kind, header.slot, header.number) == (kind, slot, number)
