"""The report: what is encoded is what was recorded; the page works in a real browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from importlib.resources import files

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tools.report.made_up_trace import Example, write_example
from tests.tools.report.timeline import pipeline

from sipipe.observe.format import OLDER, RECORD, SUFFIX, encode_header, read_file
from sipipe.observe.phases import Phase
from sipipe.tools.report.accounting import SEGMENT, Cause
from sipipe.tools.report.export import write_perfetto
from sipipe.tools.report.reader import Trace, read_trace
from sipipe.tools.report.render import (
    QUANTUM_NS,
    column,
    lanes,
    page_data,
    record_lane,
    render,
    segment_lane,
)
from sipipe.tools.report.statistics import busiest, phase_table, utilization
from sipipe.tools.report.summary import NEXT, SCHEDULING, Run, next_step


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("example")
    made = []
    for name, stock in (("sipipe", False), ("stock", True)):
        spec = Example(stages=3, inflight=3 if stock else 4, iterations=300, stock=stock)
        write_example(base / name, spec)
        made.append(Run(read_trace(base / name)))
    return made


def decode(column, count):
    """What decode.js does."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(column["data"])), np.uint8)
    planes = planes.reshape(column["size"], count).T
    return np.ascontiguousarray(planes).view(f"<i{column['size']}").ravel().astype(np.int64)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([], 1),
        ([0, 127, -128], 1),
        ([128], 2),
        ([-40000, 5], 4),
        (range(-300, 300), 2),
        ([2**30], 4),
        ([-(2**31)], 4),
        ([2**31, -1], 8),
        ([2**40, 0, -(2**50), -(2**31) - 1], 8),
    ],
)
def test_column_round_trip(values, size):
    encoded = column(list(values))
    assert encoded["size"] == size
    assert decode(encoded, len(values)).tolist() == list(values)


HOUR = 3600 * 10**9
QUIET = st.one_of(st.integers(0, 10**6), st.integers(0, 40 * HOUR))


@given(st.lists(st.tuples(QUIET, QUIET), min_size=1, max_size=20))
def test_lanes_keep_every_time_whatever_lies_between(steps):
    """Quiet spells and intervals of hours: an interval stands where it was, to 100 ns."""
    begins = np.cumsum([gap for gap, _ in steps])
    records = np.zeros(len(steps), RECORD)
    records["start_ns"], records["end_ns"] = begins, begins + [span for _, span in steps]
    end = int(records["end_ns"].max())
    lane = record_lane("host", "stage 0", records, (0, end))
    starts = np.cumsum(decode(lane["columns"]["gap"], lane["count"]))
    ends = starts + decode(lane["columns"]["span"], lane["count"])
    assert abs(starts * QUANTUM_NS - records["start_ns"]).max() <= QUANTUM_NS // 2
    assert abs(ends * QUANTUM_NS - records["end_ns"]).max() <= QUANTUM_NS // 2

    segments = np.zeros(len(steps), SEGMENT)
    segments["end_ns"] = np.cumsum([span for _, span in steps])
    segments["start_ns"][1:] = segments["end_ns"][:-1]
    segments["iteration"] = segments["cause"] = np.arange(len(segments)) % 7
    lane = segment_lane("device", "stage 0", segments, 0)
    step, what = (decode(lane["columns"][name], len(segments)) for name in ("step", "what"))
    assert np.cumsum(step).tolist() == what.tolist() == segments["iteration"].tolist()
    ends = np.cumsum(decode(lane["columns"]["span"], lane["count"]))
    assert abs(ends * QUANTUM_NS - segments["end_ns"]).max() <= QUANTUM_NS // 2


def test_beyond_the_limit_host_lanes_are_left_out_and_named(runs):
    found, dropped = lanes(runs[0], detail=1)
    assert {lane["kind"] for lane in found} == {"device"}
    assert "executor" in dropped
    assert "stage 0 host" in dropped


