"""The ablation on emulated devices: what is taken away costs what the profile says."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from benchmarks.emulation import ablation, stock_costs
from benchmarks.emulation.profile import Curve, Profile, StageProfile, StockCosts
from benchmarks.emulation.stock_costs import Costs


def test_an_ablation_has_a_row_a_pipeline_and_measures_nothing_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablation, "BUILD", tmp_path)
    monkeypatch.setattr("benchmarks.harness.BUILD", tmp_path)
    started, waited = [], 2.9

    def measured(profile, p, slow, engine):
        started.append((profile, p, engine))
        place = list(ablation.ENGINES).index(engine)
        return {"tokens_per_s": 100.0 * 2**place, "waited": waited, "busy_share": [1.0]}

    monkeypatch.setattr(ablation, "measure", measured)
    monkeypatch.setattr(ablation, "machine", lambda: {"commit": "1234567"})
    assert ablation.ablate(["--pp 4"]) == 1
    assert "VOID" in capsys.readouterr().out
    waited, count = 0.2, len(started)
    assert ablation.ablate(["--pp 4", "--minutes", "-1"]) == 1
    assert f"{count} engines are left" in capsys.readouterr().out
    assert ablation.ablate(["--pp 4", "TSEM"]) == 1
    assert ablation.ablate(["--pp 4"]) == 0
    assert len(started) == 2 * count
    rows = json.loads((tmp_path / "emulation-ablation.json").read_text())["rows"]
    assert [row["pipeline"].split()[2:3] for row in rows] == [["4"]] * (len(rows) - 1) + [[]]
    shown = [rows[0][name] for name in ("+ SAT", "SiPipe", "- TSEM")]
    assert [(cell["median"], cell["n"]) for cell in shown] == [(2.0, 2), (32.0, 2), (4.0, 2)]
    assert rows[-1]["SiPipe"] == 32.0
    waited = 2.9
    assert ablation.ablate([]) == 1, "a table without a pipeline is no campaign's"


def test_figures_of_changed_files_are_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "BUILD", tmp_path)
    monkeypatch.setattr("benchmarks.harness.BUILD", tmp_path)
    monkeypatch.setattr(ablation, "PIPELINES", ablation.PIPELINES[:1])
    started = []

    def measured(*engine):
        started.append(engine)
        return {"tokens_per_s": 1.0, "waited": 0.0, "busy_share": [1.0]}

    monkeypatch.setattr(ablation, "measure", measured)
    counts = []
    for commit in ("1234567+", "1234567+", "1234567", "1234567", "7654321"):
        monkeypatch.setattr(ablation, "machine", lambda commit=commit: {"commit": commit})
        started.clear()
        assert ablation.ablate([]) == 0
        counts.append(len(started) // len(ablation.ENGINES))
    assert counts == [2, 2, 2, 0, 2]


def test_what_is_taken_away_from_sipipe_is_one_thing_each():
    whole = ablation.of("+ ahead", 4)
    assert whole == ([], {"inflight": 5, "microbatches": {"min_sequences": 0}})
    away = {}
    for engine in (name for name in ablation.ENGINES if name.startswith("-")):
        words, settings = ablation.of(engine, 4)
        differs = {key: value for key, value in settings.items() if whole[1].get(key) != value}
        assert settings.keys() >= whole[1].keys()
        away[engine] = differs | {word.rpartition("Without")[2]: True for word in words[1:]}
    assert away == {
        "- CPU sampling": {"cpu_sampling": "per_row"},
        "- TSEM": {"Overlap": True},
        "- SAT": {"Posting": True},
        "- p + 1": {"inflight": 4},
    }


def test_what_is_added_to_the_engine_like_vllms():
    found = [ablation.of(engine, 4) for engine in ablation.CHAIN]
    words = [[word.rpartition("Without")[2] for word in words] for words, _ in found]
    ahead, parts = "--no-async-scheduling", "--worker-extension-cls"
    assert words == [
        *[[ahead, parts, "PostingOverlap"]] * 2,
        [ahead, parts, "Posting"],
        *[[ahead]] * 2,
        [],
    ]
    assert [settings["inflight"] for _, settings in found] == [4] * 4 + [5] * 2
    assert [settings["microbatches"]["min_sequences"] for _, settings in found] == [1] * 4 + [0] * 2
    assert ["cpu_sampling" in settings for _, settings in found] == [True] + [False] * 5


def test_what_a_stage_pays_without_a_technique(monkeypatch):
    now = []
    device = SimpleNamespace(launch=now.append, wait=now.append, mark=lambda: "mark")
    curve = Curve(at=(0, 1), seconds=(0.0, 1.0))
    stage = StageProfile(
        layers=curve, projection=curve, hop=curve, decode_context=0.0, prompt_context=0.0
    )
    stock = StockCosts(last_stage=1.5, preparation=0.1, stall=0.25)
    profile = Profile(name="", stages=(stage,), copy=curve, kv_tokens=1, stock=stock)
    costs = Costs(profile.slowed(2.0), stage, device)
    costs.sample(4)
    costs.before_pass()
    costs.after_pass()
    assert now == [2.0]
    monkeypatch.setattr(stock_costs, "AWAY", {"Posting", "Overlap"})
    costs.before_pass()
    costs.after_pass()
    assert now == [2.0, 0.5, "mark"]


@pytest.mark.engine
@pytest.mark.slow
def test_a_pipeline_like_vllms_draws_on_the_emulated_device(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(ablation, "LOAD", "--requests 8 --prompt-tokens 20 --tokens 60")
    whole, stock = (
        ablation.measure("qwen3-4b-2xl40s", 2, 4, engine) for engine in ("+ p + 1", "vLLM-like")
    )
    assert min(whole["tokens_per_s"], stock["tokens_per_s"]) > 0
