"""Layers, hosts and hops of a placement; memory of its tightest stage."""

import pytest
from tests.tools.planner.planned import make_cluster

from sipipe.engine.layers.cut import layer_split
from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.models import load_model
from sipipe.tools.planner.placement import place, weight_bytes
from sipipe.tools.planner.workload import Workload


def test_split_is_vllms():
    """The rule of vLLM's get_pp_indices, checked against the function itself where it is here."""
    utils = pytest.importorskip("vllm.distributed.utils")
    for layers in (7, 8, 61, 126):
        for p in (1, 2, 3, 4, 5, 7):
            bounds = [utils.get_pp_indices(layers, rank, p) for rank in range(p)]
            assert tuple(end - begin for begin, end in bounds) == layer_split(layers, p)


def test_hops_and_hosts():
    pure_pp = place(64, 16, 1, 8)
    assert pure_pp.crossings == 1
    assert [stage.crosses for stage in pure_pp.stages].index(True) == 7
    assert place(64, 1, 16, 8).stages[0].hosts == 2
    hybrid = place(64, 4, 4, 8)
    assert [stage.hosts for stage in hybrid.stages] == [1, 1, 1, 1]
    assert [stage.crosses for stage in hybrid.stages] == [False, True, False, False]
    straddling = place(64, 2, 6, 4)  # 12 devices on 3 hosts of 4
    assert [stage.hosts for stage in straddling.stages] == [2, 2]


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen2.5-0.5b", "deepseek-v3"])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_stage_weights_add_up_to_the_model(name, p):
    facts = load_model(name)
    placement = place(facts.layers, p, 1, 8)
    total = sum(weight_bytes(facts, stage) for stage in placement.stages)
    layers = sum(facts.layer_parameters(layer) for layer in range(facts.layers))
    ends = 1 if facts.tied_embeddings and p == 1 else 2
    expected = layers * facts.weight_bytes
    expected += ends * facts.embedding_parameters * facts.activation_bytes
    assert total == pytest.approx(expected)


def capacity(model, p, t):
    facts = load_model(model)
    costs = datasheet_costs(facts, make_cluster(), Workload())
    return costs.memory(place(facts.layers, p, t, 8), 0.9).kv_tokens


def test_kv_capacity_is_worth_more_stages_for_latent_attention():
    """The latent of MLA is copied to every tensor-parallel rank, but split over stages."""
    assert capacity("deepseek-v2.5", 8, 1) > 4 * capacity("deepseek-v2.5", 1, 8)
    assert capacity("llama-3.1-70b", 8, 1) == pytest.approx(
        capacity("llama-3.1-70b", 1, 8), rel=0.05
    )
