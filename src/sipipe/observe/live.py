"""The statistics page: counters of a running server that anyone may read at any time.

    0      2048 bytes   header: 8 bytes of magic, then JSON padded with spaces
    2048   512 bytes    executor's block       one block per process: 64 words of 8 bytes,
    2560   512 bytes    stage 0 rank 0         signed, native order
           ...          stages by index and rank, then samplers

Who runs here: the executor creates the page; it, each worker and each sampler write to their own
block; ``/metrics``, ``sipipe top`` and the engine's scheduler read.

Guarantees: readers never block and never make a writer wait; a word is read whole. Two words may be
from different moments: readers use differences over a second or so. The page is an anonymous memory
file, reached as ``/proc/PID/fd/N`` of its owner: nothing is left after any kind of exit.

Relies on: one writer per word: in a process one thread per phase and one per counter. Aligned
8-byte stores and loads are single instructions on x86-64 and AArch64.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import time
import uuid
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import psutil

from sipipe.best_effort import BestEffort
from sipipe.ipc.sockets import open_own
from sipipe.linux import memfd_create
from sipipe.observe.format import TraceError
from sipipe.observe.phases import MAIN_PHASE, Phase, Role

MAGIC = b"SIPLIVE3"
"""The digit is the layout's: ``sipipe top`` of another version finds no page."""
_HEADER = 2048
_BLOCK = 512
_WORDS = _BLOCK // 8
_NAME = "sipipe-live"
RUN_VARIABLE = "SIPIPE_RUN"
"""Environment variable that tells the processes of one server from those of another."""

Key = tuple[Role, int, int]
"""Role, index and rank of a process."""


class Word(IntEnum):
    """Where in a block a figure lies. Counters only grow; gauges are set."""

    BATCHES = 0
    """Counter, as are the next two: iterations whose main phase (forward, sample, gather) ended."""
    SEQUENCES = 1
    TOKENS = 2
    """Tokens: run by a stage, drawn by a sampler, taken in by the executor."""
    INFLIGHT = 3
    """Executor, gauge: microbatches in flight."""
    RUNNING = 4
    """Executor, gauge: sequences that are being served."""
    WAITING = 5
    """Executor, gauge: requests that wait to be scheduled."""
    RESTARTS = 6
    """Executor, counter: processes that died and were started again."""
    IDLE_NS = 7
    """Executor, counter: time without any request, up to the last that came."""
    IDLE_FROM = 8
    """Executor, gauge: when the last request ended, in monotonic nanoseconds, and when the next
    came, which is the earlier of the two while there is none."""
    IDLE_TO = 9
    FIRST_TOKENS = 10
    """Executor, counter: requests that got their first token, and what they waited for it."""
    TTFT_NS = 11
    STALLED = 12
    """Executor, gauge: 1 while something is late and a worker does not answer."""
    DRAFTS = 13
    """Executor, counters: draft tokens that were verified, those of them that were drawn, and the
    passes of requests that had any."""
    ACCEPTED = 14
    DRAFTED = 15
    PHASE_LAST = 16
    """First of the last iteration that each phase saw, plus 1: 0 before the first."""
    PHASE_NS = 32
    """First of the time spent in each phase: counters."""


assert len(Phase) <= Word.PHASE_NS - Word.PHASE_LAST
assert Word.PHASE_NS + len(Phase) <= _WORDS


_known = False


def run_id() -> str:
    """This server's identity: made once, shared by the processes that multiprocessing starts for it. A
    server that another program starts as a command has its own, whatever it has inherited."""
    global _known
    if not _known and multiprocessing.parent_process() is None:
        os.environ[RUN_VARIABLE] = uuid.uuid4().hex
    _known = True
    return os.environ.setdefault(RUN_VARIABLE, uuid.uuid4().hex)


class PageHeader(msgspec.Struct, kw_only=True, frozen=True):
    stages: int
    ranks: int = 1
    samplers: int
    inflight: int = 1
    """Microbatches in flight at most."""
    model: str = ""
    engine: str = "0"
    """Data-parallel rank of the engine, as vLLM labels its own metrics."""
    run: str = msgspec.field(default_factory=run_id)
    pid: int = msgspec.field(default_factory=os.getpid)
    """The executor's process."""
    created_ns: int = msgspec.field(default_factory=time.monotonic_ns)
    path: str = ""
    """``sipipe`` or ``device``: who draws; empty while the engine starts."""
    reason: str = ""
    """Why the device, with vLLM's sampler."""
    vllm: str = ""

    @property
    def size(self) -> int:
        """Bytes of the page."""
        return _HEADER + _BLOCK * (1 + self.stages * self.ranks + self.samplers)


