"""Layers that have to be on one stage: found in the configuration, kept by every cut."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.engine import tiny_models
from tests.tools.planner.planned import by_degree, make_cluster, make_plan

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.bonds import Bond, bonds_of, boundaries, broken
from sipipe.engine.layers.choose import VARIABLE, choose_layers, describe_layers
from sipipe.engine.layers.cut import cut_layers, layer_split, nearest_even
from sipipe.engine.layers.decoder import decoder_of
from sipipe.engine.layers.facts import Attention, ModelFacts
from sipipe.engine.start import arguments, plugin
from sipipe.errors import ConfigError
from sipipe.tools.planner.models import load_model
from sipipe.tools.planner.workload import Workload

KINDS = ["sliding_attention", "full_attention"] * 4
TEXT = {"num_hidden_layers": 8}


def ends(bonds):
    return [(bond.first, bond.last) for bond in bonds]


def test_bonds_are_those_that_vllms_models_make():
    shared = TEXT | {"layer_types": KINDS, "num_kv_shared_layers": 2}
    assert ends(bonds_of(shared, {})) == [(4, 7)]
    assert ends(bonds_of(shared | {"num_kv_shared_layers": 0}, {})) == []
    assert ends(bonds_of(TEXT, {"deepstack_visual_indexes": [5, 11, 17]})) == [(0, 2)]
    sparse = TEXT | {"index_topk": 64}
    assert ends(bonds_of(sparse, {})) == []
    assert ends(bonds_of(sparse | {"index_topk_freq": 4}, {})) == [(1, 4), (5, 7)]
    assert ends(bonds_of(sparse | {"index_topk_pattern": "FFSSFSFF"}, {})) == [(1, 3), (4, 5)]


@st.composite
def bonded(draw):
    """Layers, stages and bonds that leave room for them."""
    total = draw(st.integers(2, 14))
    pairs = draw(
        st.lists(st.tuples(st.integers(0, total - 1), st.integers(0, total - 1)), max_size=3)
    )
    bonds = [Bond(min(pair), max(pair), "drawn") for pair in pairs]
    stages = draw(st.integers(1, len(boundaries(bonds, total)) + 1))
    return total, stages, bonds


@given(bonded(), st.sampled_from([1_000, 10_000_000, 1_000_000_000]), st.floats(0, 1))
def test_every_automatic_cut_keeps_what_belongs_together(case, vocabulary, kv_loss):
    total, stages, bonds = case
    attention = Attention(kind="gqa", heads=4, kv_heads=4, head_dim=16, parameters=100_000)
    facts = ModelFacts(
        name="drawn",
        layers=total,
        hidden=64,
        vocabulary=vocabulary // 64,
        attention=attention,
        dense_parameters=400_000,
        moe=None,
        sparse_layers=frozenset(),
        tied_embeddings=True,
        intermediate=256,
        bonds=tuple(bonds),
    )
    starts = boundaries(bonds, total)
    for cut in (
        nearest_even(total, stages, starts),
        cut_layers(facts, stages, kv_loss=kv_loss),
    ):
        assert len(cut) == stages
        assert sum(cut) == total
        assert min(cut) >= 1
        assert broken(bonds, cut) is None
        assert set(accumulate(cut[:-1])) <= set(starts)
    if not bonds:
        assert nearest_even(total, stages, starts) == layer_split(total, stages)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    """Two stages; the configuration only is read."""
    if not arguments.current_platform.is_cpu():
        pytest.skip("a CUDA build of vLLM")
    path = tmp_path_factory.mktemp("models") / "gemma4"
    tiny_models.make_gemma4(path)

    def configured(stages):
        """The engine's configuration with so many stages."""
        args = arguments.parse_engine_args(
            [str(path), "-pp", str(stages), "--max-model-len", "256"], {}
        )
        return plugin.engine_config(arguments.AsyncEngineArgs.from_cli_args(args))

    configured.path = path
    return configured


def choose(vllm_config, **settings):
    """The cut of an engine whose CPU samplers draw."""
    config = SiPipeConfig.from_dict(settings)
    return choose_layers(vllm_config, config, decoder_of(vllm_config), by_cost=True)


@pytest.mark.parametrize("by_cost", [True, False])
def test_auto_keeps_shared_caches_and_says_so(gemma4, monkeypatch, by_cost):
    monkeypatch.delenv(VARIABLE, raising=False)
    made = gemma4(4)
    config = SiPipeConfig.from_dict({})
    cut = choose_layers(made, config, decoder_of(made), by_cost=by_cost)
    assert sum(cut[:-1]) <= 4
    said = describe_layers(made, config, decoder_of(made), cut, by_cost=by_cost)
    assert "kept on one stage: layers 4 to 7 (later ones read earlier ones' KV cache)" in said


def test_a_cut_that_cannot_work_is_refused_by_name(gemma4, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(
        ConfigError, match=r'"layers" in the sipipe config cuts \[5, 3\]: layers 4 to 7'
    ):
        choose(gemma4(2), layers=[5, 3])
    with pytest.raises(ConfigError, match='"layers" "even" cuts'):
        choose(gemma4(4), layers="even")
    with pytest.raises(ConfigError, match="leaves room for 5 stages at most"):
        choose(gemma4(6))
    monkeypatch.setenv(VARIABLE, "6,2")
    with pytest.raises(ConfigError, match=rf"{VARIABLE} cuts \[6, 2\]"):
        choose(gemma4(2))


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_a_planned_cut_is_one_that_the_engine_accepts(gemma4, monkeypatch, device, stages):
    monkeypatch.delenv(VARIABLE, raising=False)
    facts = load_model(str(gemma4.path))
    plan = make_plan(
        facts, make_cluster(device, per_host=stages), Workload(input=64, output=64, max_num_seqs=8)
    )
    planned = by_degree(plan)[stages, 1].ours
    made = gemma4(stages)
    for cut in (planned.cut, tuple(stage.layers for stage in planned.placement.stages)):
        assert choose(made, layers=cut) == cut


def test_what_a_plan_rules_out_is_named(gemma4):
    facts = load_model(str(gemma4.path))
    workload = Workload(input=64, output=64, max_num_seqs=8)
    reasons = {
        (engine, p): reason
        for degree in (4, 8)
        for engine, p, t, reason in make_plan(
            facts, make_cluster(per_host=degree), workload
        ).rejected
        if t == 1
    }
    shared = "layers 4 to 7 (later ones read earlier ones' KV cache)"
    # Stock cuts evenly, 2 and 2 of them, whatever belongs together.
    assert reasons["vllm-async", 4] == (
        f"its even cut takes {shared} apart, which have to be on one stage"
    )
    assert reasons["sipipe", 8] == (
        f"{shared} have to be on one stage, which leaves room for 5 stages"
    )
