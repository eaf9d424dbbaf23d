"""`sipipe trace` and `sipipe top`, by their real output."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.perfetto import numbers
from tests.tools.report.made_up_trace import Example, write_example

from sipipe.cli import main, top
from sipipe.observe.format import SUFFIX
from sipipe.observe.live import LivePage, PageHeader, Word, find
from sipipe.observe.phases import Phase
from sipipe.tools.report.export import _microseconds


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    base = tmp_path_factory.mktemp("example")
    for name, stock in (("sipipe", False), ("stock", True)):
        spec = Example(stages=2, iterations=60, stock=stock, inflight=2 if stock else 3)
        write_example(base / name, spec)
    return base


def test_report_writes_a_page_and_prints_the_bubbles(example, capsys):
    ours, stock = example / "sipipe", example / "stock"
    assert main(["trace", "report", str(ours), "--against", str(stock)]) == 0
    out = capsys.readouterr().out
    assert "load imbalance" in out
    assert "tokens/s" in out
    assert f"written to {ours / 'report.html'}" in out
    assert "<!doctype html>" in (ours / "report.html").read_text()
    # A second report: the page in the directory is not taken for a trace.
    assert main(["trace", "report", str(ours), "-o", str(example / "x.html")]) == 0
    assert capsys.readouterr().err == ""


def test_two_runs_of_one_engine_are_named_by_their_directories(
    example, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "[other]"):
        shutil.copytree(example / "stock", tmp_path / name / "trace")
    compared = ["one/trace", "--against", "[other]/trace", "--output", "x.html"]
    assert main(["trace", "report", *compared]) == 0
    out = capsys.readouterr().out
    assert "one/trace: " in out
    assert "[other]/trace: " in out
    page = Path("x.html").read_text()
    assert "one/trace against [other]/trace" in page
    assert '"label":"[other]/trace"' in page


def test_a_directorys_name_may_be_no_text(example, tmp_path):
    """In the page's title, where two runs of one engine are beside each other."""
    traces = [tmp_path / os.fsdecode(name) for name in (b"one\xe9", b"two\xe9")]
    for trace in traces:
        shutil.copytree(example / "stock", trace)
    page = tmp_path / "x.html"
    first, second = map(str, traces)
    assert main(["trace", "report", first, "--against", second, "-o", str(page)]) == 0
    assert f"{tmp_path}/one? against {tmp_path}/two?" in page.read_text(encoding="utf-8")


def test_report_json(example, capsys):
    capsys.readouterr()
    more = ["--against", str(example / "stock"), "--from", "0.1", "--to", "0.3"]
    assert main(["trace", "report", str(example / "sipipe"), "--json", *more]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [r["stages"] for r in runs] == [2, 2]
    assert runs[0]["wall_s"] == pytest.approx(0.2)
    assert sum(runs[0]["share"].values()) == pytest.approx(1)


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_export_opens_as_chrome_trace(example, tmp_path, name):
    file = tmp_path / name
    assert main(["trace", "export", str(example / "sipipe"), "--perfetto", str(file)]) == 0
    read = gzip.open if name.endswith("gz") else open
    with read(file, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert any(n.startswith("stage 1") for n in names)
    assert {p.name.lower() for p in (Phase.FORWARD, Phase.SCHEDULE)} <= {e["name"] for e in slices}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in slices)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    tracks = itertools.groupby(
        sorted(slices, key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"])),
        key=lambda e: (e["pid"], e["tid"]),
    )
    for track, group in tracks:
        assert track in named
        ends = []
        for one in group:  # they follow each other or nest: others Perfetto drops
            end = one["ts"] + one["dur"]
            while ends and ends[-1] <= one["ts"] + 1e-3:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3, one
            ends.append(end)


def test_a_part_is_exported_from_its_own_begin_and_slots_have_their_tracks(example, tmp_path):
    file = tmp_path / "part.json"
    part = ["--from", "0.1", "--to", "0.2"]
    assert main(["trace", "export", str(example / "sipipe"), "--perfetto", str(file), *part]) == 0
    slices = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert min(e["ts"] for e in slices) == pytest.approx(0, abs=1e-3)
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(1e5)
    slots = {}
    for one in slices:
        if "slot" in one["args"]:
            slots.setdefault((one["pid"], one["tid"]), set()).add(one["args"]["slot"])
    assert all(len(found) == 1 for found in slots.values())


def test_perfettos_own_trace_processor_takes_every_slice(example, tmp_path):
    file = tmp_path / "run.json"
    assert main(["trace", "export", str(example / "sipipe"), "--perfetto", str(file)]) == 0
    written = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    slices, short, lost, tracks = numbers(
        file,
        "select count(*) from slice",
        "select count(*) from slice where dur < 0",
        "select coalesce(sum(value), 0) from stats where severity in ('error', 'data_loss')",
        "select count(distinct track_id) from slice",
    )
    assert (slices, short, lost) == (len(written), 0, 0)
    assert tracks == len({(e["pid"], e["tid"]) for e in written})


@given(st.integers(0, 10**15))
def test_nanoseconds_survive_microseconds(ns):
    assert int(_microseconds(ns) * 1000) == ns


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("trace report /nowhere", 1, "no such directory"),
        ("trace report REPLICAS", 1, "did you mean {0}/sipipe or {0}/stock?"),
        ("trace report DIR --from soon", 2, "--from: must be a number"),
        ("trace report DIR --detail -1", 2, "--detail: must be a whole number of 0"),
        ("trace report", 2, "required: DIR"),
        ("trace report DIR --js", 2, "unrecognized arguments: --js"),
        ("trace export DIR --perf x", 2, "required: --perfetto"),
        ("trace reprot DIR", 2, "invalid choice: 'reprot'"),
        ("trace report DIR --from 1e6", 1, "nothing between --from and --to"),
        ("trace report DIR -o /nowhere/x.html", 2, "--output"),
        ("trace export DIR", 2, "--perfetto"),
        ("trace export DIR --perfetto /nowhere/x", 1, "--perfetto"),
        ("top --pid 4194305", 1, "no running SiPipe server"),
        ("top --pid me", 2, "--pid: invalid int value"),
        ("top --interval 0", 2, "--interval: must be"),
        ("top --intervall 2", 2, "unrecognized arguments: --intervall"),
    ],
)
def test_mistakes_get_one_line(example, capsys, line, status, message):
    capsys.readouterr()
    places = {"DIR": example / "sipipe", "REPLICAS": example}
    assert main([str(places.get(word, word)) for word in line.split()]) == status
    error = capsys.readouterr().err
    assert message.format(example) in error
    assert error.count("\n") == 1


