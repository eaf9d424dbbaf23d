"""Recording: fixed-size records into a preallocated buffer, spilled by a background thread.

Who runs here: every thread of the process that calls ``record``, each with a ring buffer of its
own, and one daemon thread per recorder that writes the rings to the file.

Guarantees: ``record`` takes no lock and makes no system call, and never waits: when a ring is full
(the disk is slower than the engine for longer than the ring holds, 32,768 records) the record is
dropped and counted, and the file says so. What a thread recorded is in the file after ``close``,
at normal exit, and, but for the last ``INTERVAL`` seconds, after a kill.

Relies on: one writer per ring (its thread) and one reader (the spiller). ``written`` is advanced
after the bytes are in the ring and ``flushed`` after they are in the file; both are Python
integers in slots, whose assignment is atomic and ordered under the GIL and on free-threaded builds.

Rejected: one ring for all threads with a shared counter (a thread stopped between taking a number
and filling it leaves a hole that the spiller must guess about); NumPy structured assignment (1.6
times the price of ``Struct.pack_into``); a memory-mapped file (page faults on the hot path).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from sipipe.observe.format import (
    CPU,
    DROPPED,
    PACK,
    RECORD,
    SUFFIX,
    Header,
    TraceError,
    encode_header,
)

CAPACITY = 1 << 15
"""Records a thread's ring holds: 1 MiB, seconds of the busiest engine."""
INTERVAL = 0.2
"""Seconds between two spills."""
_SIZE = RECORD.itemsize
_MASK = CAPACITY - 1
_LIMIT = 0xFFFFFFFF


class PhaseSink(Protocol):
    """What takes phases besides the file: the live page, and what counts stage times."""

    def phase(
        self, phase: int, iteration: int, start_ns: int, end_ns: int, batch: int, tokens: int
    ) -> None:
        """Take one phase in; must not block."""


class Recorder:
    """Tells the sinks of each phase and keeps no file: for a server that is not traced."""

    def __init__(self, sinks: Sequence[PhaseSink] = ()) -> None:
        self._sinks = tuple(sink.phase for sink in sinks)

    def record(
        self,
        phase: int,
        iteration: int,
        slot: int,  # noqa: ARG002
        start_ns: int,
        end_ns: int,
        batch: int = 0,
        tokens: int = 0,
    ) -> None:
        """Record that ``phase`` of ``iteration`` ran from ``start_ns`` to ``end_ns``.

        Any thread may call. ``slot`` is the microbatch's slot (0 to 65,535), ``batch`` its
        sequences, ``tokens`` its tokens; the times are from :func:`time.monotonic_ns`.
        """
        for sink in self._sinks:
            sink(phase, iteration, start_ns, end_ns, batch, tokens)

    def close(self) -> None:
        """Write what is left. Idempotent; later records are lost."""


class _Ring:
    """One thread's records that are not yet in the file.

    Invariant: 0 <= written - flushed <= CAPACITY; record n lies at ``(n % CAPACITY) * 32``.
    """

    __slots__ = ("buffer", "dropped", "flushed", "reported", "thread", "written")

    def __init__(self, thread: int) -> None:
        self.buffer = bytearray(CAPACITY * _SIZE)
        self.thread = thread
        self.written = 0
        self.flushed = 0
        self.dropped = 0
        self.reported = 0


