"""Limits of the search: what is ruled out says why, what is chosen keeps its bounds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tools.planner.planned import by_degree, config, make_cluster, make_plan

from sipipe.engine.layers.hf_config import facts_from_config
from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.hardware import Assumed, assumptions
from sipipe.tools.planner.models import load_model
from sipipe.tools.planner.report import notes, plan_to_dict, serve_commands
from sipipe.tools.planner.workload import Workload


def plan(model="llama-3.1-8b", workload=None, **more):
    names = ("inflight", "samplers", "baseline", "given", "cpu_sampling")
    options = {key: more.pop(key) for key in names if key in more}
    facts = load_model(model, weight_bits=(workload or Workload()).weight_bits)
    return make_plan(facts, make_cluster(**more), workload or Workload(), **options)


def reasons(found):
    return {(r.p, r.t): r.reason for r in found.rejected if r.engine != "sipipe"}


def test_every_degree_is_either_ranked_or_ruled_out_for_both_engines():
    found = plan(hosts=2)
    degrees = [(c.engine.key, c.p, c.t) for c in found.choices]
    degrees += [(r.engine, r.p, r.t) for r in found.rejected]
    every = [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    assert sorted(degrees) == [(key, *each) for key in ("sipipe", "vllm-async") for each in every]
    rates = [choice.throughput for choice in found.choices]
    assert rates == sorted(rates, reverse=True)


def test_a_model_that_does_not_fit_says_by_how_much():
    found = plan("llama-3.1-405b")
    assert found.best is None
    reason = reasons(found)[1, 8]
    # 405.9e9 x 2 / 8 = 101.5 GB and 3 GiB of workspace, of 0.9 x 79.6 GiB = 76.9 GB
    assert "short" not in reason
    assert "needs 104.7 GB" in reason
    assert "27.8 GB more than the 76.9 GB" in reason


def test_a_cache_too_small_for_one_sequence():
    found = plan(per_host=1, workload=Workload(input=120_000, output=10_000), gpu="4090")
    assert "KV cache holds" in reasons(found)[1, 1]


SIZES = config(layers=4, vocabulary=1000, hidden=96, heads=6, intermediate=192)
TINY = facts_from_config(SIZES | {"num_key_value_heads": 3}, name="tiny")


def tiny_plan(devices):
    return make_plan(TINY, make_cluster(per_host=devices), Workload(input=10, output=10))


def test_one_layer_per_stage_and_more_stages_than_layers():
    four = tiny_plan(4)
    one_each = next(choice for choice in four.choices if choice.p == 4)
    assert [stage.layers for stage in one_each.placement.stages] == [1, 1, 1, 1]
    eight = reasons(tiny_plan(8))
    assert eight[8, 1] == "8 stages for 4 layers"
    assert "6 attention heads do not divide by t = 4" in eight[2, 4]


def test_heads_experts_and_blocks_that_do_not_divide():
    assert "KV heads" in reasons(tiny_plan(2))[1, 2]
    found = reasons(plan("deepseek-v3", hosts=4))
    assert "blocks of 128" in found[1, 32]


def test_fewer_sequences_than_microbatches():
    found = plan("llama-3.1-70b", Workload(fixed_batch=3), hosts=1)
    iteration = by_degree(found)[8, 1].ours.iteration
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
        assert choice.tpot <= budget
        assert choice.slowest.throughput <= choice.throughput * 1.01
        assert choice.throughput <= choice.quickest.throughput * 1.01
        assert choice.lowest_tpot <= choice.tpot * 1.0001
        assert 1 <= choice.batch <= most
        assert choice.batch == 1 or choice.batch * workload.context <= choice.memory.kv_tokens
        microbatch = choice.iteration.microbatch
        assert microbatch.tokens <= 8192 + workload.tokens_per_sequence or microbatch.batch == 1
        assert choice.throughput == pytest.approx(choice.batch / choice.tpot)
        assert 0 <= choice.iteration.idle < 1
        assert (choice.samplers >= 1) == (choice.engine.key == "sipipe")
        assert choice.samplers <= 86


def test_what_is_recommended_is_the_fastest_row_whose_ever_it_is():
    """Mixtral on two H100: tensor parallelism of stock vLLM."""
    found = plan("mixtral-8x7b", per_host=2)
    assert found.best.engine.key == "vllm-async"
    assert found.best.throughput == max(choice.throughput for choice in found.choices)
    assert found.gain.stated < 1
    deep = plan("llama-3.1-70b", hosts=2, workload=Workload(tpot_slo=0.05, sampling="all"))
    assert deep.best.engine.key == "sipipe"
    assert deep.gain.low < deep.gain.stated < deep.gain.high
    assert deep.gain.low < 1  # with other plausible inputs nothing is gained


def test_unevenness_is_charged_to_both_sides():
    even, uneven = (plan("llama-3.1-70b", given={"loop.uneven": x}) for x in (0.0, 0.2))
    for degree, both in by_degree(even).items():
        other = by_degree(uneven)[degree]
        for side in ("ours", "stock"):
            before, after = getattr(both, side), getattr(other, side)
            slower = before.throughput / before.batch / (after.throughput / after.batch)
            assert slower == pytest.approx(1.2 if degree[0] > 1 else 1.0, rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        *("link.pcie4-no-p2p.hop_us", "link.pcie4-no-p2p.step_us", "link.pcie4-no-p2p.efficiency"),
        *("network.hop_us", "efficiency.workspace_gib"),
    ],
)
def test_a_predictions_range_contains_what_is_assumed_of_links_and_memory(name):
    """Each end alone, as if it had been stated, on a cluster where all of them tell."""
    model, workload = load_model("llama-3.1-8b"), Workload(max_num_seqs=4096)

    def at(**given):
        where = make_cluster("4090", 2, 2, gigabits=100, assumed=Assumed(given=given))
        costs = datasheet_costs(model, where, workload, given)
        found = make_plan(model, where, workload, costs=costs, given=given)
        return {(c.engine.key, c.p, c.t): c for c in found.choices}

    stated = at()
    _, *ends, _ = assumptions()[name]
    moved = 0
    for end in ends:
        for key, other in at(**{name: end}).items():
            choice = stated[key]
            low, high = choice.slowest.throughput, choice.quickest.throughput
            assert low * 0.999 <= other.throughput <= high * 1.001, (key, end)
            tokens = choice.slowest.kv_tokens, choice.quickest.kv_tokens
            assert tokens[0] <= other.memory.kv_tokens <= tokens[1]
            moved += (other.throughput, other.memory.kv_tokens) != (
                *(choice.throughput, choice.memory.kv_tokens),
            )
    assert moved


def test_what_an_uneven_cut_costs_of_the_cache_is_said():
    found = plan("llama-3.1-8b", gpu="xeon-8468", per_host=4, cores=200)
    ours, stock = by_degree(found)[4, 1].ours, by_degree(found)[4, 1].stock
    assert stock.kv_loss == 0
    assert ours.kv_loss == pytest.approx(1 - ours.memory.kv_tokens / stock.memory.kv_tokens)
    assert ours.kv_loss > 0
    rows = {(c["engine"], c["p"]): c for c in plan_to_dict(found)["choices"]}
    assert rows["sipipe", 4]["kv_loss"] == ours.kv_loss
    low, high = rows["sipipe", 4]["kv_tokens_range"]
    assert low <= ours.memory.kv_tokens <= high


def test_a_given_input_has_no_range():
    given = {name: value for name, (value, *_) in assumptions().items()}
    for choice in plan("llama-3.1-8b", per_host=2, given=given).choices:
        low, high = choice.slowest.throughput, choice.quickest.throughput
        assert low == pytest.approx(high)


def test_what_leaves_too_little_cache_gives_way_to_the_even_cut():
    def ours(**more):
        workload = Workload(max_num_seqs=256, **more)
        found = plan("qwen3-4b", workload, gpu="xeon-8468", per_host=4, cores=200)
        return found, by_degree(found)[4, 1].ours

    _, free = ours()
    assert free.vocabulary == "shared", "the parts of the output projection take memory"
    found, even = ours(min_kv_tokens=free.memory.kv_tokens + 1)
    assert even.memory.kv_tokens > free.memory.kv_tokens
    assert len({stage.layers for stage in even.placement.stages}) == 1
    (command,) = serve_commands(found, even)
    assert "--vocabulary last --layers 9,9,9,9" in command
    found = plan("qwen3-1.7b", Workload(min_kv_tokens=10**9), per_host=4)
    assert "under --min-kv-tokens 1,000,000,000" in reasons(found)[4, 1]


def test_sipipe_keeps_a_stage_on_one_host():
    found = plan("llama-3.1-405b", hosts=2)
    (reject,) = [r for r in found.rejected if (r.engine, r.t) == ("sipipe", 16)]
    assert "on one host" in reject.reason


def test_commands_start_every_host_and_round_trip_through_a_shell():
    import shlex

    found = plan("llama-3.1-405b", hosts=2)
    for choice in found.choices:
        program = "sipipe" if choice.engine.key == "sipipe" else "vllm"
        first, second = serve_commands(found, choice)
        assert shlex.split(first)[:3] == [program, "serve", "meta-llama/Llama-3.1-405B-Instruct"]
        assert "--headless" in second
        assert "--headless" not in first
        assert f"-pp {choice.p} -tp {choice.t}" in first
        assert ("--samplers" in first) == (program == "sipipe")
    (only,) = serve_commands(single := plan("llama-3.1-8b"), single.best)
    assert "--nnodes" not in only


def test_a_command_asks_for_what_there_is():
    """A cache too small for the model's context, and weights that are not the checkpoint's."""
    tight = plan("llama-3.1-8b", gpu="4090", per_host=1)
    (command,) = serve_commands(tight, tight.best)
    length = int(command.split("--max-model-len ")[1].split()[0])
    assert 1300 <= length < tight.best.memory.kv_tokens
    (roomy,) = serve_commands(plan("llama-3.1-8b"), plan("llama-3.1-8b").best)
    assert "--max-model-len" not in roomy
    narrow = plan("llama-3.1-8b", Workload(weight_bits=8))
    assert "--quantization fp8" in serve_commands(narrow, narrow.best)[0]
    stored = plan("llama-3.1-8b", Workload(weight_bits=4.25))
    assert "serve CHECKPOINT" in serve_commands(stored, stored.best)[0]
    assert any("with 4.25 bits per weight" in note for note in notes(stored, stored.best))


def test_streams_have_as_many_api_servers_as_they_take():
    """One process of vLLM's front end streams some thousand tokens a second, whoever computes them."""
    quick = plan("llama-3.1-8b")
    slow = plan("llama-3.1-405b", hosts=2, workload=Workload(max_num_seqs=16))
    for found in (quick, slow):
        for choice in found.choices:
            servers = found.api_servers(choice)
            each = found.front_end.tokens_per_second(1)
            assert (servers - 1) * each < choice.throughput <= servers * each
            first, *others = serve_commands(found, choice)
            assert (f"--api-server-count {servers}" in first) == (servers > 1)
            assert not any("--api-server-count" in command for command in others)
            said = [note for note in notes(found, choice) if "API servers" in note]
            assert len(said) == (servers > 1)
    assert quick.api_servers(quick.best) > quick.api_servers(quick.best, 16) > 1
    assert slow.api_servers(slow.best) == 1


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-7b"])
def test_on_cpus_the_output_projection_is_shared_where_that_is_quicker(model):
    found = plan(model, gpu="xeon-8468", per_host=4, cores=200)
    both = by_degree(found)[4, 1]
    assert (both.ours.vocabulary, both.stock.vocabulary) == ("shared", "last")
    stages = both.ours.placement.stages
    assert sum(stage.projection for stage in stages) == pytest.approx(1)
    logits = [time.forward["logits"] for time in both.ours.iteration.stages]
    assert min(logits) > 0, "every stage multiplies"
    assert "--vocabulary shared" in serve_commands(found, both.ours)[0]
    assert "--vocabulary" not in serve_commands(found, both.stock)[0]
    names = {c["engine"]: c["vocabulary"] for c in plan_to_dict(found)["choices"] if c["p"] == 4}
    assert names == {"sipipe": "shared", "vllm": "last"}
    assert by_degree(found)[1, 4].ours.vocabulary == "last"


def test_on_gpus_it_is_shared_where_samplers_draw_all_rows():
    found = plan("llama-3.1-8b", per_host=4, cpu_sampling="on")
    shared = [choice for choice in found.choices if choice.placement.shares_projection]
    assert shared
    for choice in shared:
        command = serve_commands(found, choice)[0]
        assert "--vocabulary shared" in command
        assert '"cpu_sampling": "on"' in command
    far = plan(hosts=2, per_host=2, cpu_sampling="on")
    assert not any(choice.placement.shares_projection for choice in far.choices)


def test_nothing_is_shared_where_the_engine_would_not():
    for found in (plan(), plan(gpu="xeon-8468", hosts=2, per_host=2), plan(per_host=4, hosts=1)):
        assert not any(choice.placement.shares_projection for choice in found.choices)