def test_a_foreign_file_is_one_line_and_the_rest_is_used(example, tmp_path, capsys):
    shutil.copytree(example / "stock", tmp_path, dirs_exist_ok=True)
    (tmp_path / f"foreign{SUFFIX}").write_bytes(b"something else entirely")
    assert main(["trace", "report", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "foreign" in shown.err
    assert json.loads(shown.out)["runs"][0]["iterations"] > 50


@pytest.fixture
def server(monkeypatch):
    """A page of this process, and nothing of engines that other tests run under it."""

    def ours(pid=None):
        return [page for page in find(pid=pid) if page.header.pid == os.getpid()]

    monkeypatch.setattr("sipipe.cli.top.find", ours)
    page = LivePage.create(PageHeader(stages=2, samplers=1, inflight=3, model="tiny-llama"))
    for index in range(2):
        page.writer("stage", index).phase(Phase.FORWARD, 7, 0, 10**6, 4, 4)
    page.writer("executor").set(Word.RUNNING, 12)
    yield page
    page.close()


def top_once(server, capsys, *more):
    pid = str(server.header.pid)
    assert main(["top", "--once", "--interval", "0.1", "--pid", pid, *more]) == 0
    return capsys.readouterr().out


def test_top_once(server, capsys):
    out = top_once(server, capsys)
    for text in ("tiny-llama", "TTFT - ms", "running 12", "in flight 0/3", "sampler", "device"):
        assert text in out


def test_top_cuts_nothing_at_80_columns(server, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stage, executor = server.writer("stage", 1), server.writer("executor")
    for number in range(3):
        stage.phase(Phase.PREPARE, number + 8, 10**6, 10**9, 4, 4)
        stage.phase(Phase.FORWARD, number + 8, (number + 1) * 10**9, 2 * 10**9, 4, 4)
    executor.add(Word.TOKENS, 123_456)
    executor.add(Word.FIRST_TOKENS)
    executor.add(Word.TTFT_NS, 5 * 10**10)
    for word in (Word.RUNNING, Word.WAITING, Word.INFLIGHT):
        executor.set(word, 2048)
    out = top_once(server, capsys)
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    for whole in ("TPOT", "waiting 2048", "queue", "Ctrl-C"):
        assert whole in out


def test_the_first_view_is_of_a_whole_interval(server, monkeypatch):
    waited = []

    def view(*_, **__):
        assert waited == [7.0]
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr(top, "Live", view)
    assert main(["top", "--interval", "7", "--pid", str(server.header.pid)]) == 130


def test_top_json(server, capsys):
    found = json.loads(top_once(server, capsys, "--json"))
    assert found["model"] == "tiny-llama"
    assert [s["iteration"] for s in found["stages"]] == [7, 7]


def test_top_asks_which_of_two_servers(server, capsys):
    other = LivePage.create(PageHeader(stages=1, samplers=0, model="another"))
    try:
        assert main(["top", "--once", "--pid", str(server.header.pid)]) == 2
        error = capsys.readouterr().err
        assert "--pid" in error
        assert "another" in error
    finally:
        other.close()
