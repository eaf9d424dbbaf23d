"""Communication volume and time, and the paper's claim about doubling the pipeline."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tools.planner.planned import make_cluster

from sipipe.tools.planner.costs import all_reduce_seconds, hop_seconds, volume_per_device
from sipipe.tools.planner.placement import place

degrees = st.sampled_from([1, 2, 4, 8, 16, 32])


@given(st.integers(8, 200), degrees, st.sampled_from([2, 4, 8, 16, 32]))
def test_doubling_the_pipeline_more_than_halves_the_volume(layers, p, t):
    """C(p, t) > 2 C(2p, t/2) wherever p^2 t < 4N, as the paper says; in fact wherever p t < 4N."""
    once = volume_per_device(layers, 1, 1, p, t)
    twice = 2 * volume_per_device(layers, 1, 1, 2 * p, t // 2)
    if p * p * t < 4 * layers:
        assert once > twice
    assert (once > twice) == (p * t < 4 * layers) or once == pytest.approx(twice)


def test_volume_counted_message_by_message():
    """The formula against an enumeration of every send of every device."""
    layers, hidden, tokens, p, t = 24, 64, 10, 4, 4
    sent = np.zeros((p, t))
    for stage in range(p):
        for _ in range(2 * layers // p):
            # ring: t - 1 reduce-scatter and t - 1 all-gather steps of 1/t of the message
            sent[stage] += 2 * (t - 1) * tokens * hidden / t
        if stage < p - 1:
            sent[stage] += tokens * hidden
    assert sent.mean() == pytest.approx(volume_per_device(layers, hidden, tokens, p, t))


CLUSTER = make_cluster(hosts=2)


def test_all_reduce_against_published_measurements():
    """nccl-tests issue 319 (two hosts, 32 MiB) and sglang PR 2904 (vLLM's, 8 ranks, 1 MiB)."""
    across = place(64, 1, 16, 8).stages[0]
    inside = place(64, 2, 8, 8).stages[0]
    assert all_reduce_seconds(CLUSTER, across, 32 * 2**20) == pytest.approx(1543e-6, rel=0.05)
    assert all_reduce_seconds(CLUSTER, across, 64 * 2**20) == pytest.approx(3099e-6, rel=0.10)
    assert all_reduce_seconds(CLUSTER, inside, 4096) == pytest.approx(9.3e-6, rel=0.1)
    assert all_reduce_seconds(CLUSTER, inside, 2**20) <= 46e-6


def test_all_reduce_limits():
    alone = place(64, 16, 1, 8).stages[0]
    assert all_reduce_seconds(CLUSTER, alone, 1e9) == 0.0
    inside, across = place(64, 2, 8, 8).stages[0], place(64, 1, 16, 8).stages[0]
    for size in (1e3, 1e6, 1e8):
        assert all_reduce_seconds(CLUSTER, across, size) > all_reduce_seconds(CLUSTER, inside, size)
    faster = all_reduce_seconds(make_cluster(hosts=2, adapters=8), across, 1e8)
    assert faster < all_reduce_seconds(CLUSTER, across, 1e8) / 5


def test_hops_cost_the_network_only_where_they_cross():
    stages = place(64, 4, 4, 8).stages
    local, crossing, _, last = (hop_seconds(CLUSTER, stage, 8e6) for stage in stages)
    assert crossing > 5 * local
    assert last == 0.0
    # Four ranks send 2 MB each at 360 GB/s, or together 8 MB at 44.3 GB/s of their host's adapter.
    assert local == pytest.approx(10e-6 + 2e6 / 360e9, rel=1e-12)
    assert crossing == pytest.approx(20e-6 + 8e6 / 44.3e9, rel=1e-12)
    alone = place(64, 16, 1, 8).stages[0]
    assert hop_seconds(CLUSTER, alone, 8e6) == pytest.approx(10e-6 + 8e6 / 360e9, rel=1e-12)