def test_of_a_part_a_phase_takes_no_more_than_the_part(runs):
    trace = runs[0].trace
    stage = trace.of("stage")[0]
    longest = max(stage.records, key=lambda record: record["end_ns"] - record["start_ns"])
    begin, end = int(longest["start_ns"]), int(longest["end_ns"])
    window = (begin + (end - begin) // 4, begin + (end - begin) // 2)
    rows = {row["phase"]: row for row in phase_table(trace, window) if row["process"] == "stage 0"}
    row = rows[Phase(longest["phase"]).name.lower()]
    assert (row["count"], row["p50_ms"]) == (1, pytest.approx((end - begin) / 1e6))
    assert row["share"] == 1
    assert row["total_s"] == pytest.approx((window[1] - window[0]) / 1e9)


def test_the_page_is_one_file_that_asks_for_nothing(runs):
    page = render(runs)
    assert "{{" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']""", page.split("uPlot=")[0])
    assert "default-src 'none'" in page
    assert "Permission is hereby granted" in page  # uPlot's license travels with it
    assert len(page) < 1_500_000


def test_names_cannot_break_out_of_the_page(runs):
    named = {"label": "<b>x", "model": "</script><!--"}
    processes = tuple(
        replace(p, header=msgspec.structs.replace(p.header, **named))
        for p in runs[0].trace.processes
    )
    page = render([Run(Trace(processes, ("a </script> warning",)))])
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["runs"][0]["summary"]["model"] == "</script><!--"
    assert "<title>SiPipe trace: &lt;b>x</title>" in page


def test_summary_adds_up(runs):
    for run in runs:
        summary = run.summary
        assert sum(summary["share"].values()) == pytest.approx(1, abs=1e-12)
        assert summary["idle_s"] == summary["share"]["idle"] == 0
        for stage in summary["stage_table"]:
            assert sum(stage["ns"].values()) == sum(stage["cause_ns"].values()) == stage["wall_ns"]
        assert summary["tokens"] == 32 * summary["iterations"]
    ours, stock = (run.summary for run in runs)
    assert ours["share"]["busy"] > stock["share"]["busy"]
    assert ours["sampler_ms_per_sequence"] > 0
    assert stock["sampler_ms_per_sequence"] is None


def test_drafts_are_what_rows_and_tokens_say():
    """Of iterations without prompts: 4 requests, with 3 drafts of which 2 are right, and without."""
    passes = [(Phase.FORWARD, i, 10 * i, 10 * i + 9) for i in range(1, 5)]
    host = [(Phase.GATHER, i, 10 * i, 10 * i + 9) for i in range(1, 5)]
    host += [(Phase.UPDATE, i, 10 * i + 9, 10 * i + 10) for i in range(1, 5)]
    trace = pipeline([passes], host, inflight=1)
    executor, stage = (process.records for process in trace.processes)
    stage["tokens"] = [4, 7, 50, 4]
    stage["batch"] = [4, 7, 7, 4]
    gathered = executor["phase"] == Phase.GATHER
    executor["batch"][gathered] = [4, 7, 7, 4]
    executor["tokens"][gathered] = [4, 6, 6, 4]
    found = Run(trace).summary["drafts"]
    assert found == {"verified": 3, "accepted": pytest.approx(2 / 3), "a_pass": 1 + 2 / 12}
    executor["batch"][gathered] = 4
    assert Run(trace).summary["drafts"] is None


def test_a_sampler_and_the_one_that_took_its_place_are_one(small):
    base, _ = small
    trace = read_trace(base)
    first = next(p for p in trace.processes if p.header.role == "sampler" and len(p.cpu))
    alone = Run(trace).summary
    twice = replace(trace, processes=(*trace.processes, first))
    both = Run(twice).summary
    assert both["samplers"] == alone["samplers"]
    (name,) = {first.header.name}
    one, two = (utilization(t, t.window())["cores"][name] for t in (trace, twice))
    assert two == pytest.approx([2 * value for value in one])


def test_prefill_efficiency_is_what_devices_worked_while_there_were_prompts():
    from sipipe.cli.trace import bubbles

    first = [(Phase.FORWARD, 0, 0, 10), (Phase.FORWARD, 1, 10, 20), (Phase.FORWARD, 2, 50, 60)]
    last = [(Phase.FORWARD, i, begin + 10, end + 10) for _, i, begin, end in first]
    run = Run(pipeline([first, last], inflight=2))  # every iteration has more tokens than sequences
    assert run.summary["prefill_efficiency"] == pytest.approx((40 + 20) / (2 * (30 + 20)))
    assert "60.0%" in bubbles(run).caption
    for process in run.trace.processes:
        process.records["tokens"] = process.records["batch"]
    assert run.summary["prefill_efficiency"] == pytest.approx(0.6), "made once"
    assert Run(run.trace).summary["prefill_efficiency"] is None


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    base = tmp_path_factory.mktemp("small")
    write_example(base, Example(stages=2, iterations=40))
    return base, len(render([Run(read_trace(base))]))


def damaged(small, change):
    """The small example with one stage's file changed in memory, read again."""
    base, _ = small
    file = next(base.glob("stage-1*"))
    sound = file.read_bytes()
    data = bytearray(sound)
    change(data)
    file.write_bytes(data)
    try:
        return read_trace(base)
    finally:
        file.write_bytes(sound)


@pytest.mark.parametrize("field", ["start_ns", "end_ns"])
@pytest.mark.parametrize("bit", [57, 62, 63])
def test_a_time_centuries_away_is_left_out_with_one_line(small, field, bit):
    def change(data):
        records = np.frombuffer(data, RECORD, len(data) // 64, len(data) // 64 * 32)
        records[field][20] ^= np.int64(-(2**63) if bit == 63 else 2**bit)

    trace = damaged(small, change)
    assert [w for w in trace.warnings if "1 damaged records left out" in w]
    assert trace.window() == read_trace(small[0]).window()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4))
