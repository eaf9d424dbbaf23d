"""Recording: fixed-size records into a queue in memory, spilled by a background thread.

Who runs here: every thread of the process that calls ``record``, and one daemon thread per
recorder, from the first record on, that writes what they recorded to the file.

Guarantees: ``record`` takes no lock, makes no system call (but the first of all, which starts that
thread), and never waits: when ``CAPACITY`` records wait, one more is dropped and counted, and the
file says so. What a thread recorded is in the file after ``close``, at normal exit, and, but for the
last ``INTERVAL`` seconds, after a kill. Where there is a limit, the file is begun anew when it has
half of it, and the one before it kept.

Relies on: ``deque.append`` and ``popleft``, which are atomic; only the spiller takes records out.
A count of dropped records that two threads raise at once may miss one of them.
"""

import atexit
import contextlib
import itertools
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from sipipe.best_effort import BestEffort
from sipipe.errors import ConfigError, one_line, tell
from sipipe.messages.start_records import Watched
from sipipe.observe.format import CPU, DROPPED, OLDER, PACK, SUFFIX, Header, encode_header
from sipipe.observe.live import LivePage, LiveWriter
from sipipe.observe.phases import Role

CAPACITY = 1 << 15
"""Records that wait for the disk at most: seconds of the busiest engine."""
INTERVAL = 0.2
"""Seconds between two spills."""
_LIMIT = 0xFFFFFFFF
_recording = BestEffort("recording a phase for the trace", bounded=False)


def check_directory(directory: str) -> None:
    """Make ``directory``, and raise ConfigError unless files can be written there."""
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(4096))  # a full disk still has names
    except OSError as error:
        raise _cannot_write(directory, error) from None


def _cannot_write(directory: Path | str, error: OSError) -> ConfigError:
    return ConfigError(
        f"trace: cannot write to {str(directory)!r} ({error.strerror}); "
        "name a directory that this user may write to"
    )


