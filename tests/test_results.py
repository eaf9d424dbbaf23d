"""The pages' figures are those of the kept results."""

import re

import pytest
from benchmarks.results import PAGES, RESULTS, ROOT, written


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_was_kept(name):
    page = (ROOT / name).read_text()
    assert written(page) == page, "python -m benchmarks.results writes it anew"


def test_every_kept_result_is_shown():
    shown = "".join((ROOT / name).read_text() for name in PAGES)
    names = {path.stem for path in RESULTS.glob("*.json")}
    wanted = re.findall(r"<!-- (?:results|=) ([\w.*-]+)", shown)
    assert names == {
        name for name in names if any(re.fullmatch(w.replace("*", ".*"), name) for w in wanted)
    }


def test_no_kept_result_names_a_path_of_the_machine_that_it_is_from():
    for path in RESULTS.glob("*.json"):
        assert not re.search(r'"/[^"]*/bin/', path.read_text()), path.name


def test_the_page_of_benchmarks_has_no_table_of_its_own():
    page = (ROOT / "docs/benchmarks.md").read_text().split("## Earlier comparisons")[0]
    own = re.sub(r"<!-- results .*?<!-- end -->", "", page, flags=re.DOTALL)
    assert "\n|" not in own, "keep the figures in benchmarks/results, and let a comment show them"


def test_a_table_shows_the_chosen_rows_and_columns(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.results.RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.results.ROOT", tmp_path)
    (tmp_path / "a.json").write_text(
        '{"title": "T", "note": "", "machine": {"cpu": "C", "cores": 2, "date": "D"},'
        ' "stale": "of old code",'
        ' "rows": [{"way": "greedy", "tok/s": 1234.5}, {"way": "all", "tok/s": 0.123456}]}'
    )
    page = "<!-- results a: tok/s | way=all -->\nold\n<!-- end --> <!-- = a: way | way=all -->?<!-- end -->"
    new = written(page)
    assert "| 0.1235 |" in new
    assert "1,234" not in new
    assert "**Stale:** of old code." in new
    assert new.endswith("<!-- = a: way | way=all -->all<!-- end -->")
    assert written(new) == new
    assert "Not measured yet." in written("<!-- results c* -->\nold\n<!-- end -->")
    for wrong in ("<!-- results b -->\n<!-- end -->", "<!-- = a: tok/s -->1<!-- end -->"):
        with pytest.raises(SystemExit, match=r"a\b|b\b"):
            written(wrong)
