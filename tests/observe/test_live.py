"""The statistics page: discovery, single writers."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sipipe.observe.format import Header, TraceError
from sipipe.observe.live import LivePage, PageHeader, Word, find, run_id
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import open_recorder


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
    assert [page.block(b)[Word.RUNNING] for b in blocks] == list(range(7))
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
        "writer.add(Word.RESTARTS, 3); writer.add(Word.RESTARTS)\n"
    )
    subprocess.run([sys.executable, "-c", program, page.path], check=True, timeout=60)
    assert page.block(("sampler", 1, 0))[Word.RESTARTS] == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_opens_no_page_of_another_user(page):
    assert page.header.run in {found.header.run for found in find()}
    os.chown(page.path, 12345, 12345)
    assert page.header.created_ns not in {found.header.created_ns for found in find()}
    with pytest.raises(TraceError, match="another user"):
        LivePage.attach(page.path)


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


def test_a_page_is_found_beside_what_is_none_and_what_closes_meanwhile(page, monkeypatch):
    damaged = LivePage.create(page.header)
    with open(damaged.path, "r+b") as file:
        file.seek(8)
        file.write(b"?")  # its header is being written, or another version's
    with pytest.raises(TraceError, match="statistics page /proc/"):
        LivePage.attach(damaged.path)
    unfinished = os.memfd_create("sipipe-live")
    read, closed = os.readlink, []

    def readlink(link):
        if str(link).startswith(f"/proc/{os.getpid()}/") and not closed:
            closed.append(link)
            raise FileNotFoundError(link)
        return read(link)

    # The page's own descriptor is the last one, and those before it are in the way.
    last = os.dup(int(Path(page.path).name))
    monkeypatch.setattr(os, "readlink", readlink)
    found = find(pid=os.getpid())
    monkeypatch.undo()
    for descriptor in (last, unfinished):
        os.close(descriptor)
    damaged.close()
    assert closed
    assert page.header.created_ns in {one.header.created_ns for one in found}
    for one in found:
        one.close()


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
    recorder = open_recorder(None, Header(role="sampler", index=1), page.writer("sampler", 1))
    recorder.record(Phase.WAIT_LOGITS, 4, 0, 0, 1000, batch=8)
    recorder.record(Phase.SAMPLE, 4, 0, 1000, 3000, batch=8, tokens=8)
    words = page.block(("sampler", 1, 0))
    assert words[Word.PHASE_NS + Phase.SAMPLE] == 2000
    assert words[Word.SEQUENCES] == words[Word.TOKENS] == 8
    assert words[Word.PHASE_LAST + Phase.WAIT_LOGITS] == 5


def test_a_process_that_comes_again_goes_on_with_its_figures(page):
    for _ in range(2):  # a sampler and its successor
        theirs = LivePage.attach(page.path)
        writer = theirs.writer("sampler", 1)
        writer.phase(Phase.WAIT_LOGITS, 3, 100, 200, 7, 8)
        writer.phase(Phase.SAMPLE, 3, 100, 110, 7, 8)
        del writer
        theirs.close()
    words = page.block(("sampler", 1, 0)).tolist()
    assert words[: Word.TOKENS + 1] == [2, 14, 16]
    assert words[Word.PHASE_NS + Phase.SAMPLE] == 20
    assert words[Word.PHASE_NS + Phase.WAIT_LOGITS] == 200


def test_a_server_that_a_program_starts_as_a_command_has_its_own_identity():
    told = "from sipipe.observe.live import run_id; print(run_id(), run_id())"
    ours = run_id()
    found = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, check=True, timeout=60
    )
    first, again = found.stdout.split()
    assert first == again != ours
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(run_id) == ours
