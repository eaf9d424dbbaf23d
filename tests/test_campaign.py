"""`benchmarks.campaign` with made-up benchmarks and results."""

import json
import subprocess
import sys

import pytest
from benchmarks import campaign, harness, results
from benchmarks.campaign import differences
from benchmarks.catalogue import ASKED, CAMPAIGN_OF, CANARY_OF, RATIOS, Benchmark
from benchmarks.harness import spread


def test_every_kept_result_of_this_machine_is_measured_by_the_campaign():
    measured = {name for benchmark in CAMPAIGN_OF for name in benchmark.results}
    kept = {name for name in results.names() if not results.is_from_elsewhere(name)}
    # One that is new has no kept result until the next campaign.
    assert kept <= measured
    assert len({benchmark.name for benchmark in CAMPAIGN_OF}) == len(CAMPAIGN_OF)


@pytest.mark.parametrize(
    "benchmark", [*CAMPAIGN_OF, *CANARY_OF, *ASKED], ids=lambda each: each.words[:50]
)
def test_a_benchmark_takes_its_options(benchmark):
    """Each option of a command stands in the source of its module."""
    module, *words = benchmark.words.split()
    place = results.ROOT / "benchmarks" / module
    files = (
        [place.with_suffix(".py")] if place.with_suffix(".py").exists() else [*place.glob("*.py")]
    )
    files += [results.ROOT / "benchmarks/emulation/ablation.py"] * ("--ablate" in words)
    text = "".join(file.read_text() for file in files)
    for word in words:
        if word.startswith("--"):
            assert f'"{word}"' in text, word


def test_the_canary_watches_figures_that_it_measures_and_that_are_short():
    measured = {name for benchmark in CANARY_OF for name in benchmark.results}
    assert {ratio.figure.split(": ")[0] for ratio in RATIOS} <= measured
    assert sum(benchmark.minutes for benchmark in CANARY_OF) <= 25


