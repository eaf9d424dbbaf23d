"""The pages' figures are those of the kept results."""

import json
import re

import pytest
from benchmarks import results
from benchmarks.harness import cell, numbers, spread
from benchmarks.results import PAGES, ROOT, names, pictures, unfounded, written

LONGEST = 60_000
"""Characters of a picture."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_was_kept(name):
    page = (ROOT / name).read_text()
    assert written(page) == page, "python -m benchmarks.results writes it anew"


def test_the_pictures_of_the_tree_are_those_of_the_kept_results():
    kept = pictures()
    found = re.compile(r'src(?:set)?="([^"]+)"').findall
    shown = found((ROOT / "README.md").read_text())
    shown += [f"docs/{name}" for name in found((ROOT / "docs/benchmarks.md").read_text())]
    assert sorted(kept) == sorted(shown)
    for name, picture in kept.items():
        assert (ROOT / name).read_text() == picture, "python -m benchmarks.results draws it anew"
        assert len(picture) <= LONGEST


def test_every_kept_result_is_cited_by_a_page_for_people():
    pages = "".join((ROOT / name).read_text() for name in PAGES if name != results.INDEX)
    wanted = re.findall(r"<!-- (?:results|=|source) ([\w.*-]+)|results/([\w.-]+)\.json", pages)
    goals = re.findall(r'"([\w.-]+): ', results.GOALS.read_text("utf-8"))
    cited = {one or other for one, other in wanted} | set(goals)
    assert not set(names()) - cited


def test_a_kept_result_can_be_measured_again_and_its_figures_are_numbers():
    for name in names():
        kept = results.kept(name)
        assert not unfounded(kept), name
        assert not re.search(r'"/[^"]*/bin/', json.dumps(kept)), "a path of the machine's own"
        assert kept["rows"] == [numbers(row) for row in kept["rows"]], name


def test_no_page_marks_a_figure():
    for name in PAGES:
        text = (ROOT / name).read_text()
        assert not re.search(r"†|\*\*Stale\*\*|<!-- =\?", text), name


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
    file = tmp_path / "a.json"
    rows = [
        {
            "tok/s": "1,230 (224-1,236)",
            "ratio": "1.60",
            "stages": "1, 2",
            "of": "16 of 16",
            "ends": "1.5 / 2,500",
        }
    ]
    result = {"command": command, "machine": {"commit": commit}, "rows": rows}
    file.write_text(json.dumps(result))
    monkeypatch.setattr("sys.argv", ["results", "--keep", str(file)])
    if word:
        with pytest.raises(SystemExit, match=word):
            results.main()
        assert not (tmp_path / "results/a.json").exists()
        return
    assert results.main() == 0
    (row,) = json.loads((tmp_path / "results/a.json").read_text())["rows"]
    assert row["tok/s"] == {"median": 1230, "low": 224, "high": 1236}
    assert (row["ratio"], row["stages"], row["of"]) == (1.6, "1, 2", "16 of 16")
    assert (row["ends"], cell(row["ends"])) == ([1.5, 2500], "1.5 / 2500")


@pytest.mark.parametrize("name", [results.INDEX, "docs/benchmarks.md"])
def test_a_page_of_figures_has_none_of_its_own_in_tables(name):
    page = (ROOT / name).read_text()
    own = re.sub(r"<!-- (results |goals|index |=).*?<!-- end -->", "", page, flags=re.DOTALL)
    cells = [line.split("|")[3] for line in own.splitlines() if re.match(r"\|.*\|.*\|.*\|", line)]
    assert not re.search(r"\d", "".join(cells)), "let a comment show what results hold"


def test_a_figure_in_a_cell_leaves_the_table_as_it_is():
    for name in PAGES:
        for line in (ROOT / name).read_text().splitlines():
            if line.startswith("|"):
                for comment in re.findall(r"<!--.*?-->", line):
                    assert not re.search(r"(?<!\\)\|", comment), f"{name}: {comment}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Kept results of nothing but ``a``."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    machine = {"cpu": "C", "cores": 2, "date": "2026-01-02", "commit": "1234567", "sipipe": "1.2"}
    result = {"title": "T", "note": "", "command": "make bench-a", "machine": machine}
    rows = [
        {"way": "greedy", "tok/s": 1234.5, "twice": spread([2469.0, 2000.0, 3000.0])},
        {"way": "all", "tok/s": 0.123456, "twice": 1},
    ]
    (tmp_path / "a.json").write_text(json.dumps(result | {"rows": rows}))
    return tmp_path


def test_a_table_shows_the_chosen_rows_and_columns(folder):
    page = "<!-- results a: tok/s | way=all -->\nold\n<!-- end --> <!-- = a: way | way=all -->?<!-- end -->"
    new = written(page)
    assert "| 0.1235 |" in new
    assert "1,234" not in new
    assert new.endswith("<!-- = a: way | way=all -->all<!-- end -->")
    half = "<!-- = a: tok/s over twice | way=greedy -->"
    assert written(f"{half}<!-- end -->") == f"{half}0.5<!-- end -->"
    assert written(r"<!-- = a: way \| way=all --><!-- end -->").endswith("-->all<!-- end -->")
    assert "| 2,469 (2,000-3,000) |" in written("<!-- results a: twice -->\n<!-- end -->")
    assert written(new) == new
    for wrong in ("<!-- results b -->\n<!-- end -->", "<!-- = a: tok/s -->1<!-- end -->"):
        with pytest.raises(SystemExit, match=r"a\b|b\b"):
            written(wrong)


def test_a_page_that_names_what_is_not_there_keeps_no_other_from_being_written(folder, monkeypatch):
    monkeypatch.setattr(results, "ROOT", folder)
    monkeypatch.setattr(results, "PAGES", ("bad.md", "good.md"))
    comment = "<!-- = a: way | way=all -->"
    (folder / "bad.md").write_text("<!-- = none: way -->?<!-- end -->")
    (folder / "good.md").write_text(f"{comment}?<!-- end -->")
    with pytest.raises(SystemExit, match=r"bad\.md: results none: there is no"):
        results.write()
    assert (folder / "good.md").read_text() == f"{comment}all<!-- end -->"


def test_a_goal_is_met_or_not_by_the_kept_figure(folder, monkeypatch):
    goal = 'goal = "g"\nfigure = "a: tok/s | way=greedy"\nbeside = "a: twice | way=greedy"\n'
    (folder / "goals.toml").write_text(
        'changed = ["c"]\ngiven_up = []\n'
        f'[[goal]]\npart = "p"\n{goal}least = 2\n[[goal]]\npart = "q"\n{goal}least = 0.5\nunit = "s"\n'
    )
    monkeypatch.setattr(results, "GOALS", folder / "goals.toml")
    goals = written("<!-- goals -->\n<!-- end -->")
    assert "| p | g | 1,234 / 2,469 (2,000-3,000) | **no** |" in goals
    assert "| q | g | 1,234 / 2,469 (2,000-3,000) s | yes |" in goals


def test_a_page_says_once_what_its_figures_were_measured_on(folder):
    page = "<!-- results *: way -->\n<!-- end --><!-- measured --><!-- end -->"
    assert (
        written("<!-- measured --><!-- end -->")
        == "<!-- measured -->Nothing is measured yet.<!-- end -->"
    )
    assert (
        "on 2026-01-02 with SiPipe 1.2 (commit 1234567, vLLM ) on C, 2 cores by `make c"
        in written(page)
    )
    other = json.loads((folder / "a.json").read_text())
    other["machine"] |= {"gpus": ["G"], "commit": "7654321"}
    (folder / "b.json").write_text(json.dumps(other))
    assert "by `make campaign`" in written(page), "one with a GPU is not of the campaign"
    other["machine"] |= {"gpus": [], "date": "2025-12-31"}
    (folder / "b.json").write_text(json.dumps(other))
    assert "2025-12-31 to 2026-01-02 at 2 commits" in written(page)
    elsewhere = other | {"elsewhere": True}
    (folder / "b.json").write_text(json.dumps(elsewhere))
    index = written("<!-- index campaign -->\n<!-- end --><!-- index elsewhere -->\n<!-- end -->")
    ours, theirs = index.split("<!-- index elsewhere -->")
    assert "a.json" in ours
    assert "b.json" not in ours
    assert "b.json" in theirs
    (folder / "b.json").unlink()
    (folder / "hosts.json").write_text(json.dumps(other))
    asked = written("<!-- index elsewhere -->\n<!-- end -->")
    assert "hosts.json" in asked, "what the campaign measures only where it is asked for"


def test_a_figure_of_another_machine_stays_one_when_it_is_kept_anew(folder):
    result = json.loads((folder / "a.json").read_text())
    (folder / "a.json").write_text(json.dumps(result | {results.ELSEWHERE: True}))
    (folder / "new").mkdir()
    (folder / "new/a.json").write_text(json.dumps(result))
    results.keep(folder / "new/a.json")
    assert results.is_from_elsewhere("a")
