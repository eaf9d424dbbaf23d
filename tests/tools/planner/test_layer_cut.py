"""Layers per stage: the shortest slowest stage, and vLLM's cut wherever that is as good."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sipipe.engine.layers.cut import (
    NO_DRAFTING,
    Drafting,
    _shortest,
    cut_layers,
    kv_lost,
    layer_split,
    speed_up,
)
from sipipe.tools.planner.models import load_model


def every_cut(layers, p):
    for ends in itertools.combinations(range(1, layers), p - 1):
        bounds = (0, *ends, layers)
        yield tuple(end - first for first, end in itertools.pairwise(bounds))


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(0, 80), st.integers(1, 5))
def test_no_cut_has_a_shorter_slowest_stage(costs, projection, p):
    if p > len(costs):
        return

    def slowest(layers):
        rest = list(costs)
        times = [sum(rest.pop(0) for _ in range(count)) for count in layers]
        times[-1] += projection
        return max(times)

    found = _shortest(
        [float(cost) for cost in costs], [1.0] * p, float(projection), len(costs), range(len(costs))
    )
    assert len(found) == p
    assert sum(found) == len(costs)
    assert min(found) >= 1
    assert slowest(found) == min(map(slowest, every_cut(len(costs), p)))


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "mixtral-8x7b"]
)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_large_layers_are_cut_as_vllm_does(name, p, device):
    facts = load_model(name)
    assert cut_layers(facts, p, device=device) == layer_split(facts.layers, p)


def test_a_large_vocabulary_takes_layers_from_the_last_stage():
    facts = load_model("qwen2.5-0.5b")
    assert cut_layers(facts, 2, device="cpu") == (14, 10)
    assert sum(cut_layers(facts, 8, device="cpu")) == 24


def test_a_draft_head_takes_layers_from_the_last_stage():
    """Three drafts are three passes over a layer and the projection, beside ten layers."""
    facts = load_model("llama-3.1-70b")
    assert cut_layers(facts, 8) == (10,) * 8
    cut = cut_layers(facts, 8, drafting=Drafting(drafts=3))
    *others, last = cut
    assert last in (6, 7)
    assert sum(others) + last == facts.layers
    assert cut_layers(facts, 1, drafting=Drafting(drafts=3)) == (facts.layers,)
    assert kv_lost(facts, cut) == pytest.approx(1 / 11)
    assert not kv_lost(facts, cut, drafting=Drafting(drafts=3)), "its cache is a layer of the last"


def test_a_draft_model_takes_as_many_layers_as_it_is_large():
    """One of all its layers: a small one costs the last stage less than a large one does."""
    facts = load_model("llama-3.1-70b")
    cuts = [
        cut_layers(facts, 8, drafting=Drafting(drafts=2, model=load_model(name)))
        for name in ("qwen2.5-0.5b", "llama-3.1-8b")
    ]
    assert all(sum(cut) == facts.layers for cut in cuts)
    assert cuts[0][-1] > cuts[1][-1]


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3.1-8b", "llama-3.1-70b"])
@pytest.mark.parametrize("allowed", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_where_no_cut_pays_for_a_head_it_is_as_without(name, allowed, device):
    """Beside so large a head an even cut is hardly slower: but with many requests it makes no drafts."""
    facts = load_model(name)
    drafting = Drafting(drafts=3)
    plain = cut_layers(facts, 2, device=device, kv_loss=allowed)
    cut = cut_layers(facts, 2, device=device, kv_loss=allowed, drafting=drafting)
    with_drafts = speed_up(facts, plain, cut, device=device, drafting=drafting)
    without = speed_up(facts, plain, cut, device=device)
    assert without >= 1 or (device == "gpu" and with_drafts > 1)
    if (name, device) == ("qwen2.5-0.5b", "cpu"):
        assert cut != layer_split(facts.layers, 2), "its head's cache leaves room for a layer"


def test_dense_layers_of_a_sparse_model_count_for_less():
    facts = load_model("deepseek-v3")  # its first three layers are dense
    first, *_, last = cut_layers(facts, 4)
    assert first > last


@pytest.mark.parametrize(("name", "p"), [("qwen2.5-0.5b", 2), ("llama-3.1-8b", 4), ("qwen3-4b", 8)])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("memory", [math.inf, 24e9])
@pytest.mark.parametrize("allowed", [0.0, 0.1, 0.2, 0.5])
def test_no_more_of_the_cache_is_given_up_than_allowed(name, p, device, memory, allowed):
    facts = load_model(name)
    for drafting in (
        Drafting(drafts=3),
        Drafting(drafts=2, model=load_model("qwen2.5-0.5b")),
        NO_DRAFTING,
    ):
        cut = cut_layers(facts, p, device=device, kv_loss=allowed, memory=memory, drafting=drafting)
        assert kv_lost(facts, cut, memory=memory, drafting=drafting) <= allowed + 1e-9
    freely = cut_layers(facts, p, device=device, memory=memory)
    assert speed_up(facts, cut, freely, device=device) >= 1
    if kv_lost(facts, freely, memory=memory) <= allowed:
        assert cut == freely


def test_what_a_cut_costs():
    facts = load_model("qwen2.5-0.5b")
    assert kv_lost(facts, (14, 10)) == pytest.approx(1 - 12 / 14)
    assert kv_lost(facts, (12, 12)) == 0
    assert cut_layers(facts, 2, device="cpu", kv_loss=0.1) == (13, 11)
    # Weights take of the same memory: 2.2 GB of cache for the one stage, 0.3 less for the other.
    assert kv_lost(facts, (14, 10), memory=3e9) > kv_lost(facts, (14, 10))
    assert kv_lost(facts, (14, 10), memory=1e3) == 0, "nothing fits, however it is cut"