FOLDER = "1234567-campaign"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A campaign in ``tmp_path`` whose commands are made up by the tests."""
    monkeypatch.setattr(campaign, "BUILD", tmp_path / "bench")
    monkeypatch.setattr(campaign, "place", lambda: tmp_path / FOLDER)
    (tmp_path / "bench").mkdir()
    return tmp_path


def runs(monkeypatch, place, results_of, commit=""):
    """Let each command end with its status and write its files, by its name, as of ``commit``; returns
    what ran."""
    ran = []

    def run(words, **options):
        of_folder = campaign.place().name.partition("-")[0]
        name = words[2].removeprefix("benchmarks.")
        ran.append(name)
        status, files = results_of[name]
        for file in files:
            row = {"way": "greedy", "tok/s": "1,234 (1,200-1,300)"}
            measured = {"machine": {"commit": commit or of_folder}, "rows": [row]}
            (place / "bench" / f"{file}.json").write_text(json.dumps(measured))
        return subprocess.CompletedProcess(words, status)

    monkeypatch.setattr(campaign.subprocess, "run", run)
    return ran


def test_what_was_measured_is_not_measured_again_and_a_failure_is_named(place, monkeypatch, capsys):
    benchmarks = tuple(Benchmark(name, name, (f"{name}-1",), 1) for name in ("good", "bad", "dumb"))
    monkeypatch.setattr(campaign, "CAMPAIGN_OF", benchmarks)
    monkeypatch.setattr("sys.argv", ["campaign"])
    (place / "bench" / "dumb-1.json").write_text('{"rows": []}')  # of an earlier run
    outcomes = {"good": (0, ["good-1"]), "bad": (3, ["bad-1"]), "dumb": (0, [])}
    ran = runs(monkeypatch, place, outcomes)
    assert campaign.main() == 1
    assert ran == ["good", "bad", "dumb"]
    said = capsys.readouterr().out
    assert "failed: bad: its command ended with status 3" in said
    assert "failed: dumb: its command wrote no dumb-1" in said
    outcomes |= {"bad": (0, ["bad-1"]), "dumb": (0, ["dumb-1"])}
    ran.clear()
    assert campaign.main() == 0
    assert ran == ["bad", "dumb"]
    kept = json.loads((place / FOLDER / "good-1.json").read_text())
    assert kept["rows"] == [{"way": "greedy", "tok/s": {"median": 1234, "low": 1200, "high": 1300}}]
    assert kept["wall_s"] >= 0
    resumed = json.loads((place / FOLDER / "bad-1.json").read_text())
    assert "wall_s" not in resumed  # the time of a part would pass for all of it


def test_figures_of_changed_files_are_measured_again(place, monkeypatch):
    monkeypatch.setattr(campaign, "CAMPAIGN_OF", (Benchmark("one", "one", ("one",), 1),))
    monkeypatch.setattr("sys.argv", ["campaign"])
    ran = runs(monkeypatch, place, {"one": (0, ["one"])})
    for name, times in (
        ("1234567-ab", 1),
        ("1234567-ab", 1),
        ("1234567+-ab", 2),
        ("1234567+-ab", 3),
    ):
        monkeypatch.setattr(campaign, "place", lambda name=name: place / name)
        assert campaign.main() == 0
        assert len(ran) == times


def test_a_benchmark_whose_files_were_changed_while_it_ran_fails(place, monkeypatch, capsys):
    monkeypatch.setattr(campaign, "CAMPAIGN_OF", (Benchmark("one", "one", ("one",), 1),))
    monkeypatch.setattr("sys.argv", ["campaign"])
    runs(monkeypatch, place, {"one": (0, ["one"])}, commit="1234567+")
    assert campaign.main() == 1
    assert "one: files were changed while it ran: measured is 1234567+" in capsys.readouterr().out
    assert not (place / FOLDER / "one.json").exists()


def test_a_benchmark_that_was_stopped_goes_on_at_its_next_round(tmp_path, monkeypatch):
    asked = []

    def of(round_of):
        asked.append(round_of)
        return {"runs": [round_of]}

    def both():
        return [harness.once(["served", n], lambda n=n: of(n)) for n in (0, 1)]

    assert both() == both() == [{"runs": [0]}, {"runs": [1]}]
    assert asked == [0, 1, 0, 1]  # by hand each is measured
    commit = "1234567"
    monkeypatch.setattr(harness, "machine", lambda: {"commit": commit})
    monkeypatch.setenv(harness.ROUNDS, str(tmp_path / "rounds"))
    harness.once(["served", 0], lambda: of(0))
    asked.clear()
    assert both() == both()
    assert asked == [1]
    for commit in ("7654321", "1234567+", "1234567+"):  # noqa: B007
        both()
    assert asked == [1] + 3 * [0, 1]  # of other code, and of files that nobody knows


def test_what_this_machine_cannot_measure_is_named_and_no_failure(place, monkeypatch, capsys):
    reason = "needs root"
    net = Benchmark("net", "net", ("net",), 1, why_not=lambda: reason)
    monkeypatch.setattr(campaign, "CAMPAIGN_OF", (net,))
    monkeypatch.setattr("sys.argv", ["campaign"])
    ran = runs(monkeypatch, place, {"net": (0, ["net"])})
    assert campaign.main() == 0
    assert "net: not measured: needs root" in capsys.readouterr().out
    reason = ""
    assert campaign.main() == 0
    assert ran == ["net"]


def test_the_model_and_its_draft_head_are_made_first(place, monkeypatch):
    words = "one MODEL --head HEAD"
    monkeypatch.setattr(campaign, "CAMPAIGN_OF", (Benchmark("one", words, ("one",), 1),))
    monkeypatch.setattr(campaign, "MODEL", place / "model")
    monkeypatch.setattr(campaign, "HEAD", place / "head")
    monkeypatch.setattr("sys.argv", ["campaign"])
    outcomes = {"sipipe": (0, []), "make_model.eagle": (0, []), "one": (0, ["one"])}
    ran = runs(monkeypatch, place, outcomes)
    assert campaign.main() == 0
    assert ran == ["sipipe", "make_model.eagle", "one"]
    for name in ("model", "head"):
        (place / name).mkdir()
    (place / FOLDER / "one.json").unlink()
    ran.clear()
    assert campaign.main() == 0
    assert ran == ["one"]


def test_an_unknown_name_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["campaign", "--only", "served,nothing", "--list"])
    with pytest.raises(SystemExit, match="--only nothing: none of served, "):
        campaign.main()


def written(folder, **rows):
    folder.mkdir(exist_ok=True)
    for name, each in rows.items():
        (folder / f"{name}.json").write_text(json.dumps({"rows": each}))
    return folder


def test_a_figure_that_left_its_own_range_is_named_in_either_direction(tmp_path):
    def row(way, middle, ratio=1.0):
        return {"sampling": way, "requests": 64, "tok/s": spread([middle - 5, middle, middle + 5]),
                "ratio": ratio, "KV tokens": int(middle)}  # fmt: skip

    before = written(
        tmp_path / "kept", a=[row("greedy", 100.0), row("chat", 100.0), row("all", 100.0)]
    )
    within = [(100.0, 0), (104.0, 0), (96.0, 0)]
    outside = [(109.0, 1), (91.0, 1), (111.0, 1), (89.0, 1)]
    for middle, differs in within + outside:
        after = [row("greedy", 100.0), row("chat", middle), row("all", 100.0)]
        now = written(tmp_path / "now", a=after)
        assert len(list(differences(now, before))) == differs
    (line,) = differences(now, before)
    assert line == "a: chat, 64: tok/s: 89 (84-94), kept 100 (95-105)"
    written(
        now, a=[row("greedy", 100.0, ratio=1.31), row("chat", 100.0, ratio=0.71), row("all", 100.0)]
    )
    assert list(differences(now, before)) == ["a: greedy, 64: ratio: 1.31, kept 1"]
    written(now, a=[row("greedy", 100.0), row("chat", 100.0), row("top-p", 100.0)], b=[])
    assert sorted(differences(now, before)) == [
        "a: all, 64: gone",
        "a: top-p, 64: new",
        "b: has not been kept before",
    ]


@pytest.mark.parametrize(
    ("then", "now", "differs"),
    [
        (spread([100.0]), spread([120.0]), False),  # one engine a side, which has no range
        (spread([100.0]), spread([131.0]), True),
        (spread([1.0, 1.0]), spread([1.01, 1.01]), False),  # rounded, and equal
        (spread([90.0, 110.0]), spread([105.0]), False),
        (spread([90.0, 110.0]), spread([115.0]), True),
        (100, 129, False),
        (100, 131, True),
        ([3.4, 7.9], [3.5, 8.9], False),
        ([3.4, 7.9], [3.5, 12.9], True),
        ([3.4, 7.9], [3.4], True),
        ("32/32", "31/32", True),
        ("valid", "valid", False),
        (None, None, False),
        (1.0, None, True),
        ({"lanes": [1]}, {"lanes": [2]}, False),  # a picture's data
    ],
)
def test_any_figure_of_a_row_is_compared(tmp_path, then, now, differs):
    def written_as(name, figure):
        row = {"way": "greedy", "ms": 1.0} | ({"it": figure} if figure is not None else {})
        return written(tmp_path / name, a=[row])

    assert len(list(differences(written_as("now", now), written_as("kept", then)))) == differs


def test_the_canary_measures_too_little_to_be_kept(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["campaign", "--canary", "--keep"])
    with pytest.raises(SystemExit):
        campaign.main()
    assert "leave --keep out" in capsys.readouterr().err


def test_rows_that_are_of_the_same_are_compared_in_order(tmp_path):
    before = written(tmp_path / "kept", a=[{"way": "x", "ms": 1.0}, {"way": "x", "ms": 9.0}])
    now = written(tmp_path / "now", a=[{"way": "x", "ms": 1.1}, {"way": "x", "ms": 1.0}])
    assert list(differences(now, before)) == ["a: x, 1: ms: 1, kept 9"]


def test_each_kept_result_can_be_compared():
    """Also one that has a picture's data."""
    assert not list(differences(results.RESULTS, results.RESULTS))


