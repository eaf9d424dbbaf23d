"""The figures of `benchmarks.speculation`, of made-up runs."""

import argparse

import pytest

pytest.importorskip("vllm")

from benchmarks import emulate, speculation


def run(speed, *, drawn=40, accepted=0, offered=0, ms=(10.0, 20.0), tokens=((1, 2), (3, 4))):
    """What an engine answers for one run of a load."""
    return {
        "tokens_per_s": speed,
        "drawn": drawn,
        "accepted": accepted,
        "offered": offered,
        "ms": list(ms),
        "tokens": [list(each) for each in tokens],
    }


def test_a_row_is_of_all_engines_and_ratios_are_of_runs_beside_one_another():
    runs = {
        "with": [
            run(30.0, drawn=60, accepted=20, offered=25, ms=[5.0]),
            run(20.0, accepted=10, offered=35, ms=[7.0, 9.0]),
        ],
        "without": [run(10.0, tokens=((1, 2), (3, 5))), run(20.0)],
        "stock": [run(15.0), run(16.0)],
    }
    row = speculation.row_of(runs)
    assert row["tokens a pass"] == round(100 / 70, 2)
    assert row["accepted"] == 0.5
    assert row["with / without"] == {"median": 2.0, "low": 1.0, "high": 3.0, "n": 2}
    assert row["tok/s stock, 1 stage"]["median"] == 15.5
    assert (row["ms a token with, p50"], row["p99 with"]) == (7.0, 7.0)
    assert row["same tokens"] == "1/2"
    without = speculation.row_of({side: runs[side] for side in ("without", "with")})
    assert "tok/s stock, 1 stage" not in without


def test_engines_take_turns_in_reverse_order_each_time():
    sides = {"with": 1, "without": 2, "stock": 3}
    assert list(dict(speculation.ordered(sides, 0))) == ["with", "without", "stock"]
    assert list(dict(speculation.ordered(sides, 1))) == ["stock", "without", "with"]
    assert list(dict(speculation.ordered(sides, 2))) == ["with", "without", "stock"]


def load(speed, *, busy=0.5, drafts=None):
    return {"tokens_per_s": speed, "drafts": drafts, "busy": busy, "busy_share": [0.6, 0.9]}


def test_emulated_rows_are_in_the_devices_own_time_and_void_ones_say_so():
    drafts = {"verified": 10, "accepted": 0.75, "a_pass": 2.5}
    runs = {
        "with": [load(50.0, drafts=drafts), load(40.0)],
        "without": [load(20.0), load(40.0)],
    }
    row = speculation.emulated_row(runs, 2.0, 0.85)
    assert row["tok/s with"]["high"] == 100.0
    assert row["with / without"] == {"median": 1.75, "low": 1.0, "high": 2.5, "n": 2}
    assert row["tokens a pass"] == 1.75  # no draft was worth it in the second
    assert (row["busiest stage with, %"], row[""]) == (90, "valid")
    runs["without"][0]["busy"] = 0.9
    assert speculation.emulated_row(runs, 2.0, 0.85)[""] == "VOID"


@pytest.fixture
def reported(monkeypatch):
    reports = []

    def report(name, title, rows, **more):
        reports.append((more["file"], rows))

    monkeypatch.setattr(speculation, "report", report)
    return reports


def arguments(**given):
    values = {
        "profile": "", "model": "models/a", "head": "", "drafts": 3, "acceptance": 0.7,
        "pp": "2,4", "requests": "1,8", "kinds": "chat", "sampling": "greedy", "tokens": 60,
        "repeat": 1, "engines": 2, "no_stock": False, "name": "",
    }  # fmt: skip
    return argparse.Namespace(**values | given)


@pytest.mark.parametrize("head", ["", "models/a-eagle"])
def test_stock_has_the_same_head_on_one_stage(monkeypatch, reported, head):
    asked = []

    def measured_in_turn(jobs, module):
        asked.append(jobs)
        return {side: {"loads": [[run(10.0)] for _ in job["loads"]]} for side, job in jobs.items()}

    monkeypatch.setattr(speculation, "measured_in_turn", measured_in_turn)
    speculation.served(arguments(head=head))
    assert [list(jobs) for jobs in asked[:2]] == [
        ["with", "without", "stock"],
        ["stock", "without", "with"],
    ]
    assert [jobs["with"]["pp"] for jobs in asked] == [2, 2, 4, 4]
    assert all(jobs["without"]["speculative"] is None for jobs in asked)
    assert all(jobs["stock"]["pp"] == 1 for jobs in asked)
    if head:
        drafts = {"method": "eagle", "model": head, "num_speculative_tokens": 3}
        assert asked[0]["with"]["speculative"] == asked[0]["stock"]["speculative"] == drafts
    else:
        assert asked[0]["with"]["speculative"] == {"method": "ngram"}
    ((file, rows),) = reported
    assert file == ("speculation-head-pp2-4" if head else "speculation-pp2-4")
    assert [(row["stages"], row["requests"]) for row in rows] == [(2, 1), (2, 8), (4, 1), (4, 8)]


def test_emulated_devices_have_a_head_on_one_side(monkeypatch, reported):
    asked = []

    def emulated(options):
        asked.append(" ".join(options))
        return None, {"loads": [load(10.0), load(20.0)]}

    monkeypatch.setattr(emulate, "emulated", emulated)
    speculation.emulated(arguments(profile="llama-70b-8xh100", pp="4,8", requests="32,256"))
    common = "--profile llama-70b-8xh100 --pp 8 --slow-motion 4 --prompt-tokens 32"
    with_head, without = (words for words in asked[4:6])
    assert without.startswith(common)
    assert with_head == f"{without} --drafts 3 --acceptance 0.7"
    assert asked[6:] == [without, with_head], "the next engines are in reverse order"
    ((file, rows),) = reported
    assert file == "speculation-emulated"
    assert [(row["stages"], row["requests"]) for row in rows] == [
        (4, 32), (4, 256), (8, 32), (8, 256),
    ]  # fmt: skip
