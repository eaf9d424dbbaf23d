"""The pages' figures are those of the kept results."""

import json
import re

import pytest
from benchmarks import results, sources
from benchmarks.goals import Goal
from benchmarks.results import PAGES, RESULTS, ROOT, TABLES, pictures, timeless, unfounded, written

LONGEST = 60_000
"""Characters of a picture."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_was_kept(name):
    page = (ROOT / name).read_text()
    assert timeless(written(page)) == timeless(page), "python -m benchmarks.results writes it anew"


def test_the_pictures_of_the_tree_are_those_of_the_kept_results():
    kept = pictures()
    found = re.compile(r'src(?:set)?="([^"]+)"').findall
    shown = found((ROOT / "README.md").read_text())
    shown += [f"docs/{name}" for name in found((ROOT / "docs/benchmarks.md").read_text())]
    assert sorted(kept) == sorted(shown)
    for name, picture in kept.items():
        assert (ROOT / name).read_text() == picture, "python -m benchmarks.results draws it anew"
        assert len(picture) <= LONGEST


def test_every_kept_result_is_shown():
    shown = (ROOT / TABLES).read_text()
    names = {path.stem for path in RESULTS.glob("*.json")}
    wanted = re.findall(r"<!-- (?:results|=\??) ([\w.*-]+)", shown)
    assert names == {
        name for name in names if any(re.fullmatch(w.replace("*", ".*"), name) for w in wanted)
    }


def test_a_kept_result_can_be_measured_again_and_says_what_code_it_measures():
    for path in RESULTS.glob("*.json"):
        kept = json.loads(path.read_text())
        assert not unfounded(kept), path.name
        assert not re.search(r'"/[^"]*/bin/', path.read_text()), "a path of the machine's own"
        assert kept["sources"].keys() == sources.sources(path.stem).keys(), path.name
        assert "stale" not in kept, "that is computed"
    names = {path.stem for path in RESULTS.glob("*.json")}
    for name in sources.MEASURED:
        assert any(f"{each}-".startswith(f"{name}-") for each in names | {"split"}), name


@pytest.mark.parametrize(
    ("command", "commit", "word"),
    [
        ("sipipe bench m", "1234567", ""),
        ("python -m benchmarks.paper all --quick", "1234567", ""),
        ("python -m benchmarks.nothing", "1234567", "none of this repository"),
        ("python paper5.py", "1234567", "none of this repository"),
        ("make bench-stage", "1234567+", "files that are not those of 1234567"),
        ("make bench-stage", None, "no commit"),
    ],
)
def test_what_cannot_be_measured_again_is_not_kept(command, commit, word, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "PAGES", ())
    monkeypatch.setattr(results, "sources", lambda *_: {})
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"command": command, "machine": {"commit": commit}}))
    monkeypatch.setattr("sys.argv", ["results", "--keep", str(file)])
    if word:
        with pytest.raises(SystemExit, match=word):
            results.main()
    else:
        assert results.main() == 0
    assert (tmp_path / "results/a.json").exists() is not bool(word)


@pytest.mark.parametrize("name", [TABLES, "docs/benchmarks.md"])
def test_a_page_of_figures_has_none_of_its_own_in_tables(name):
    page = (ROOT / name).read_text()
    own = re.sub(r"<!-- (results |goals|=).*?<!-- end -->", "", page, flags=re.DOTALL)
    results = [line.split("|")[3] for line in own.splitlines() if line.startswith("| ")]
    assert not re.search(r"\d", "".join(results)), "let a comment show what results hold"


def test_what_is_stale_is_named_with_the_command_that_measures_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    measured = {"waking": sources.sources("waking"), "stage-cpu": {"sipipe/worker": "x"}}
    for name, then in measured.items():
        kept = {"command": f"python -m benchmarks.{name} --full", "sources": then}
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    monkeypatch.setattr("sys.argv", ["results", "--stale"])
    assert results.main() == 1
    assert capsys.readouterr().out.splitlines()[:3] == [
        "stale: 1 of 2 kept results",
        "stage-cpu: changed since: sipipe/worker",
        "    python -m benchmarks.stage-cpu --full",
    ]
    (tmp_path / "stage-cpu.json").unlink()
    assert results.main() == 0


def test_emulated_figures_are_also_of_what_emulates_and_ablates():
    found = sources.sources("emulation").keys()
    assert found >= {"benchmarks/emulate.py", "benchmarks/ablation.py"}
    for part in {part for parts in sources.MEASURED.values() for part in parts}:
        assert (sources.ROOT / "src" / part).exists() or (sources.ROOT / part).exists(), part


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ablation-cpu", "benchmarks/ablation.py"),
        ("advice", "sipipe/cli/advice.py"),
        ("bench", "sipipe/cores.py"),
        ("prefill-apart", "deploy/prefill_router.py"),
        ("sampling-columns", "benchmarks/paper_columns.py"),
        ("split", "benchmarks/asleep.py"),
        ("start", "sipipe/cli"),
    ],
)
def test_what_a_figure_is_also_of(name, part):
    found = sources.sources(name)
    assert found[part] != sources._digest("nothing", ""), "there is such code"
    assert part == "sipipe/cores.py" or part not in sources.sources("serving-bench-pp2")
    assert "sipipe/engine" in found or name in ("advice", "sampling-columns")


def test_a_comment_makes_nothing_stale_and_code_does(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    file = tmp_path / "src/sipipe/sampler/a.py"
    file.parent.mkdir(parents=True)

    def digests(text):
        file.write_text(text)
        sources._files.cache_clear()
        sources._digest.cache_clear()
        return sources.sources("sampling-sizes")

    kept = {"sources": digests('"""One."""\nx = 1\n\ndef f():\n    "Two."\n    return x\n')}
    digests("# three\nx = 1\ndef f():\n    return (x)\n")
    assert sources.changed("sampling-sizes", kept) == []
    digests("x = 2\ndef f():\n    return x\n")
    assert sources.changed("sampling-sizes", kept) == ["sipipe/sampler"]
    assert sources.changed("sampling-sizes", {}) == [*kept["sources"]]
    sources._files.cache_clear()
    sources._digest.cache_clear()


def test_a_figure_in_a_cell_leaves_the_table_as_it_is():
    for name in PAGES:
        for line in (ROOT / name).read_text().splitlines():
            if line.startswith("|"):
                for comment in re.findall(r"<!--.*?-->", line):
                    assert not re.search(r"(?<!\\)\|", comment), f"{name}: {comment}"


def test_a_table_shows_the_chosen_rows_and_columns(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.results.ROOT", tmp_path)
    (tmp_path / "a.json").write_text(
        '{"title": "T", "note": "", "machine": {"cpu": "C", "cores": 2, "date": "D"},'
        ' "sources": {},'
        ' "rows": [{"way": "greedy", "tok/s": 1234.5, "twice": 2469.0}, {"way": "all", "tok/s": 0.123456}]}'
    )
    page = "<!-- results a: tok/s | way=all -->\nold\n<!-- end --> <!-- = a: way | way=all -->?<!-- end -->"
    new = written(page)
    assert "| 0.1235 |" in new
    assert "1,234" not in new
    assert "**Stale**: its code has changed since." in new
    assert "Stale" not in timeless(new)
    assert new.endswith("<!-- = a: way | way=all -->all<!-- end -->")
    half = "<!-- = a: tok/s over twice | way=greedy -->"
    assert written(f"{half}<!-- end -->") == f"{half}0.5<!-- end -->"
    marked = half.replace("=", "=?", 1)
    assert written(f"{marked}<!-- end -->") == f"{marked}0.5†<!-- end -->"
    assert timeless(f"{marked}0.5†<!-- end -->") == f"{marked}0.5<!-- end -->"
    assert written(r"<!-- = a: way \| way=all --><!-- end -->").endswith("-->all<!-- end -->")
    assert written(new) == new
    goal = Goal("p", "g", "a: tok/s | way=greedy", least=2, beside="a: twice | way=greedy")
    monkeypatch.setattr("benchmarks.results.GOALS", (goal, goal._replace(least=0.5, unit="s")))
    goals = written("<!-- goals -->\n<!-- end -->")
    assert "1,234 / 2,469† | no |" in goals
    assert "1,234 / 2,469† s | yes |" in goals
    assert "Not measured yet." in written("<!-- results c* -->\nold\n<!-- end -->")
    for wrong in ("<!-- results b -->\n<!-- end -->", "<!-- = a: tok/s -->1<!-- end -->"):
        with pytest.raises(SystemExit, match=r"a\b|b\b"):
            written(wrong)
