"""`benchmarks.paper` without engines: its data files are commands that bench takes."""

import contextlib
import io
import itertools
import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from benchmarks import paper
from benchmarks.pictures import DRAWN

from sipipe.cli import bench, main
from sipipe.errors import SiPipeError
from tests.tools.report.made_up_trace import Example, write_example

START = {
    "startup_s": 1.0,
    "plan": [],
    "kv_tokens": 4096,
    "memory_mib": {"sipipe": 10, "VLLM::Worker": 20},
}
FIGURES = sorted(path.stem for path in paper.FIGURES.glob("*.json"))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What was started; a traced engine leaves a trace."""
    started = []

    def start(name, job, module, timeout=0):
        started.append(name)
        words = " ".join(job["command"])
        if found := re.search(r'[^\s"=]*/sipipe-paper-[^\s"]*', words):
            write_example(
                found[0], Example(stages=2, iterations=60, stock=name.startswith("stock"))
            )
        run = {"output_throughput": 10.0 + len(started), "span": [0.0, 1.0]} | {
            f"p{q}_{metric}_ms": float(q) for q in paper.PERCENTILES for metric in ("ttft", "tpot")
        }
        loads = [f"{way} {count}" for way, count, *_ in job["loads"]]
        return START | {"runs": {load: [run] * job["repeat"] for load in loads}}

    def run(command, **_):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = bench.main(command[command.index("bench") + 1 :])
        return SimpleNamespace(returncode=status, stdout=out.getvalue())

    monkeypatch.setattr(bench, "require_vllm", lambda: None)
    monkeypatch.setattr(bench, "measured", start)
    monkeypatch.setattr(paper, "subprocess", SimpleNamespace(run=run, PIPE=None))
    looks = [(0.3, {"cpu": 50.0}), (0.6, {"cpu": 75.0}), (2.0, {"cpu": 99.0})]
    monkeypatch.setattr(paper, "utilization", lambda: contextlib.nullcontext(looks))
    monkeypatch.setattr(paper, "make_model", lambda *_, **__: None)
    monkeypatch.setattr(paper, "BUILD", tmp_path)
    monkeypatch.setattr("benchmarks.harness.BUILD", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ShareGPT_V3_unfiltered_cleaned_split.json").touch()
    return started


@pytest.mark.parametrize(
    "scale",
    [s if s == "cpu" else pytest.param(s, marks=pytest.mark.slow) for s in paper.SCALES],
)
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_leaves_data_a_picture_and_a_table(name, scale, measured, tmp_path, capsys):
    figure = json.loads((paper.FIGURES / f"{name}.json").read_text())
    assert paper.main([name, "--scale", scale]) == 0
    if scale not in figure["scales"]:
        assert figure["differs"] in capsys.readouterr().out
        return
    assert measured
    (picture,) = (tmp_path / "paper").glob("*.svg")
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    (data,) = (tmp_path / "paper").glob("*.json")
    kept = json.loads(data.read_text())
    assert figure["paper"] in kept["note"]
    assert figure["differs"] in kept["note"]
    assert kept["rows"]
    assert set(kept["columns"]) <= set(kept["rows"][0])
    assert not set(kept["columns"]) & {"cores", *itertools.chain(*DRAWN.values())}
    assert all({"KV tokens", "cores"} <= set(row) for row in kept["rows"])
    drawn = picture.read_bytes()
    picture.unlink()
    assert paper.main([str(data)]) == 0, "the picture is drawn again from what was kept"
    assert picture.read_bytes() == drawn


def test_rows_less_a_part_say_who_has_the_projection():
    """An extension, which takes the part away, keeps "auto" from sharing it out: that would be two
    parts less. (On GPUs the panels' models have it on the last stage with "auto" too.)"""
    rows = json.loads((paper.FIGURES / "ablation.json").read_text())["scales"]["cpu"]["rows"]
    less = {name: row for name, row in rows.items() if "without" in row and isinstance(row, dict)}
    assert len(less) > 8
    assert {name for name, row in less.items() if "vocabulary" not in row} == set()


def test_the_list_and_what_is_not_in_it(capsys):
    assert paper.main(["LIST"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == FIGURES
    with pytest.raises(SiPipeError, match='"figure-1" is none of ablation, batch'):
        paper.main(["figure-1"])
    with pytest.raises(SiPipeError, match=r"batch.json is no figure's data"):
        paper.main([str(paper.FIGURES / "batch.json")])
    assert paper.main(["ablation", "--scale", "16xh100", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, "ablation: nothing at the scale 16xh100" in printed.err) == ("", True)


def test_a_row_that_fails_is_named_and_left_out(measured, monkeypatch, capsys):
    works = bench.measured

    def start(name, job, module, timeout=0):
        if name == "stock-one":
            raise SiPipeError("bench: stock-one failed: no memory")
        return works(name, job, module)

    monkeypatch.setattr(bench, "measured", start)
    argv = ["bench", "MODEL", "--pp", "2", "--draws", "0", "--json"]
    assert main([*argv, "--rows", "sipipe,stock-one,stock", "--engines", "2"]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert list(dict.fromkeys(row["engine"] for row in found["rows"])) == ["sipipe", "stock"]
    assert found["failed"] == {"stock-one": "bench: stock-one failed: no memory"}
    assert printed.err.count("no memory") == 1, "it is not started again"
    assert main([*argv, "--rows", "stock-one"]) == 1
    assert capsys.readouterr().err.endswith("stock-one failed: no memory\n")