def test_wrong_bytes_anywhere_cost_neither_memory_nor_the_report(small, wrong):
    def change(data):
        for place, byte in wrong:
            data[int(place * len(data))] = byte

    run = Run(damaged(small, change))
    assert len(render([run])) < small[1] + 20_000
    for stage in run.account:
        assert sum(stage.by_cause) == run.wall_ns
    assert run.summary


def test_a_trace_whose_files_were_begun_anew_is_the_same_report(small, tmp_path):
    base, _ = small
    for file in base.glob(f"*{SUFFIX}"):
        header, records, _ = read_file(file)
        cut = len(records) // 3
        later = msgspec.structs.replace(header, since_ns=int(records["end_ns"][cut]))
        older = (tmp_path / file.name).with_suffix(OLDER)
        older.write_bytes(encode_header(header) + records[:cut].tobytes())
        (tmp_path / file.name).write_bytes(encode_header(later) + records[cut:].tobytes())
    whole, parts = Run(read_trace(base)), Run(read_trace(tmp_path))
    assert parts.summary | {"directory": ""} == whole.summary | {"directory": ""}
    assert write_perfetto(parts, tmp_path / "p.json") == write_perfetto(whole, tmp_path / "w.json")
    for one, other in zip(whole.account, parts.account, strict=True):
        assert one.by_cause == other.by_cause


def pause(trace, span):
    """The trace with ``span`` ns of nothing before iteration 150."""
    shifted = []
    for process in trace.processes:
        records = process.records.copy()
        late = records["iteration"] >= 150
        for field in ("start_ns", "end_ns"):
            records[field][late] += span
        shifted.append(replace(process, records=records))
    return Trace(tuple(shifted))


def test_tpot_is_a_slots_step_and_pauses_are_left_out(runs):
    run = runs[1]
    assert np.median(run.tpot_ms) == pytest.approx(3 * np.median(run.iteration_ms), rel=0.1)
    trace = run.trace
    paused = Run(pause(trace, 10**10))  # ten seconds without a request
    assert paused.wall_ns > run.wall_ns + 9 * 10**9
    assert paused.tpot_ms.max() < 2 * run.tpot_ms.max()
    assert paused.summary["share"]["unscheduled"] > 0.5


def test_an_idle_night_changes_no_figure_and_is_not_where_the_page_opens(runs):
    """The pause as an engine records it: no requests in ten seconds before iteration 150."""
    run, night = runs[0], 10**10
    paused = pause(run.trace, night)
    executor = paused.executor
    began = executor.phase(Phase.UPDATE)["end_ns"]
    late = executor.records[executor.records["iteration"] >= 150]["start_ns"].min()
    row = np.zeros(1, RECORD)
    row["phase"], row["start_ns"], row["end_ns"] = Phase.IDLE, began[began < late].max(), late
    records = np.sort(np.append(executor.records, row), order="start_ns", kind="stable")
    others = tuple(p for p in paused.processes if p is not executor)
    idle = Run(Trace((replace(executor, records=records), *others)))
    before, after = run.summary, idle.summary
    assert after["idle_s"] == pytest.approx(10, abs=0.1)
    assert after["share"]["idle"] > 0.7
    for kind in ("busy", "load_imbalance", "intra_stage", "inter_stage", "unscheduled"):
        assert after["share"][kind] == pytest.approx(before["share"][kind], abs=0.02)
    assert after["tokens_per_s"] == pytest.approx(before["tokens_per_s"], rel=0.02)
    first, last = idle.busiest()
    ends = idle.account[0].segments
    seen = ends[(ends["end_ns"] > idle.window[0] + first * 1e9)
                & (ends["start_ns"] < idle.window[0] + last * 1e9)]  # fmt: skip
    assert Cause.IDLE not in seen["cause"]
    assert len(np.unique(seen["iteration"])) >= 8