def check_directory(directory: str) -> None:
    """Make ``directory``, and raise :class:`TraceError` unless files can be written there."""
    try:
        os.makedirs(directory, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise _cannot_write(directory, error) from None


def _cannot_write(directory: Path | str, error: OSError) -> TraceError:
    return TraceError(
        f"trace: cannot write to {str(directory)!r} ({error.strerror}); "
        "name a directory that this user may write to"
    )


class FileRecorder(Recorder):
    """Also appends records to one file of the trace directory. Made by :func:`open_recorder`."""

    def __init__(self, path: Path, header: Header, sinks: Sequence[PhaseSink] = ()) -> None:
        """Create ``path`` (it must not exist), write ``header`` and start the spiller.

        Raises:
            TraceError: the file cannot be created.
        """
        super().__init__(sinks)
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
            os.write(self._descriptor, encode_header(header))
        except OSError as error:
            raise _cannot_write(path.parent, error) from None
        self._local = threading.local()
        self._rings: list[_Ring] = []
        self._register = threading.Lock()
        self._spill_lock = threading.Lock()
        self._stop = threading.Event()
        self._closed = False
        self._failed = False
        self._cpu = (time.monotonic_ns(), time.process_time_ns())
        self._spiller = threading.Thread(target=self._run, name="sipipe-trace", daemon=True)
        self._spiller.start()
        atexit.register(self.close)

    def record(
        self,
        phase: int,
        iteration: int,
        slot: int,
        start_ns: int,
        end_ns: int,
        batch: int = 0,
        tokens: int = 0,
    ) -> None:
        """As the base class says; a record that does not fit the ring is dropped and counted."""
        try:
            ring = self._local.ring
        except AttributeError:
            ring = self._new_ring()
        written = ring.written
        if written - ring.flushed < CAPACITY:
            PACK.pack_into(
                ring.buffer,
                (written & _MASK) * _SIZE,
                start_ns,
                end_ns,
                iteration,
                batch,
                tokens,
                phase,
                ring.thread,
                slot,
            )
            ring.written = written + 1
        else:
            ring.dropped += 1
        for sink in self._sinks:
            sink(phase, iteration, start_ns, end_ns, batch, tokens)

    def close(self) -> None:
        """Write what is left and close the file."""
        atexit.unregister(self.close)
        self._stop.set()
        if threading.current_thread() is not self._spiller:
            self._spiller.join(timeout=5)  # a disk that hangs must not hold up the exit
        with self._register:
            if self._closed:
                return
            self._closed = True
        if self._spill_lock.acquire(timeout=1):
            try:
                os.close(self._descriptor)
            finally:
                self._spill_lock.release()

    def _new_ring(self) -> _Ring:
        """A ring for the calling thread, which records for the first time."""
        with self._register:
            ring = _Ring(min(len(self._rings), 255))
            self._rings.append(ring)
        self._local.ring = ring
        return ring

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._spill()
        self._spill()

    def _spill(self) -> None:
        for ring in list(self._rings):
            written, flushed = ring.written, ring.flushed
            if written > flushed:
                first, last = flushed & _MASK, ((written - 1) & _MASK) + 1
                view = memoryview(ring.buffer)
                if first < last:
                    self._append(view[first * _SIZE : last * _SIZE])
                else:
                    self._append(view[first * _SIZE :])
                    self._append(view[: last * _SIZE])
                ring.flushed = written
            lost = ring.dropped - ring.reported
            if lost:
                now = time.monotonic_ns()
                ring.reported += lost
                self._append(PACK.pack(now, now, min(lost, _LIMIT), 0, 0, DROPPED, ring.thread, 0))
        before, used = self._cpu
        now, cpu = time.monotonic_ns(), time.process_time_ns()
        # An idle process adds nothing to its file: one record when it wakes up again says it all.
        if cpu - used > 1_000_000 or self._stop.is_set():
            self._cpu = (now, cpu)
            spent = min((cpu - used) // 1000, _LIMIT)
            self._append(PACK.pack(before, now, spent, 0, 0, CPU, 0, 0))

    def _append(self, data: bytes | memoryview) -> None:
        """Write all of ``data``; a full disk ends the recording, not the engine."""
        with self._spill_lock:
            if self._failed or self._closed:
                return
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                self._failed = True
                with contextlib.suppress(Exception):
                    os.write(
                        2, f"sipipe: trace {self._path}: {error.strerror}; ends here\n".encode()
                    )


def open_recorder(
    directory: str | os.PathLike[str] | None, header: Header, sinks: Sequence[PhaseSink] = ()
) -> Recorder:
    """A recorder for this process.

    Args:
        directory: where the file goes (made where it is missing), or None for no file.
        header: who records, in which pipeline; process, host and times are filled in here.
        sinks: what gets each phase too.

    Raises:
        TraceError: the directory cannot be written to.
    """
    if directory is None:
        return Recorder(sinks)
    header = msgspec.structs.replace(
        header,
        pid=os.getpid(),
        host=socket.gethostname(),
        monotonic_ns=time.monotonic_ns(),
        realtime_ns=time.time_ns(),
    )
    stem = f"{header.role}-{header.index}-{header.rank}-{header.host}-{header.pid}"
    path = Path(directory)
    name, again = path / (stem + SUFFIX), 0
    while name.exists():  # the same process opened one before, or a reused process id
        again += 1
        name = path / f"{stem}-{again}{SUFFIX}"
    return FileRecorder(name, header, sinks)
