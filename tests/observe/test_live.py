"""The statistics page: discovery, single writers, and the live estimate of bubbles."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest
from tests.tools.report.timeline import pipeline

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
    write_example(
        tmp_path, Example(iterations=400, inflight=3 + (not stock), stages=3, stock=stock)
    )
    agree(read_trace(tmp_path), 0.01)


@pytest.mark.parametrize("inflight", [1, 3, 4])
@pytest.mark.parametrize("forwards", [(40, 40, 40), (20, 30, 60), (90, 30, 30)])
def test_it_agrees_where_every_stage_multiplies(forwards, inflight):
    agree(shared_projection(forwards, inflight), 1e-9)


def shared_projection(forwards, inflight, product=30, iterations=60):
    """A trace of stages that all have a part of the output projection: each runs what has come
    first, a pass or a product, and the last one multiplies behind its pass."""
    p, draw = len(forwards), random.Random(0)
    stages: list[list[Any]] = [[] for _ in forwards]
    executor, free, now = [], [0] * p, 0
    ready: list[tuple[int, int, Phase, int]] = []  # when, stage, what, iteration
    missing: dict[int, int] = {}

    def dispatch(i, at):
        executor.append((Phase.DISPATCH, i, at, at + 2))
        ready.append((at + 2, 0, Phase.FORWARD, i))
        missing[i] = p

    for i in range(inflight):
        dispatch(i, now := now + 5)
    while ready:
        at, s, phase, i = min(ready, key=lambda task: (max(task[0], free[task[1]]), task[3]))
        ready.remove((at, s, phase, i))
        begin = max(at, free[s]) + 1
        end = begin + draw.randint(-5, 5) + (product if phase == Phase.LOGITS else forwards[s])
        if phase == Phase.FORWARD:
            if s and at > free[s]:
                stages[s].append((Phase.WAIT_HIDDEN, i, free[s], at))
            stages[s].append((Phase.FORWARD, i, begin, end))
            stages[s].append((Phase.SEND, i, end, end + 3))
            if s < p - 1:
                ready.append((end + 4, s + 1, Phase.FORWARD, i))
            else:
                ready += [(end + 5, other, Phase.LOGITS, i) for other in range(p - 1)]
                ready.append((0, s, Phase.LOGITS, i))
                end += 3
        else:
            stages[s] += [(Phase.LOGITS, i, begin, end), (Phase.HANDOVER, i, end, end + 2)]
            end += 2
            missing[i] -= 1
            if not missing[i]:
                executor.append((Phase.GATHER, i, end, end + 8))
                if i + inflight < iterations:
                    dispatch(i + inflight, end + 10)
        free[s] = end
    return pipeline(stages, executor, inflight=inflight)


def agree(trace, within):
    """The same timeline through the page, in order of time, and through the accounting, from a
    stage's first forward pass to its last."""
    page = LivePage.create(PageHeader(stages=3, samplers=2, inflight=trace.inflight))
    records = []
    for process in trace.processes:
        writer = page.writer(process.header.role, process.header.index)
        records += [(r[1], r[0], writer, r) for r in process.records.tolist()]
    for _, _, writer, (start, end, i, batch, tokens, phase, _, _) in sorted(
        records, key=lambda r: r[:2]
    ):
        writer.phase(phase, i, start, end, batch, tokens)
    for index, process in enumerate(trace.of("stage")):
        passes = process.phase(Phase.FORWARD)
        exact = account(trace, (int(passes["start_ns"][0]), int(passes["end_ns"][-1])))
        words = page.read("stage", index)
        live = [words[Word.BUSY_NS + k] / exact.wall_ns for k in range(len(KINDS))]
        want = [ns / exact.wall_ns for ns in exact.stages[index].by_kind]
        assert live == pytest.approx(want, abs=within), index
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
