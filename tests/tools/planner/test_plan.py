"""Limits of the search: what is ruled out says why, what is chosen keeps its bounds."""

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tools.planner.planned import make_plan

from sipipe.engine.layers.hf_config import facts_from_config
from sipipe.tools.planner.chart import draw
from sipipe.tools.planner.hardware import Cluster, device
from sipipe.tools.planner.hardware import network as between
from sipipe.tools.planner.models import load_model
from sipipe.tools.planner.report import plan_to_dict, serve_commands
from sipipe.tools.planner.workload import Workload


def cluster(gpu="h100", hosts=1, per_host=8, cores=96, network=400):
    return Cluster(
        device=device(gpu),
        hosts=hosts,
        devices_per_host=per_host,
        network=between(network),
        cores_per_host=cores,
    )


def plan(model="llama-3.1-8b", workload=None, **more):
    options = {key: more.pop(key) for key in ("inflight", "samplers", "baseline") if key in more}
    return make_plan(load_model(model), cluster(**more), workload or Workload(), **options)


def reasons(found):
    return {(reject.p, reject.t): reject.reason for reject in found.rejected}


def test_every_degree_is_either_ranked_or_ruled_out():
    found = plan(hosts=2)
    degrees = [(c.p, c.t) for c in found.choices] + [(r.p, r.t) for r in found.rejected]
    assert sorted(degrees) == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    rates = [choice.best.throughput for choice in found.choices]
    assert rates == sorted(rates, reverse=True)


def test_one_device():
    (only,) = plan(per_host=1).choices
    assert (only.p, only.t) == (1, 1)
    assert only.communication_bytes == 0
    assert only.best.iteration.stages[0].forward["all-reduce"] == 0


def test_a_model_that_does_not_fit_says_by_how_much():
    found = plan("llama-3.1-405b")
    assert found.best is None
    reason = reasons(found)[1, 8]
    # 405.9e9 x 2 / 8 = 101.5 GB and 3 GiB of workspace, of 0.9 x 79.6 GiB = 76.9 GB
    assert "short" not in reason
    assert "needs 104.7 GB" in reason
    assert "27.8 GB more than the 76.9 GB" in reason
    assert serve_commands


def test_a_cache_too_small_for_one_sequence():
    found = plan(per_host=1, workload=Workload(input=120_000, output=10_000), gpu="4090")
    assert "KV cache holds" in reasons(found)[1, 1]


TINY = {
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 192,
}


def test_one_layer_per_stage_and_more_stages_than_layers():
    facts = facts_from_config(TINY, name="tiny")
    four = make_plan(facts, cluster(per_host=4), Workload(input=10, output=10))
    one_each = next(choice for choice in four.choices if choice.p == 4)
    assert [stage.layers for stage in one_each.placement.stages] == [1, 1, 1, 1]
    eight = reasons(make_plan(facts, cluster(per_host=8), Workload(input=10, output=10)))
    assert eight[8, 1] == "8 stages for 4 layers"
    assert "6 attention heads do not divide by t = 4" in eight[2, 4]


def test_heads_experts_and_blocks_that_do_not_divide():
    facts = facts_from_config(TINY, name="tiny")
    assert (
        "KV heads"
        in reasons(make_plan(facts, cluster(per_host=2), Workload(input=9, output=9)))[1, 2]
    )
    found = reasons(plan("deepseek-v3", hosts=4))
    assert "blocks of 128" in found[1, 32]


def test_fewer_sequences_than_microbatches():
    found = plan("llama-3.1-70b", Workload(fixed_batch=3), hosts=1)
    deep = next(choice for choice in found.choices if choice.p == 8)
    iteration = deep.best.iteration
    assert iteration.inflight == 3
    assert iteration.microbatch.batch == 1
    assert iteration.bubbles["starved"] > 0.5


