"""A few of the faults of ``make test-faults``, and that the documented table is what it found."""

import json
import os
import pkgutil
import re
from itertools import chain
from random import Random

import pytest
from tests.engine.forks import Forked
from tests.faults import bombs, session_soak, soak, suite, week
from tests.faults.kinds import KINDS
from tests.faults.plan import POINTS
from tests.faults.suite import BAD, KEPT, STREAMS, page
from tests.hosts import why_not

pytest.importorskip("vllm", reason="vLLM is not installed")

FEW = (
    "a sampler is killed at each step of its restart",
    "a worker is killed while the engine starts (vLLM's sampler)",
    "a worker is stopped for ever",
    "a worker is killed amid a product",
    "a sampler that draws is killed amid aborts",
    "a sampler is killed, KV blocks fail and are computed",
    "another host's agent is killed",
)


@pytest.mark.parametrize("point", POINTS)
def test_faults_are_put_in_at_functions_that_are_there(point):
    """A kind draws one of its points for each engine; a few faults do not come to all."""
    owner, function = POINTS[point]
    assert callable(getattr(pkgutil.resolve_name(owner), function))


@pytest.mark.ci
@pytest.mark.engine
def test_a_few_faults_end_well(tmp_path):
    kinds = {kind.name: kind for kind in KINDS}
    asked = [
        {"kind": name, "streams": STREAMS, "ahead": True} | kinds[name].make(Random(f"few {name}"))
        for name in FEW
    ]
    asked[-1]["unread"] = True
    for each in (
        one for made in asked for lives in made.get("planned", {}).values() for one in chain(*lives)
    ):
        each["nth"] = min(each["nth"], 5)  # early, so that each is there
    scenarios = ["--scenarios", json.dumps(asked), "--parallel", "3"]
    sums = run(tmp_path / "log", "__main__.py", scenarios)
    assert sums["kinds"] == len(FEW), "each had its fault"
    assert not any(sums[key] for key in BAD), (tmp_path / "log").read_text()[-6000:]


@pytest.mark.slow
@pytest.mark.engine
def test_an_hour_of_the_week_ends_well(tmp_path):
    sums = run(tmp_path / "log", "week.py", ["--requests", "240", "--faults", "60", "--parts", "2"])
    assert not sums["bad"], (tmp_path / "log").read_text()[-6000:]
    assert sums["done"] + sums["aborted"] == 240
    assert sums["kill"]
    assert sums["rotate"]


@pytest.mark.slow
@pytest.mark.engine
def test_two_hosts_outlive_a_network_that_holds_all_and_end_with_a_worker(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    kinds = (
        "the network between two hosts is held for up to 2 s",
        "a worker of two hosts is killed",
    )
    pattern = "|".join(f"^{name}$" for name in kinds)
    sums = run(tmp_path / "log", "__main__.py", ["--only", pattern, "--scale", "0.1"])
    assert not any(sums[key] for key in BAD), (tmp_path / "log").read_text()[-6000:]
    assert (sums["recovered"], sums["error"]) == (1, 1)


def run(log, file, arguments):
    """What a rig said that it has counted."""
    with log.open("w") as out:
        rig = Forked(KEPT / file, arguments, env=dict(os.environ), out=out)
        try:
            rig.wait(570)  # less than pytest's own
        finally:
            rig.kill()
    return json.loads(re.search(r"^SUMS (.*)$", log.read_text(), re.MULTILINE)[1])


def documented(name, of):
    """What is kept of ``name``; it is what the page shows."""
    text, kept = (KEPT / "README.md").read_text(), json.loads((KEPT / f"{name}.json").read_text())
    assert page(text, name, of.markdown(kept)) == text
    return kept


def test_the_documented_table_is_what_was_found():
    kept = documented("faults", suite)
    assert {row["kind"] for row in kept["rows"]} == {
        *(kind.name for kind in KINDS),
        *suite.SERVED_KINDS,
    }
    assert sum(row["injected"] for row in kept["rows"]) >= 500
    assert not any(row[key] for row in kept["rows"] for key in BAD)


def test_the_documented_soak_is_what_was_found():
    kept = documented("soak", soak)
    assert kept["minutes"] >= 30
    assert "WRONG" not in kept["ends"]
    for row in kept["rows"]:
        assert all(row["last"][what] <= count for what, count in row["first"].items()), row


def test_the_documented_sessions_are_what_was_found():
    kept = documented("session_soak", session_soak)
    assert kept["minutes"] >= 10
    ends = kept["ends"]
    assert not any(ends.get(word) for word in ("WRONG", "HUNG", "FAILED"))
    assert all(ends[f"pause {mode}"] for mode in ("abort", "wait", "keep"))


def test_the_documented_week_is_what_was_found():
    kept = documented("week", week)
    assert not week.grown(kept["looks"])
    assert not week.slowed(kept["looks"])
    assert kept["counts"]["done"] + kept["counts"]["aborted"] == kept["requests"]


def test_a_bomb_has_a_name_of_its_own_and_most_have_stocks_answer():
    known = json.loads(bombs.KEPT.read_text())
    labels = [label for made in bombs.BOMBS.values() for label, _, _ in made()]
    assert len(labels) == len(set(labels)) >= 400
    assert set(known) <= set(labels)
    assert len(known) >= 400


@pytest.mark.parametrize(
    ("status", "stock", "worse"),
    [
        (200, 200, False),
        (400, 500, False),
        (500, 400, True),
        (500, 500, False),
        (0, 200, True),
        (500, "ended", False),
        (0, 500, True),
    ],
)
def test_an_answer_that_is_worse_than_stocks(status, stock, worse):
    assert bombs.worse(status, stock) == worse