def test_the_page_opens_where_the_devices_are_busiest():
    """A burst of ten iterations in a minute with one now and then, away from the middle."""
    begins = [*range(0, 40_000, 1000), *range(50_000, 50_100, 10), *range(55_000, 60_000, 1000)]
    rows = [(Phase.FORWARD, i, begin, begin + 8) for i, begin in enumerate(begins)]
    trace = pipeline([rows, rows], inflight=2)
    assert busiest(trace, trace.window(), 100) == 50_000
    assert busiest(trace, trace.window(), 50) in range(50_000, 50_051)
    assert busiest(trace, trace.window(), 59_008) == 0


def test_the_longest_bubbles_are_of_every_cause_but_pauses(runs):
    """The page's own script: a bubble of each cause, of 1, 2, … seconds, and one that ends nothing."""
    if shutil.which("node") is None:
        pytest.skip("needs Node (node)")
    count = len(Cause)
    lane = {"kind": "device", "count": count + 1, "what": [*range(count), Cause.PREPARING]}
    lane |= {"iteration": [0] * count + [-1], "start": [0] * (count + 1)}
    lane["end"] = [*range(1, count + 2)]
    data = page_data(runs[:1]) | {"runs": [{"lanes": [lane]}]}
    told = "console.log(JSON.stringify(findLongest(99).map((b) => data.causes[b.lane.what[b.i]])))"
    tables = (files("sipipe.tools.report") / "page/tables.js").read_text()
    script = f"const data = {json.dumps(data)};\n{tables}\n{told}"
    found = subprocess.run(["node", "-e", script], capture_output=True, timeout=60, check=True)
    pauses = (Cause.BUSY, Cause.NOTHING, Cause.IDLE)
    bubbles = [cause.name.lower() for cause in reversed(Cause) if cause not in pauses]
    assert json.loads(found.stdout) == bubbles


def test_browser_opens_zooms_and_takes_a_picture(browser, runs, tmp_path):
    browser.open(render(runs), tmp_path / "report.html", 1000)
    # What the page decoded is what was accounted.
    totals = browser.run(
        """sipipe.lanes()[0].filter(l => l.kind === "device").map(l => {
             const sums = Array(13).fill(0);
             for (let i = 0; i < l.count; i++) sums[l.what[i]] += l.end[i] - l.start[i];
             return sums; })"""
    )
    for stage, sums in zip(runs[0].account, totals, strict=True):
        assert sums == pytest.approx([ns / 1e9 for ns in stage.by_cause], abs=2e-4)
    total = browser.run("sipipe.view().total")
    assert total == pytest.approx(max(r.wall_ns for r in runs) / 1e9)

    first = browser.run("sipipe.view()")
    assert first["to"] - first["from"] < total / 5  # a dozen iterations at first
    browser.run("sipipe.zoom(1, 2)")
    browser.settle()

    def key(name, text=""):
        for kind in ("keyDown", "keyUp"):
            told = text if kind == "keyDown" else ""
            browser.call("Input.dispatchKeyEvent", type=kind, key=name, text=told)

    browser.run("document.getElementById('timeline').focus()")
    key("+", "+")
    view = browser.run("sipipe.view()")
    assert (view["from"], view["to"]) == pytest.approx((1.25, 1.75))
    key("ArrowRight")
    assert browser.run("sipipe.view().from") == pytest.approx(1.375)
    key("0", "0")
    assert browser.run("sipipe.view()") == {"from": 0, "to": total, "total": total}
    browser.settle()

    left, top, width, height = browser.run(  # of the first timeline's plot, in page pixels
        "(() => { const b = document.querySelector('.u-over').getBoundingClientRect();"
        " return [b.left, b.top + scrollY, b.width, b.height]; })()"
    )
    browser.run("scrollTo(0, 0)")
    y = top + height / 2
    pressed = {"button": "left", "buttons": 1, "clickCount": 1}
    for kind, x in [("Pressed", 0.25), ("Moved", 0.4), ("Moved", 0.5), ("Released", 0.5)]:
        x = left + width * x
        browser.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **pressed)
    view = browser.run("sipipe.view()")
    assert view["from"] == pytest.approx(0.25 * total, abs=0.01 * total)
    assert view["to"] == pytest.approx(0.5 * total, abs=0.01 * total)

    browser.run("sipipe.zoom(1.0, 1.1)")
    browser.settle()
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width / 2, y=top + 40)
    assert "iteration" in browser.run("document.getElementById('tip').textContent")
    for name, dark in (("light", False), ("dark", True)):
        browser.size(1280, 1000, dark=dark)
        browser.settle()
        picture = tmp_path / f"{name}.png"
        browser.screenshot(picture)
        assert picture.stat().st_size > 50_000
    # Coloured: the first stage's lane has the colours of several slots.
    colours = browser.run(
        """(() => { const c = document.querySelector(".u-wrap canvas"), x = c.getContext("2d");
             const d = x.getImageData(0, Math.round(c.height * 0.17), c.width, 1).data, found = new Set();
             for (let i = 0; i < d.length; i += 4) found.add(d.slice(i, i + 3).join());
             return found.size; })()"""
    )
    assert colours >= 5
    assert browser.problems() == []


