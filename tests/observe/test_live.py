"""The statistics page: discovery, single writers, and the live estimate of bubbles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sipipe.observe.format import Header, TraceError
from sipipe.observe.live import BUBBLES, LivePage, PageHeader, Word, find, run_id
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import open_recorder
from sipipe.tools.report.accounting import KINDS, account
from sipipe.tools.report.example import Example, write_example
from sipipe.tools.report.reader import read_trace


@pytest.fixture
def page():
    made = LivePage.create(PageHeader(stages=2, samplers=2, ranks=2, inflight=3, model="tiny"))
    yield made
    made.close()


def test_every_block_is_its_own(page):
    blocks = list(page.blocks)
    assert blocks == [
        ("executor", 0, 0), ("stage", 0, 0), ("stage", 0, 1), ("stage", 1, 0), ("stage", 1, 1),
        ("sampler", 0, 0), ("sampler", 1, 0),
    ]  # fmt: skip
    assert len(set(page.blocks.values())) == 7
    for number, block in enumerate(blocks):
        page.writer(*block).set(Word.RUNNING, number)
    assert [page.read(*b)[Word.RUNNING] for b in blocks] == list(range(7))
    for wrong in (("stage", 2, 0), ("stage", 0, 2), ("sampler", 2, 0), ("executor", 1, 0)):
        with pytest.raises(KeyError):
            page.writer(*wrong)


def test_another_process_writes_and_is_seen(page):
    program = (
        "import sys\n"
        "from sipipe.observe.live import LivePage, PageHeader, Word\n"
        "page = LivePage.attach(sys.argv[1])\n"
        "assert page.header.model == 'tiny'\n"
        "writer = page.writer('sampler', 1)\n"
        "writer.add(Word.FALLBACKS, 3); writer.add(Word.FALLBACKS)\n"
    )
    subprocess.run([sys.executable, "-c", program, page.path], check=True, timeout=60)
    assert page.read("sampler", 1)[Word.FALLBACKS] == 4


def test_pages_are_found_by_run_and_by_process(page):
    mine = (page.header.pid, page.header.created_ns)

    def found(**by):
        pages = find(**by)
        keys = [(p.header.pid, p.header.created_ns) for p in pages]
        for p in pages:
            p.close()
        return keys

    assert mine in found()
    assert mine in found(run=run_id())
    assert mine in found(pid=os.getpid())
    assert mine in found(pid=os.getppid())
    assert mine not in found(run="another")
    assert mine not in found(pid=2**22 + 1)


def test_a_page_is_gone_with_its_owner():
    program = (
        "from sipipe.observe.live import LivePage, PageHeader\n"
        "page = LivePage.create(PageHeader(stages=1, samplers=0))\n"
        "print(page.path, flush=True)\n"
        "input()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    path = owner.stdout.readline().strip()
    page = LivePage.attach(path)
    assert page.alive()
    owner.kill()
    owner.communicate()
    assert not page.alive()
    page.close()
    with pytest.raises(TraceError, match="No such file"):
        LivePage.attach(path)


def test_a_closed_page_is_over_for_those_who_have_it_mapped():
    page = LivePage.create(PageHeader(stages=1, samplers=0))
    other = LivePage.attach(page.path)
    page.close()
    page.close()
    assert not other.alive()
    other.close()


def test_what_is_no_page_is_refused(tmp_path):
    file = tmp_path / "x"
    file.write_bytes(bytes(4096))
    with pytest.raises(TraceError, match="not a SiPipe statistics page"):
        LivePage.attach(str(file))


def test_recorder_without_a_file_feeds_the_page(page):
    recorder = open_recorder(None, Header(role="sampler", index=1), [page.writer("sampler", 1)])
    recorder.record(Phase.WAIT_LOGITS, 4, 0, 0, 1000, batch=8)
    recorder.record(Phase.SAMPLE, 4, 0, 1000, 3000, batch=8, tokens=8)
    words = page.read("sampler", 1)
    assert words[Word.MAIN_NS] == 2000
    assert words[Word.SEQUENCES] == words[Word.TOKENS] == 8
    assert words[Word.PHASE_LAST + Phase.WAIT_LOGITS] == 5


@pytest.mark.parametrize("stock", [True, False])
def test_live_estimate_agrees_with_the_report(tmp_path, stock):
    """The same timeline through the page, in order of time, and through the accounting."""
    spec = Example(stages=3, inflight=3 if stock else 4, iterations=400, stock=stock)
    write_example(tmp_path, spec)
    trace = read_trace(tmp_path)
    page = LivePage.create(PageHeader(stages=3, samplers=2, inflight=spec.inflight))
    records = []
    for process in trace.processes:
        writer = page.writer(process.header.role, process.header.index)
        records += [(r[1], r[0], writer, r) for r in process.records.tolist()]
    for _, _, writer, (start, end, i, batch, tokens, phase, _, _) in sorted(
        records, key=lambda r: r[:2]
    ):
        writer.phase(phase, i, start, end, batch, tokens)
    exact = account(trace)
    for stage in exact.stages:
        words = page.read("stage", stage.index)
        live = [words[Word.BUSY_NS + k] / exact.wall_ns for k in range(len(KINDS))]
        want = [ns / exact.wall_ns for ns in stage.by_kind]
        assert live == pytest.approx(want, abs=0.01), stage.index
    page.close()


def test_time_without_requests_is_no_bubble(page):
    stage, executor = page.writer("stage", 0), page.writer("executor")
    executor.phase(Phase.DISPATCH, 0, 0, 5, 1, 1)
    stage.phase(Phase.FORWARD, 0, 10, 20, 1, 1)
    executor.phase(Phase.GATHER, 0, 5, 25, 1, 1)
    executor.set(Word.IDLE_FROM, 30)
    executor.set(Word.IDLE_TO, 930)
    executor.phase(Phase.DISPATCH, 1, 930, 940, 1, 1)
    stage.phase(Phase.FORWARD, 1, 950, 960, 1, 1)
    words = page.read("stage", 0)
    assert words[Word.BUSY_NS] == 20
    bubbles = [words[word] for word in BUBBLES.values()]
    assert sum(bubbles) == 930 - 900  # between the forwards, without the time from 30 to 930
