"""Recording and reading back: threads, full buffers, damaged and foreign files, clocks."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sipipe.errors import ConfigError
from sipipe.messages.start_records import Watched
from sipipe.observe import recorder as recorder_module
from sipipe.observe.format import (
    CPU,
    OLDER,
    PACK,
    RECORD,
    SUFFIX,
    Header,
    TraceError,
    encode_header,
)
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import open_recorder
from sipipe.tools.report.reader import read_trace


def write(path, header, rows, tail=b""):
    """A trace file made by hand; rows are (phase, iteration, start, end)."""
    data = b"".join(PACK.pack(s, e, i, 1, 1, p, 0, 0) for p, i, s, e in rows)
    path.write_bytes(encode_header(header) + data + tail)


def test_round_trip(tmp_path):
    directory = tmp_path / "made" / "as needed"
    recorder = open_recorder(
        directory, Header(role="stage", index=1, rank=2, stages=4, inflight=5, run="r", model="m")
    )
    rows = [(Phase.FORWARD, i, i % 5, 1000 * i, 1000 * i + 900, 7, 9) for i in range(1000)]
    for row in rows:
        recorder.record(*row)
    recorder.close()
    recorder.close()
    trace = read_trace(directory)
    assert not trace.warnings
    (process,) = trace.processes
    header = process.header
    assert (header.role, header.index, header.rank, header.pid) == ("stage", 1, 2, os.getpid())
    assert (header.model, header.name) == ("m", "stage 1 rank 2")
    assert (trace.stages, trace.inflight) == (header.stages, header.inflight) == (4, 5)
    names = ["phase", "iteration", "slot", "start_ns", "end_ns", "batch", "tokens"]
    assert process.records[names].tolist() == rows


def test_iterations_beyond_32_bits_go_round(tmp_path):
    recorder = open_recorder(tmp_path, Header(role="stage", index=0, stages=1, inflight=2, run="r"))
    for iteration in (2**32 - 1, 2**32, 2**32 + 1):
        recorder.record(Phase.FORWARD, iteration, 0, 1, 2)
    recorder.close()
    (process,) = read_trace(tmp_path).processes
    assert process.records["iteration"].tolist()[:3] == [2**32 - 1, 0, 1]


def test_threads_record_without_loss(tmp_path):
    """Four threads, each more than the queue holds, while the spiller runs."""
    recorder = open_recorder(tmp_path, Header(role="stage"))
    each = 20_000

    def work(thread):
        for i in range(each):
            recorder.record(Phase.PREPARE, i, thread, thread * each + i, thread * each + i)
            if i % 5000 == 4999:
                recorder.spill()  # some other thread may spill at any time

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    lock = threading.Lock()
    spill = type(recorder).spill

    def one_at_a_time(self):  # the queue has one reader: the test has to keep to that
        with lock:
            spill(self)

    type(recorder).spill = one_at_a_time
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.close()
    finally:
        type(recorder).spill = spill
    records = read_trace(tmp_path).processes[0].records
    assert (np.sort(records["start_ns"]) == np.arange(4 * each)).all()
    for thread in range(4):
        own = records[records["slot"] == thread]
        assert (own["iteration"] == np.arange(each)).all()
        assert len(np.unique(own["thread"])) == 1


def test_a_full_queue_drops_and_says_so(tmp_path, monkeypatch):
    """The spiller does not get to run: the newest are dropped, and nobody waits."""
    monkeypatch.setattr(recorder_module, "CAPACITY", 64)
    monkeypatch.setattr(recorder_module, "INTERVAL", 3600)
    recorder = open_recorder(tmp_path, Header(role="sampler"))
    for i in range(100):
        recorder.record(Phase.SAMPLE, i, 0, i, i + 1)
    recorder.spill()
    for i in range(100, 130):
        recorder.record(Phase.SAMPLE, i, 0, i, i + 1)
    recorder.close()
    trace = read_trace(tmp_path)
    (process,) = trace.processes
    assert process.records["iteration"].tolist() == [*range(64), *range(100, 130)]
    assert process.dropped == 36
    assert "36 records dropped" in trace.warnings[0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(3000, 20_000),
    st.lists(st.integers(0, 30), min_size=1, max_size=60),
    st.integers(0, 5),
)
def test_a_trace_has_its_limit_and_the_newest_records(limit, spills, torn):
    """Whatever is recorded between two spills; ``torn`` bytes of a killed process's last record."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "INTERVAL", 3600)
        header = Header(role="stage", stages=1, run="r", model="m")
        recorder = open_recorder(directory, header, limit=limit)
        recorded, now = 0, time.monotonic_ns()
        for count in spills:
            for _ in range(count):
                now = max(now + 1, time.monotonic_ns())
                recorder.record(Phase.FORWARD, recorded, 0, now - 1, now, 1, 1)
                recorded += 1
            recorder.spill()
            assert sum(f.stat().st_size for f in Path(directory).iterdir()) <= limit
        recorder.close()
        if torn:
            (current,) = (f for f in Path(directory).iterdir() if not f.name.endswith(OLDER))
            with current.open("ab") as file:
                file.write(bytes(torn))
        files = len(list(Path(directory).iterdir()))
        assert files <= 2
        trace = read_trace(directory)
        (process,) = trace.processes
        kept = process.records["iteration"].tolist()
        assert kept == list(range(recorded - len(kept), recorded))
        # Half of the limit at least, less the header and what one spill brings.
        assert len(kept) >= min(recorded, (limit // 2 - 600) // RECORD.itemsize - max(spills) - 1)
        assert any("gave way" in warning for warning in trace.warnings) == bool(process.since_ns)
        if len(kept) < recorded:
            assert process.since_ns is not None
            assert files == 2


def test_the_window_begins_where_every_process_has_its_records(tmp_path):
    """Also where the records of one give way sooner than those of another."""
    header = Header(role="stage", stages=2, monotonic_ns=0)
    rows = [(Phase.FORWARD, i, 10 * i, 10 * i + 9) for i in range(20)]
    write(tmp_path / f"a{SUFFIX}", header, rows)
    later = msgspec.structs.replace(header, index=1, since_ns=60)
    write(tmp_path / f"b{OLDER}", later, rows[6:12])
    write(tmp_path / f"b{SUFFIX}", msgspec.structs.replace(later, since_ns=120), rows[12:])
    trace = read_trace(tmp_path)
    assert [len(process.records) for process in trace.processes] == [20, 14]
    assert trace.window() == (60, 199)
    assert [w for w in trace.warnings if "the begin gave way" in w]
    (tmp_path / f"b{OLDER}").unlink()
    assert read_trace(tmp_path).window() == (120, 199)


def test_a_disk_that_is_full_when_a_file_is_begun_ends_the_recording(tmp_path, monkeypatch, capfd):
    recorder = open_recorder(tmp_path, Header(role="stage"), limit=4096)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "_begin", full)
    for i in range(200):
        recorder.record(Phase.FORWARD, i, 0, i, i + 1)
    recorder.spill()
    recorder.record(Phase.FORWARD, 200, 0, 200, 201)  # without effect
    recorder.close()
    assert "No space left" in capfd.readouterr().err


def test_a_killed_process_leaves_a_usable_file(tmp_path):
    program = (
        "import os, sys, time\n"
        "from sipipe.observe.format import RECORD, Header\n"
        "from sipipe.observe.phases import Phase\n"
        "from sipipe.observe.recorder import open_recorder\n"
        "recorder = open_recorder(sys.argv[1], Header(role='stage'))\n"
        "[file] = os.scandir(sys.argv[1])\n"
        "whole = os.stat(file).st_size + 100 * RECORD.itemsize\n"
        "for i in range(100): recorder.record(Phase.FORWARD, i, 0, i, i + 1)\n"
        "while os.stat(file).st_size < whole: time.sleep(0.01)\n"
        "print('recorded', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "recorded\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(read_trace(tmp_path).processes[0].records) == 100


def test_a_process_that_ends_without_close_loses_nothing(tmp_path):
    program = (
        "import sys\n"
        "from sipipe.observe.format import Header; from sipipe.observe.phases import Phase\n"
        "from sipipe.observe.recorder import open_recorder\n"
        "recorder = open_recorder(sys.argv[1], Header(role='stage'))\n"
        "recorder.record(Phase.FORWARD, 1, 0, 1, 2)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert len(read_trace(tmp_path).processes[0].records) == 1


def test_unwritable_directory_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to") as caught:
        open_recorder(tmp_path / "file" / "below", Header(role="stage"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.ESTALE])
def test_a_process_that_comes_later_goes_on_without_a_trace(tmp_path, monkeypatch, capfd, error):
    """As a sampler in a dead one's place: its own start would fail, and that of each one behind it."""

    def refuse(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(recorder_module.Recorder, "_begin", refuse)
    watched = Watched(stages=2, inflight=3, model="m", run="r", trace=str(tmp_path))
    recorder = recorder_module.record_process(watched, "sampler", 1)
    recorder.record(Phase.FORWARD, 1, 0, 1, 2)
    recorder.close()
    said = capfd.readouterr().err
    assert os.strerror(error) in said
    assert said.count("\n") == 1


def test_a_directory_in_which_a_file_can_be_made_and_not_filled_is_refused(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))  # in the place of a full disk
    try:
        with pytest.raises(ConfigError, match=r"cannot write to .* name a directory"):
            recorder_module.check_directory(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    recorder_module.check_directory(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_damaged_and_foreign_files_get_one_line_each_and_the_rest_is_used(tmp_path):
    good = Header(role="stage", stages=1, pid=1, host="h")
    rows = [(Phase.FORWARD, i, 10 * i, 10 * i + 5) for i in range(10)]
    write(tmp_path / f"a{SUFFIX}", good, rows)
    write(tmp_path / f"cut{SUFFIX}", Header(role="sampler", host="h"), rows, tail=b"half a record")
    (tmp_path / f"foreign{SUFFIX}").write_bytes(b"PNG and so on" * 10)
    (tmp_path / f"empty{SUFFIX}").write_bytes(b"")
    for name, size in (("header", 30), ("padding", -1)):
        (tmp_path / f"{name}{SUFFIX}").write_bytes(encode_header(good)[:size])
    garbled = bytearray(encode_header(good))
    garbled[40] = 0x81  # not UTF-8
    (tmp_path / f"garbled{SUFFIX}").write_bytes(garbled)
    newer = bytearray(encode_header(good))
    newer[8] = 99
    (tmp_path / f"newer{SUFFIX}").write_bytes(newer)
    backwards = [*rows, (Phase.FORWARD, 10, 200, 100)]
    write(tmp_path / f"backwards{SUFFIX}", Header(role="executor", host="h"), backwards)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "report.html").write_text("ours")
    trace = read_trace(tmp_path)
    assert [p.header.role for p in trace.processes] == ["executor", "stage", "sampler"]
    assert [len(p.records) for p in trace.processes] == [10, 10, 10]
    warnings = {os.path.basename(w.split(":")[0]): w for w in trace.warnings}
    assert "cut off in the middle" in warnings[f"cut{SUFFIX}"]
    assert "not a SiPipe trace" in warnings[f"foreign{SUFFIX}"]
    assert "not a SiPipe trace" in warnings[f"empty{SUFFIX}"]
    for name in ("header", "padding", "garbled"):
        assert "damaged or cut off" in warnings[f"{name}{SUFFIX}"]
    assert "trace format 99" in warnings[f"newer{SUFFIX}"]
    assert "1 damaged" in warnings[f"backwards{SUFFIX}"]
    assert "not a SiPipe trace" in warnings["notes.txt"]
    assert len(warnings) == 9
    assert not any("\n" in w for w in trace.warnings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no such directory"),
        ("", "no trace files"),
        ("file", "not a directory; give the one named by --trace"),
    ],
)
def test_nothing_to_read_is_one_line(tmp_path, name, message):
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / name)


def test_only_the_latest_run_of_a_directory_is_read(tmp_path):
    rows = [(Phase.FORWARD, 0, 0, 1)]
    for run, at in (("old", 100), ("new", 200)):
        for index in range(2):
            header = Header(role="stage", index=index, run=run, realtime_ns=at, host="h")
            write(tmp_path / f"{run}{index}{SUFFIX}", header, rows)
    trace = read_trace(tmp_path)
    assert {p.header.run for p in trace.processes} == {"new"}
    assert "2 files of earlier runs" in trace.warnings[0]


@pytest.mark.parametrize(
    ("head", "other"),
    [({"host": "a"}, {"host": "b"}), ({"host": "a", "boot": "x"}, {"host": "a", "boot": "y"})],
    ids=["two names", "one name"],
)
def test_hosts_are_aligned_by_the_wall_clock_of_the_head(tmp_path, head, other):
    a = Header(role="executor", **head, monotonic_ns=1000, realtime_ns=1_000_000)
    b = Header(role="stage", **other, monotonic_ns=7000, realtime_ns=1_000_500)
    write(tmp_path / f"e{SUFFIX}", a, [(Phase.SCHEDULE, 0, 0, 10)])
    write(tmp_path / f"s{SUFFIX}", b, [(Phase.FORWARD, 0, 7000, 7010)])
    trace = read_trace(tmp_path)
    assert trace.of("stage")[0].records["start_ns"].tolist() == [1500]
    assert not trace.warnings


def test_its_thread_begins_with_the_first_record(tmp_path):
    """Workers are forked before: with it they would import vLLM anew (engine.forking.may_fork)."""

    def spillers():
        return [thread for thread in threading.enumerate() if thread.name == "sipipe-trace"]

    before = spillers()
    open_recorder(tmp_path, Header(role="executor")).close()  # an engine that did not come so far
    recorder = open_recorder(tmp_path, Header(role="executor"))
    assert spillers() == before
    recorder.record(Phase.IDLE, 0, 0, 1, 2)
    assert len(spillers()) == len(before) + 1
    recorder.close()
    assert spillers() == before


def test_cpu_time_is_sampled(tmp_path):
    recorder = open_recorder(tmp_path, Header(role="stage"))
    recorder.record(Phase.FORWARD, 0, 0, 1, 2)
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    recorder.close()
    (process,) = read_trace(tmp_path).processes
    assert process.cpu["cpu_ns"].sum() >= 45_000_000
    assert CPU not in process.records["phase"]


def test_record_layout_is_fixed():
    """Files of other versions are read: the layout is part of the format."""
    assert RECORD.itemsize == 32
    assert [RECORD.fields[n][1] for n in RECORD.names] == [0, 8, 16, 20, 24, 28, 29, 30]
    names = "SCHEDULE DISPATCH WAIT_SCHEDULING PREPARE WAIT_HIDDEN FORWARD SEND LOGITS "
    names += "WAIT_LOGITS SAMPLE GATHER UPDATE IDLE"
    assert [p.name for p in Phase] == names.split()
    assert [p.value for p in Phase] == list(range(13))
