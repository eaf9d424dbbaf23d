"""What is encoded comes back; loads are shared by cost."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sipipe.engine.balance import Balancer
from sipipe.errors import DamagedError
from sipipe.messages.cost import cost_estimate
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

DAMAGED = settings(deadline=None)
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
    found = decode_step(encode(step), iteration)
    assert found == step
    assert int32_view(found.added[0].prompt).tolist() == prompt
    assert int32_view(found.added[0].outputs).tolist() == outputs


def test_tokens_with_logprobs_and_errors_come_back():
    logprobs = Logprobs(0, 3, int32_bytes([5, 6]), np.array([-1.5, -2.0], "<f4").tobytes())
    sampled = Sampled(9, int32_bytes([0, 2]), int32_bytes([5, -1]), [logprobs], [(2, "NaN")])
    assert decode_sampled(encode(sampled), 9) == sampled
    grammar = Grammar(9, int32_bytes([12]), 2, int32_bytes([-1, 7]))
    assert decode_grammar(memoryview(encode(grammar)), 9) == grammar
    with pytest.raises(DamagedError, match="a bitmask is damaged: it names iteration 9, not 8"):
        decode_grammar(encode(grammar), 8)


@given(st.sampled_from(list(Kind)), st.integers(0, 100), st.integers(0, 2**60))
def test_a_header_comes_back(kind, slot, number):
    header = decode_header(encode_header(kind, slot, number))
    assert (header.kind, header.slot, header.number) == (kind, slot, number)


PARAMS = st.sampled_from(
    [
        SequenceParams(temperature=0.0),
        SequenceParams(),
        SequenceParams(top_p=0.9),
        SequenceParams(top_k=50, top_p=0.95, repetition_penalty=1.1),
    ]
)


@given(st.lists(PARAMS, min_size=1, max_size=60), st.integers(1, 5))
def test_loads_stay_within_one_sequence_of_each_other(arrivals, samplers):
    balancer = Balancer(samplers, vocab_size=151_936)
    dearest = max(cost_estimate(p, 151_936) for p in arrivals)
    beside = balancer.loads([])
    placed = [(balancer.place(params, beside), params) for params in arrivals]
    assert beside == pytest.approx(balancer._load)
    assert balancer.loads(placed) == pytest.approx(beside)
    assert max(balancer._load) - min(balancer._load) <= dearest * (1 + 1e-9)
    for sampler, params in placed:
        balancer.remove(sampler, params)
    assert balancer._load == [0.0] * samplers


@given(st.lists(st.lists(PARAMS, max_size=24), min_size=1, max_size=6), st.integers(1, 8))
def test_every_microbatch_is_shared_out_evenly(microbatches, samplers):
    """Whatever the others hold: an iteration is drawn when its last sampler is done."""
    balancer = Balancer(samplers, vocab_size=151_936)
    for arrivals in microbatches:
        beside = balancer.loads([])
        for params in arrivals:
            balancer.place(params, beside)
        dearest = max((cost_estimate(p, 151_936) for p in arrivals), default=0.0)
        assert max(beside) - min(beside) <= dearest * (1 + 1e-9)


@DAMAGED
@given(st.binary(min_size=14, max_size=18))
def test_a_damaged_header_is_called_so(data):
    with suppress(DamagedError):
        assert encode_header(*decode_header(data))[:1] == data[:1]


@DAMAGED
@given(st.data(), st.sampled_from([decode_step, decode_grammar, decode_sampled]))
def test_damaged_structures_are_called_so(data, decode):
    join = Added(12, 1, SequenceParams(temperature=0.5, logit_bias={3: -1.0}), int32_bytes([1, 2]))
    whole = encode(
        {
            decode_step: Step(iteration=7, added=[join], rows=int32_bytes([12])),
            decode_grammar: Grammar(7, int32_bytes([12]), 4, bytes(16)),
            decode_sampled: Sampled(7, int32_bytes([0]), int32_bytes([9]), errors=[(0, "why")]),
        }[decode]
    )
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DamagedError):
        decode(bytes(changed[: data.draw(st.integers(0, len(whole)))]), 7)