class LivePage:
    """A mapped statistics page. Make one with :meth:`create`, :meth:`attach` or :func:`find`."""

    def __init__(self, memory: mmap.mmap, descriptor: int | None = None) -> None:
        """Take over a mapping (and the memory file, where this process owns it)."""
        self._memory = memory
        self._descriptor = descriptor
        if memory[:8] != MAGIC:
            raise TraceError("not a SiPipe statistics page")
        self.header = msgspec.json.decode(memory[8:_HEADER].rstrip(b" \0"), type=PageHeader)
        self.words = memoryview(memory).cast("q")
        h = self.header
        keys: list[Key] = [("executor", 0, 0)]
        keys += [("stage", index, rank) for index in range(h.stages) for rank in range(h.ranks)]
        keys += [("sampler", index, 0) for index in range(h.samplers)]
        self.blocks = {key: _HEADER // 8 + n * _WORDS for n, key in enumerate(keys)}
        """The first word of each process's block: executor, stages, samplers."""

    @classmethod
    def create(cls, header: PageHeader) -> LivePage:
        """A new page with all figures 0; the caller (the executor) owns it until ``close``."""
        descriptor = memfd_create(_NAME)
        os.ftruncate(descriptor, header.size)
        memory = mmap.mmap(descriptor, 0)
        memory[8:_HEADER] = msgspec.json.encode(header).ljust(_HEADER - 8)
        memory[:8] = MAGIC  # last: a reader that finds the magic finds the header
        return cls(memory, descriptor)

    def ready(self, path: str, reason: str, vllm: str) -> None:
        """The engine can serve: say how. Nobody has asked for its figures yet."""
        self.header = msgspec.structs.replace(
            self.header, path=path, reason=reason[:300], vllm=vllm
        )
        self._memory[8:_HEADER] = msgspec.json.encode(self.header).ljust(_HEADER - 8)

    @classmethod
    def attach(cls, path: str) -> LivePage:
        """Map the page at :attr:`path` of another process. TraceError: there is none any more, it is
        another user's, or its header is just being written."""
        try:
            with os.fdopen(open_own(path), "rb") as file:
                return cls(mmap.mmap(file.fileno(), 0))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise TraceError(f"statistics page {path}: {why}") from None

    @property
    def path(self) -> str:
        """Where another process of this user finds the page while the owner lives."""
        assert self._descriptor is not None, "only the owner of a page knows its path"
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def block(self, key: Key) -> memoryview:
        """A process's words, which only it writes; index it with :class:`Word`."""
        return self.words[self.blocks[key] :][:_WORDS]

    def writer(self, role: Role, index: int = 0, rank: int = 0) -> LiveWriter:
        """The writing end of a process's block; only that process may ask for it."""
        return LiveWriter(self, role, index, rank)

    def alive(self) -> bool:
        """Say if the owner still runs and has not closed the page."""
        return bytes(self._memory[:8]) == MAGIC and Path(f"/proc/{self.header.pid}").exists()

    def close(self) -> None:
        """Unmap. Idempotent; writers of this page may not be used afterwards."""
        with contextlib.suppress(BufferError, ValueError):
            if self._descriptor is not None:
                self._memory[:8] = bytes(8)  # to those who still have it mapped: it is over
            self.words.release()
            self._memory.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


# Plain integers: arithmetic with enum members costs several times as much.
_BATCHES = int(Word.BATCHES)
_SEQUENCES = int(Word.SEQUENCES)
_TOKENS = int(Word.TOKENS)
_PHASE_LAST = int(Word.PHASE_LAST)
_PHASE_NS = int(Word.PHASE_NS)


_counting = BestEffort("counting for the statistics page", bounded=False)


class LiveWriter:
    """Writes one process's block, from that process alone: no lock. What cannot be written, a number
    of more than 63 bits say, is left out (:mod:`sipipe.best_effort`)."""

    def __init__(self, page: LivePage, role: Role, index: int, rank: int) -> None:
        self._page = page  # keeps the mapping alive
        self._words: Any = page.block((role, index, rank))
        self._main = int(MAIN_PHASE[role])

    def phase(
        self, phase: int, iteration: int, start_ns: int, end_ns: int, batch: int, tokens: int
    ) -> None:
        """Take one record in; batches last: who sees the batch sees its sequences and its time."""
        _counting(None, self._phase, phase, iteration, start_ns, end_ns, batch, tokens)

    def _phase(
        self, phase: int, iteration: int, start_ns: int, end_ns: int, batch: int, tokens: int
    ) -> None:
        words = self._words
        words[_PHASE_LAST + phase] = iteration + 1
        words[_PHASE_NS + phase] += end_ns - start_ns
        if phase == self._main:
            words[_SEQUENCES] += batch
            words[_TOKENS] += tokens
            words[_BATCHES] += 1

    def add(self, word: Word, amount: int = 1) -> None:
        """Let a counter grow."""
        _counting(None, self._add, word, amount)

    def _add(self, word: Word, amount: int) -> None:
        self._words[word] += amount

    def set(self, word: Word, value: int) -> None:
        """Set a gauge."""
        _counting(None, self._words.__setitem__, word, value)


def find(run: str | None = None, pid: int | None = None) -> list[LivePage]:
    """The pages of running servers of this user: all, those of a run, or of one process's server.
    ``pid`` may be the executor's or any of its ancestors (the API server's, the shell's child)."""
    pages: dict[tuple[int, int], LivePage] = {}
    for process in psutil.pids():
        for page in _pages_of(process):
            key = (page.header.pid, page.header.created_ns)
            if (
                key in pages
                or page.header.pid != process
                or (run is not None and page.header.run != run)
                or (pid is not None and pid not in _line(page.header.pid))
            ):
                page.close()
            else:
                pages[key] = page
    return sorted(pages.values(), key=lambda page: (page.header.created_ns, page.header.pid))


def _pages_of(process: int) -> Iterator[LivePage]:
    """The pages that a process has open."""
    links: list[Path] = []
    with contextlib.suppress(OSError):  # another user's, or it has ended
        links.extend(Path(f"/proc/{process}/fd").iterdir())
    for link in links:
        # Each for itself: it may have been closed since, or be no page yet.
        with contextlib.suppress(OSError, TraceError):
            if os.readlink(link).startswith(f"/memfd:{_NAME}"):
                yield LivePage.attach(str(link))


def still_there(pages: list[LivePage]) -> list[LivePage]:
    """``pages``; where one has gone or there is none, those of this server's engines now."""
    if pages and all(page.alive() for page in pages):
        return pages
    for page in pages:
        page.close()
    return find(run_id())


def _line(pid: int) -> set[int]:
    """``pid`` and the processes above it."""
    with contextlib.suppress(psutil.Error):
        return {pid, *(parent.pid for parent in psutil.Process(pid).parents())}
    return {pid}