class Recorder:
    """Counts each phase on the statistics page, and appends it to a file of the trace directory if there is
    one. Made by :func:`open_recorder`."""

    def __init__(
        self,
        header: Header,
        path: Path | None = None,
        live: LiveWriter | None = None,
        limit: int | None = None,
    ) -> None:
        """Create ``path`` (it must not exist), write ``header``; ``limit`` as :func:`open_recorder`
        has it. Raises ConfigError: the file cannot be created."""
        self._count: Callable[..., None] = live.phase if live else lambda *_: None
        self._path = path
        self._over = path is None  # no file, closed, or the disk is full
        if path is None:
            return
        self._header = header
        self._limit = limit
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._begin(path)
        except OSError as error:
            raise _cannot_write(path.parent, error) from None
        self._records: deque[bytes] = deque()
        self._dropped = self._reported = 0
        self._threads: dict[int, int] = {}  # number of each recording thread, by identity
        self._numbers = itertools.count()
        # wait: held while the disk writes; `close` waits a second for it
        self._file = threading.Lock()
        self._stop = threading.Event()
        self._cpu = (time.monotonic_ns(), time.process_time_ns())
        self._spiller = threading.Thread(target=self._run, name="sipipe-trace", daemon=True)
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
        """Record that ``phase`` of ``iteration`` ran from ``start_ns`` to ``end_ns``
        (:func:`time.monotonic_ns`). Any thread. ``slot``: 0 to 65,535; ``batch``: sequences."""
        if not self._over:
            values = phase, iteration, slot, start_ns, end_ns, batch, tokens
            _recording(None, self._append_record, *values)
        self._count(phase, iteration, start_ns, end_ns, batch, tokens)

    def _append_record(
        self,
        phase: int,
        iteration: int,
        slot: int,
        start_ns: int,
        end_ns: int,
        batch: int,
        tokens: int,
    ) -> None:
        if len(self._records) < CAPACITY:
            if (thread := self._threads.get(threading.get_ident())) is None:
                thread = self._begin_thread()
            n = iteration & 0xFFFFFFFF  # months of iterations go round, and end no engine
            self._records.append(PACK.pack(start_ns, end_ns, n, batch, tokens, phase, thread, slot))
        else:
            self._dropped += 1

    def _begin_thread(self) -> int:
        """The number of the thread that calls, which records for the first time."""
        number = next(self._numbers)
        if number == 0:
            # Not earlier: the engine's recorder is made before its workers, which are not forked
            # from a process that has other threads (`sipipe.engine.children.forking.may_fork`), and its
            # first record is of an iteration, or of the time before the first request.
            self._cpu = (time.monotonic_ns(), time.process_time_ns())
            self._spiller.start()
        thread = self._threads[threading.get_ident()] = min(number, 255)
        return thread

    def close(self) -> None:
        """Write what is left and close the file. Idempotent; later records are lost."""
        if self._path is None:
            return
        atexit.unregister(self.close)
        self._stop.set()
        if self._spiller.is_alive() and threading.current_thread() is not self._spiller:
            self._spiller.join(timeout=5)  # a disk that hangs must not hold up the exit
        if not self._over and self._file.acquire(timeout=1):
            try:
                self._over = True
                os.close(self._descriptor)
            finally:
                self._file.release()

    def _begin(self, path: Path) -> int:
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        try:
            self._size = os.write(descriptor, encode_header(self._header))  # wait: the disk's
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return descriptor

    def _begin_anew(self) -> None:
        """Keep the file that is full, in the place of the one before it."""
        assert self._path is not None
        self._path.rename(self._path.with_suffix(OLDER))
        self._header = msgspec.structs.replace(self._header, since_ns=time.monotonic_ns())
        full = self._descriptor
        self._descriptor = self._begin(self._path)
        os.close(full)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.spill()
        self.spill()

    def spill(self) -> None:
        """Write what has been recorded since the last call to the file. One thread at a time: the
        queue has one reader."""
        data = [self._records.popleft() for _ in range(len(self._records))]
        now = time.monotonic_ns()
        cpu = time.process_time_ns()
        if lost := self._dropped - self._reported:
            self._reported += lost
            data.append(PACK.pack(now, now, min(lost, _LIMIT), 0, 0, DROPPED, 0, 0))
        before, used = self._cpu
        # An idle process adds nothing to its file: one record when it wakes up again says it all.
        if cpu - used > 1_000_000 or self._stop.is_set():
            self._cpu = (now, cpu)
            spent = min((cpu - used) // 1000, _LIMIT)
            data.append(PACK.pack(before, now, spent, 0, 0, CPU, 0, 0))
        self._append(b"".join(data))

    def _append(self, data: bytes) -> None:
        """Write all of ``data``; a full disk ends the recording, not the engine."""
        with self._file:
            if self._over:
                return
            view = memoryview(data)
            try:
                if self._limit is not None and self._size + len(data) > self._limit // 2:
                    self._begin_anew()
                self._size += len(data)
                while view:
                    # wait: the disk's, of the spilling thread alone
                    view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                self._over = True
                os.close(self._descriptor)
                with contextlib.suppress(Exception):
                    # wait: none; who reads the log
                    os.write(
                        2, f"sipipe: trace {self._path}: {error.strerror}; ends here\n".encode()
                    )


def open_recorder(
    directory: str | os.PathLike[str] | None,
    header: Header,
    live: LiveWriter | None = None,
    limit: int | None = None,
) -> Recorder:
    """A recorder for this process, with a file in ``directory`` unless that is None.

    Args:
        header: process, host, times are filled in; ``realtime_ns`` is added to the wall clock.
        live: this process's block of the statistics page, which counts each phase too.
        limit: bytes of the file and the one before it; the oldest records give way. None: no limit.

    Raises ConfigError: the directory cannot be written to.
    """
    if directory is None:
        return Recorder(header, live=live)
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    header = msgspec.structs.replace(
        header,
        pid=os.getpid(),
        host=socket.gethostname(),
        boot=boot,
        monotonic_ns=time.monotonic_ns(),
        realtime_ns=time.time_ns() + header.realtime_ns,
    )
    stem = f"{header.role}-{header.index}-{header.rank}-{header.host}-{header.pid}"
    path = Path(directory) / f"{stem}{SUFFIX}"
    again = 0
    while path.exists():  # the same process opened one before, or a reused process id
        again += 1
        path = path.with_name(f"{stem}-{again}{SUFFIX}")
    return Recorder(header, path, live, limit)


def record_process(
    watched: Watched, role: Role, index: int = 0, rank: int = 0, layers: int = 0
) -> Recorder:
    """Open the recorder of the executor, or of stage or sampler ``index``. Where the trace can no longer
    be written, as by a sampler that takes a dead one's place, it goes without, and a line says so.

    Raises ConfigError: the engine is gone.
    """
    live = LivePage.attach(watched.live).writer(role, index, rank) if watched.live else None
    header = Header(
        role=role,
        index=index,
        rank=rank,
        stages=watched.stages,
        layers=layers,
        inflight=watched.inflight,
        run=watched.run,
        model=watched.model,
        realtime_ns=watched.clock_offset_ns,
    )
    try:
        return open_recorder(watched.trace, header, live, watched.trace_bytes)
    except (ConfigError, OSError) as error:
        tell(f"{one_line(error)}; this process goes on without")
        return open_recorder(None, header, live)
