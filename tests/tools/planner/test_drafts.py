"""Worth of a draft head, as the planner computes it."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tools.planner.planned import make_cluster, make_plan

from sipipe.cli import main
from sipipe.engine.layers.cut import Drafting, cut_layers
from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.models import load_model
from sipipe.tools.planner.placement import kv_bytes, place, weight_bytes
from sipipe.tools.planner.report import plan_to_dict, worth_line
from sipipe.tools.planner.workload import Workload

LLAMA = load_model("llama-3.1-70b")
DECODES = Workload(input=0, output=300)
"""Without prompts, whose tokens grow with those of a pass."""


def worth(batch, *, acceptance=0.7, drafts=3, workload=DECODES):
    """What drafts are worth to so many sequences of Llama 70B on 8 H100."""
    fixed = dataclasses.replace(workload, fixed_batch=batch)
    options = {"drafts": drafts, "acceptance": acceptance}
    return make_plan(LLAMA, make_cluster(), fixed, **options).drafts


def test_tokens_of_a_pass_are_those_before_the_first_wrong_draft():
    rates = [(0, 0.7, 1.0), (3, 1.0, 4.0), (2, 0.5, 1.75), (3, 0.7, 1 + 0.7 + 0.49 + 0.343)]
    for drafts, acceptance, expected in rates:
        workload = Workload(drafts=drafts, acceptance=acceptance)
        assert workload.tokens_a_pass == pytest.approx(expected)


def test_a_heads_passes_take_what_the_issue_computed():
    """70B in 8 stages, 28 sequences a microbatch: 2.4 ms for three drafts, a stage takes 6.4."""
    costs = datasheet_costs(LLAMA, make_cluster(), DECODES)
    work = Workload(input=0, drafts=3, acceptance=0.7).microbatch(28)
    last = place(LLAMA.layers, 8, 1, 8).stages[-1]
    causes = costs.forward(last, work, gather=False)
    assert 2.0e-3 < causes["draft head"] < 4.5e-3
    assert "draft head" not in costs.forward(last, DECODES.microbatch(28), gather=False)


def test_few_sequences_gain_more_than_many():
    few = worth(8)
    many = worth(1024)
    assert few.drafts == 3
    assert few.gain > 1.7
    assert few.gain > many.gain
    assert few.tpot < 1 / few.throughput * 8 * 1.001


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 1024),
    drafts=st.integers(1, 6),
    rates=st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0)),
)
def test_likelier_and_more_drafts_are_never_worth_less(batch, drafts, rates):
    low, high = sorted(rates)
    one = worth(batch, acceptance=low, drafts=drafts)
    assert 1 <= one.drafts <= drafts
    assert worth(batch, acceptance=high, drafts=drafts).throughput >= one.throughput * 0.999
    assert worth(batch, acceptance=low, drafts=drafts + 1).throughput >= one.throughput


def test_the_head_is_counted_in_the_cut():
    found = worth(256, workload=Workload())
    memory = 0.9 * make_cluster().device.memory_bytes
    degrees = len(found.layers), 8 // len(found.layers)
    assert len(found.layers) > 1
    assert found.layers == cut_layers(
        LLAMA, *degrees, kv_loss=0.1, memory=memory, drafting=Drafting(drafts=found.drafts)
    )
    assert found.layers[-1] < max(found.layers)


def test_none_fit_where_rows_are_more_than_a_microbatch_may_have():
    full = Workload(input=0, fixed_batch=1024, max_num_batched_tokens=130)
    plan = make_plan(LLAMA, make_cluster(), full, drafts=3, inflight=8)
    assert plan.drafts is None
    assert worth_line(plan) == ""


def test_what_is_not_worth_it_is_said_to_be_so():
    fixed = dataclasses.replace(DECODES, fixed_batch=256)
    plan = make_plan(LLAMA, make_cluster(), fixed, drafts=3, acceptance=0.01)
    assert worth_line(plan).endswith("not worth it with so many sequences")


def test_the_command_says_it_in_a_line_and_in_json(capsys):
    asked = ["plan", "llama-3.1-70b", "--gpu", "h100", "--sampling", "greedy", "--batch", "64"]
    main(asked)
    assert "a draft head: 3 draft(s)" in " ".join(capsys.readouterr().out.split())
    main([*asked, "--drafts", "0"])
    assert "draft head" not in capsys.readouterr().out
    plan = make_plan(LLAMA, make_cluster(), Workload(fixed_batch=64), drafts=2)
    assert plan_to_dict(plan)["drafts"]["drafts"] == plan.drafts.drafts


def test_a_heads_weights_and_cache_are_one_layer_of_the_last_stage():
    costs = datasheet_costs(LLAMA, make_cluster(), DECODES)
    without, beside = (place(LLAMA.layers, 8, 1, 8, head_layers=layers).stages for layers in (0, 1))
    assert beside[:-1] == without[:-1]
    layer = LLAMA.layer_parameters(LLAMA.layers - 1) * LLAMA.weight_bytes
    assert weight_bytes(LLAMA, beside[-1]) - weight_bytes(LLAMA, without[-1]) == layer
    size = costs.kv_element_bytes
    token = LLAMA.attention.kv_elements * size
    assert kv_bytes(LLAMA, beside[-1], size) - kv_bytes(LLAMA, without[-1], size) == token


def test_where_a_head_leaves_less_room_fewer_sequences_run():
    """Long outputs of Llama 70B on three H100s: the cache holds a score of them."""
    long = Workload(input=100, output=20_000)
    plan = make_plan(LLAMA, make_cluster(per_host=3), long, drafts=3, acceptance=0.9)
    ours = plan.fastest(True)
    assert 1 <= plan.drafts.batch < ours.batch
    assert plan.drafts.gain == pytest.approx(plan.drafts.throughput / ours.throughput)
    assert f"{plan.drafts.batch} sequences at once" in worth_line(plan)


def test_a_head_that_does_not_fit_beside_the_sequences_asked_for_is_not_offered():
    """One stage of four H100s: no cut of layers makes room for the head."""
    long = Workload(input=2_000, output=20_000)
    most = make_plan(LLAMA, make_cluster(per_host=4), long).fastest(True).batch
    for batch, offered in ((most, False), (most // 2, True)):
        fixed = dataclasses.replace(long, fixed_batch=batch)
        plan = make_plan(LLAMA, make_cluster(per_host=4), fixed, drafts=3)
        assert (plan.drafts is not None) is offered
