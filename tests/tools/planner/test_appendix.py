"""The paper's appendix, symbol by symbol, against the model and against what it should say.

``right_…`` is derived in docs/planner.md, which has the printed formulas beside it. Symbols as
there: L layers, C time of one layer for the tokens of one microbatch on one device, N devices, a
launch delay, q bytes of one microbatch's hidden states, B1 and B2 bandwidths inside and between
hosts.
"""

import dataclasses
import math

import pytest
from tests.tools.planner.planned import GivenCosts

from sipipe.tools.planner import hardware
from sipipe.tools.planner.pipeline import iterate
from sipipe.tools.planner.placement import place
from sipipe.tools.planner.workload import Microbatch

L, C, A, Q, B1, B2 = 80, 1.0e-3, 10e-6, 2.0e6, 360e9, 44e9
PER_HOST = 8


def all_reduce(ranks, bandwidth):
    return 0.0 if ranks == 1 else A * math.log2(ranks) + 2 * (ranks - 1) / ranks * Q / bandwidth


def right_stage(p, t):
    """Seconds of one microbatch on one stage, hand-over included, blocking on both sides."""
    reduce = all_reduce(t, B1 if t <= PER_HOST else B2)
    return L * C / (p * t) + 2 * L / p * reduce


def right_hops(p, t):
    """p - 1 hops, of which those between the hosts' last and first stages cross."""
    crossing = max(0, p * t // PER_HOST - 1) if t <= PER_HOST else 0
    return crossing * Q / B2 + (p - 1 - crossing) * Q / B1


def loop(p, t, inflight=None):
    """The planner's loop with nothing but computation, all-reduce and hops."""
    ideal = dataclasses.replace(hardware.engine("sipipe"), variation=0.0, exposed=1.0)
    placement = place(L, p, t, PER_HOST)
    costs = GivenCosts([right_stage(p, t)] * p)
    costs.hop = lambda stage, work: 0.0 if stage.is_last else Q / (B2 if stage.crosses else B1)
    work = Microbatch(batch=64, tokens=64, context=100)
    return iterate(costs, ideal, placement, work, inflight=inflight or p, samplers=1)


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
def test_delay_of_one_pass(p):
    """D(p, t) = L C / t + 2 L (all-reduce among t) + hops: the round trip of the loop."""
    t = 16 // p
    expected = L * C / t + 2 * L * all_reduce(t, B1 if t <= 8 else B2) + right_hops(p, t)
    found = loop(p, t)
    assert found.stations["round trip"] * found.inflight == pytest.approx(expected)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_throughput_with_one_microbatch_more_than_stages(p):
    """T(p, t) = (b/m) / stage once the hops are hidden by a microbatch more."""
    found = loop(p, 16 // p, inflight=p + 1)
    assert found.period == pytest.approx(right_stage(p, 16 // p))


def test_delay_is_not_the_reciprocal_of_throughput():
    """Slip 4: D = b / T. One over T is the time per token of the whole deployment."""
    found = loop(4, 4)
    throughput = found.microbatch.batch / found.period
    assert found.delay == pytest.approx(4 * found.microbatch.batch / throughput)


def test_hops_of_a_hybrid_are_p_minus_one_and_not_n_minus_one():
    """Slip 5: the printed D counts (n - 1) + (N - n) = N - 1 hops for any p."""
    placement = place(L, 4, 4, PER_HOST)
    crossing = placement.crossings
    inside = len(placement.stages) - 1 - crossing
    assert (crossing, inside) == (1, 2)
    assert place(L, 16, 1, PER_HOST).crossings == 1  # pure pipeline: N - 1 hops, as printed
