"""The closed-loop period against a simulation, limits of the loop, and the bubble account."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tools.planner.planned import GivenCosts, make_cluster

from sipipe.tools.planner import hardware
from sipipe.tools.planner.costs import _flops_per_context, datasheet_costs, roofline
from sipipe.tools.planner.models import load_model
from sipipe.tools.planner.pipeline import iterate
from sipipe.tools.planner.placement import place
from sipipe.tools.planner.workload import Microbatch, Workload


def simulate(stations, inflight, rounds=400):
    """Microbatches pass the stations in order, one at a time each, then begin again: event times.

    A station is (seconds, exclusive): a delay such as a hop takes any number at once.
    """
    free = [0.0] * len(stations)
    ready = [0.0] * inflight
    ends = []
    for number in range(rounds * inflight):
        time = ready[number % inflight]
        for index, (seconds, exclusive) in enumerate(stations):
            begin = max(time, free[index]) if exclusive else time
            time = begin + seconds
            if exclusive:
                free[index] = time
        ready[number % inflight] = time
        ends.append(time)
    half = len(ends) // 2
    return (ends[-1] - ends[half - 1]) / (len(ends) - half)


time = st.floats(0.1, 10.0)
WORK = Microbatch(batch=8, tokens=8, context=100)


@settings(max_examples=30, deadline=None)
@given(st.lists(time, min_size=1, max_size=6), time, time, time, time, st.integers(1, 8))
def test_sipipe_period_is_that_of_the_simulated_loop(
    forwards, sampling, scheduling, preparing, hop, inflight
):
    p = len(forwards)
    costs = GivenCosts(forwards, sampling, scheduling, preparing, hop)
    found = iterate(
        costs, hardware.engine("sipipe"), place(8, p, 1, 8), WORK, inflight=inflight, samplers=1
    )
    stations = [(scheduling, True), (preparing, True)]
    for index, forward in enumerate(forwards):
        stations += [(forward, True), (hop if index < p - 1 else 0.0, False)]
    stations += [(0.0, True), (sampling, True)]
    assert found.period == pytest.approx(simulate(stations, inflight), rel=0.02)


@settings(max_examples=30, deadline=None)
@given(st.lists(time, min_size=1, max_size=6), time, time, time)
def test_stock_period_is_that_of_the_simulated_loop(forwards, sampling, scheduling, preparing):
    """Preparation and sampling on the device's path; hops left out, which block both sides."""
    p = len(forwards)
    engine = dataclasses.replace(hardware.engine("vllm"), variation=0.0)
    costs = GivenCosts(forwards, sampling, scheduling, preparing)
    found = iterate(costs, engine, place(8, p, 1, 8), WORK, inflight=p, samplers=1)
    stations = [(scheduling, True), *((forward + preparing, True) for forward in forwards)]
    seconds, _ = stations[-1]
    stations[-1] = (seconds + sampling, True)
    assert found.period == pytest.approx(simulate(stations, p), rel=0.02)


def test_bubbles_and_busy_time_add_up():
    engine = hardware.engine("vllm")
    costs = GivenCosts([3.0, 4.0, 5.0], 2.0, 0.5, 1.0, 0.2)
    found = iterate(costs, engine, place(9, 3, 1, 8), WORK, inflight=3, samplers=1)
    busy = sum(costs.forwards) / 3 / found.period
    assert found.idle + busy == pytest.approx(1.0)
    assert found.delay == 3 * found.period


def test_a_known_pipeline_by_hand():
    """Two stages of 4, sampling 2 on the last stage's device: 2 of 6 lost on it, 2 on the first."""
    engine = dataclasses.replace(hardware.engine("vllm"), variation=0.0, exposed=0.0)
    costs = GivenCosts([4.0, 4.0], sampling=2.0)
    found = iterate(costs, engine, place(8, 2, 1, 8), WORK, inflight=3, samplers=1)
    assert found.period == 6.0
    assert found.bubbles["load_imbalance"] == pytest.approx(1 / 3)
    assert found.idle == pytest.approx(1 / 3)
    ours = iterate(
        costs, hardware.engine("sipipe"), place(8, 2, 1, 8), WORK, inflight=3, samplers=1
    )
    assert ours.period == 4.0
    assert ours.idle == 0.0


def test_samplers_are_never_faster_than_the_memory_that_they_share():
    facts = load_model("llama-3.1-70b")
    costs = datasheet_costs(facts, make_cluster(), Workload())
    assert costs.host_sampling(WORK, 1) > costs.host_sampling(WORK, 8)
    bound = WORK.batch * facts.vocabulary * costs.sampling.host_bytes / costs.sampling.host_gbs
    assert costs.host_sampling(WORK, 8) >= bound * 1e-9
    slow = dataclasses.replace(costs.sampling, host_gbs=1.0)
    slowed = dataclasses.replace(costs, sampling=slow)
    assert slowed.host_sampling(WORK, 8) == pytest.approx(bound * costs.sampling.host_gbs * 1e-9)


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_soft_roofline_lies_between_the_larger_and_the_sum(a, b):
    found = roofline(a, b, 3.0)
    assert max(a, b) <= found <= min(a + b, max(a, b) * 2 ** (1 / 3) + 1e-12)
    assert roofline(a, 0.0, 3.0) == a


def test_flops_of_attention_counted_from_its_products():
    """Two for each element of a query, and of a value, and each token that is attended to."""
    heads, latent, turned, plain, value = 128, 512, 64, 128, 128  # DeepSeek-V3's
    mla = load_model("deepseek-v3").attention
    assert _flops_per_context(mla, decode=True) == 2 * heads * ((latent + turned) + latent)
    assert _flops_per_context(mla, decode=False) == 2 * heads * ((plain + turned) + value)
    for decode in (True, False):
        found = _flops_per_context(load_model("llama-3.1-70b").attention, decode=decode)
        assert found == 2 * 64 * (128 + 128)