def test_the_canary_fails_where_a_ratio_left_its_range(tmp_path, monkeypatch, capsys):
    ratio = campaign.Ratio("r", "a: total | side=sipipe", "a: total | side=stock")
    monkeypatch.setattr(campaign, "RATIOS", (ratio, campaign.Ratio("s", "b: x")))
    kept = written(
        tmp_path / "kept", a=[{"side": "sipipe", "total": 4.0}, {"side": "stock", "total": 10.0}]
    )
    monkeypatch.setattr(results, "RESULTS", kept)
    now = [{"side": "sipipe", "total": 4.0}, {"side": "stock", "total": 9.0}]
    (line,) = campaign.canary(written(tmp_path / "now", a=now))
    assert line.startswith("s: cannot be compared: results b: there is no")
    assert "r: 0.4444, kept 0.4: as kept" in (said := capsys.readouterr().out)
    assert line in said
    now[1]["total"] = 5.0
    assert campaign.canary(written(tmp_path / "now", a=now)) == ["r: 0.8, kept 0.4", line]


def test_the_campaign_shows_its_commands():
    words = [sys.executable, "-m", "benchmarks.campaign", "--list", "--canary"]
    said = subprocess.run(
        words, capture_output=True, text=True, cwd=results.ROOT, check=True
    ).stdout
    assert "python -m benchmarks.start --quick" in said
    assert said.rstrip().endswith("in all")