def test_budget_that_nothing_meets():
    found = plan("llama-3.1-70b", Workload(tpot_slo=1e-3))
    assert found.best is None
    assert all("over the budget of 1 ms" in reason for reason in reasons(found).values())


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["llama-3.1-70b", "mixtral-8x7b", "deepseek-v2.5"]),
    st.integers(0, 3000),
    st.integers(1, 2000),
    st.floats(0.01, 0.5),
    st.integers(1, 2048),
)
def test_choices_keep_every_bound(model, prompt, output, budget, most):
    workload = Workload(input=prompt, output=output, tpot_slo=budget, max_num_seqs=most)
    for choice in plan(model, workload).choices:
        best = choice.best
        assert best.tpot <= budget
        assert best.lowest_tpot <= best.tpot * 1.0001
        assert 1 <= best.batch <= most
        assert best.batch == 1 or best.batch * workload.context <= choice.memory.kv_tokens
        microbatch = best.iteration.microbatch
        assert microbatch.tokens <= 8192 + workload.tokens_per_sequence or microbatch.batch == 1
        assert best.throughput == pytest.approx(best.batch / best.tpot)
        assert 0 <= best.iteration.idle < 1
        assert 1 <= choice.samplers <= 86


def test_more_of_anything_does_not_hurt():
    base = plan("llama-3.1-70b").best.best.throughput
    assert plan("llama-3.1-70b", gpu="h200").best.best.throughput > base
    assert plan("llama-3.1-70b", Workload(sampling="greedy")).best.best.throughput >= base
    assert plan("llama-3.1-70b", Workload(max_num_seqs=4096)).best.best.throughput >= base
    slow = plan("llama-3.1-70b", hosts=2, network=100).best.best.throughput
    assert plan("llama-3.1-70b", hosts=2).best.best.throughput >= slow


def test_too_few_sampler_cores_are_named():
    found = plan("mixtral-8x7b", Workload(input=10, output=300), samplers=1)
    assert any(choice.best.iteration.limit == "CPU sampling" for choice in found.choices)


def test_async_baseline_lies_between():
    def rates(name):
        choices = plan("llama-3.1-70b", baseline=name).choices
        return {choice.p: choice.baseline.throughput for choice in choices}, choices

    (stock, _), (newer, choices) = rates("vllm"), rates("vllm-async")
    assert newer[1] > stock[1]
    assert all(choice.gain > 1 for choice in choices if choice.p > 1)


def test_commands_start_every_host_and_round_trip_through_a_shell():
    import shlex

    found = plan("llama-3.1-405b", hosts=2)
    first, second = serve_commands(found, found.best)
    assert shlex.split(first)[:3] == ["sipipe", "serve", "meta-llama/Llama-3.1-405B-Instruct"]
    assert "--headless" in second
    assert "--headless" not in first
    assert f"--pp {found.best.p} --tp {found.best.t}" in first
    (only,) = serve_commands(single := plan("llama-3.1-8b"), single.best)
    assert "--nnodes" not in only


def test_json_is_plain_and_complete():
    import json

    found = plan("llama-3.1-70b", hosts=2)
    back = json.loads(json.dumps(plan_to_dict(found), allow_nan=False))
    assert len(back["choices"]) + len(back["rejected"]) == 5
    bubbles = back["choices"][0]["sipipe"]["bubbles"]
    assert bubbles["total"] == pytest.approx(sum(v for k, v in bubbles.items() if k != "total"))


@pytest.mark.parametrize("budget", [math.inf, 0.05, 0.001])
def test_picture_is_svg_with_every_degree(budget):
    found = plan("llama-3.1-70b", Workload(tpot_slo=budget), hosts=2)
    root = ET.fromstring(draw(found))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for degree in ("P1T16", "P2T8", "P4T4", "P8T2", "P16T1"):
        assert texts.count(degree) == 1
    bars = [float(e.get("width")) for e in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert max(bars) == (300 if found.choices else 12)