def test_browser_shows_what_follows_a_quiet_night_where_it_was(browser, runs, tmp_path):
    run = Run(pause(runs[0].trace, 12 * HOUR))
    browser.open(render([run]), tmp_path / "report.html", 900)
    for index, stage in enumerate(run.account):
        want = (stage.segments["start_ns"] - run.window[0]) / 1e9
        shown = browser.run(
            f"Array.from(sipipe.lanes()[0].filter(l => l.name === 'device')[{index}].start)"
        )
        assert shown == pytest.approx(want, abs=2e-7)
    shown = browser.run("Array.from(sipipe.lanes()[0].find(l => l.name === 'executor').end)")
    records = run.trace.executor.phase(window=run.window)
    ends = np.minimum(records["end_ns"], run.window[1]) - run.window[0]
    assert shown == pytest.approx(ends / 1e9, abs=2e-7)
    assert browser.problems() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*NEXT, "none"])
def test_the_next_step_is_of_the_largest_kind_of_bubble(kind):
    share = dict.fromkeys(NEXT, 0.01) | {"busy": 0.6}
    if kind != "none":
        share[kind] = 0.3
    said = next_step(share)
    assert said.startswith("The devices are busy 60% of the time with requests.")
    assert ("30%" in said) is (kind != "none")
    assert kind == "none" or NEXT[kind][0] in said
    assert (SCHEDULING[0] in next_step(share, 0.9)) is (kind == "unscheduled")


def test_every_iteration_time_and_busy_share_of_the_page_says_which_it_is(browser, tmp_path):
    write_example(tmp_path, Example(stages=2, iterations=120))
    run = Run(read_trace(tmp_path))
    browser.open(render([run]), tmp_path / "report.html", 900)
    text = "document.querySelector('{}').textContent".format
    tile = browser.run("[...document.querySelectorAll('.tile')].map(t => t.textContent)[2]")
    mean = re.search(r"mean ([\d.]+) ms", tile)[1]
    bars = browser.run("[...document.querySelectorAll('#breakdown .end')].map(e => e.textContent)")
    assert {bar.removesuffix(" ms") for bar in bars} == {mean}
    last = browser.run("document.querySelector('#bubbles tbody tr:last-child').textContent")
    assert last.startswith("Time with requests")
    assert f"{mean}" in last
    assert last.endswith("100%")
    assert browser.run(text("#next")) == run.summary["next"]


def test_browser_opens_a_hundred_thousand_iterations(browser, tmp_path):
    write_example(tmp_path, Example(iterations=100_000, inflight=5))
    run = Run(read_trace(tmp_path))
    page = render([run])
    assert len(page) < 16_000_000
    browser.open(page, tmp_path / "report.html", 1000)
    counts = browser.run("sipipe.lanes()[0].map(l => l.count)")
    assert sum(counts) > 3_000_000
    # Every level of detail draws: whole run, by bins, by intervals, single boxes.
    for span in (run.wall_ns / 1e9, 300, 20, 1, 0.1):
        browser.run(f"sipipe.zoom(100, {100 + span})")
        browser.settle()
    assert browser.problems() == []
