"""The sampler processes: started, watched, replaced, ended.

Who runs here
    The engine thread starts and ends the pool. One thread per process sleeps in ``wait`` and
    calls back when the process ends without being asked to.
Guarantees
    No sampler outlives the executor: each ends when its standard input closes, which the kernel
    does for a killed executor too. A sampler that keeps dying is not restarted for ever:
    ``RESTARTS`` deaths within ``RESTART_WINDOW`` seconds are the callback's error.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO, cast

from sipipe.errors import StallError, WorkerDiedError
from sipipe.messages.boots import SamplerBoot
from sipipe.messages.step import Snapshot

__all__ = ["SamplerPool"]

RESTARTS = 5
RESTART_WINDOW = 60.0
END_SECONDS = 2.0

OnDeath = Callable[[int, int, str], None]
"""Called with the sampler's index, its next incarnation and how it ended, in a thread of its own."""


class SamplerPool:
    """``count`` sampler processes, each bound to its cores of ``cores`` (empty: not bound).

    ``warm``: logits dtype and layout that the kernels are compiled for as the process starts.
    """

    def __init__(
        self, count: int, *, warm: tuple[str, str], cores: Sequence[Sequence[int]] = ()
    ) -> None:
        self._warm = warm
        self._cores = [tuple(cores[i]) if i < len(cores) else () for i in range(count)]
        self._on_death: OnDeath | None = None
        self._closed = False
        self._deaths: list[deque[float]] = [deque(maxlen=RESTARTS) for _ in range(count)]
        self._incarnation = [0] * count
        self._lock = threading.Lock()
        self._processes = [self._start(i) for i in range(count)]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    @property
    def restarts(self) -> int:
        """Samplers started again since the pool was made."""
        return sum(self._incarnation)

    def boot(self, boots: Sequence[SamplerBoot], deadline: float) -> None:
        """Hand every process its boot record and wait until all have opened their channels.

        Raises:
            WorkerDiedError: a sampler ended instead.
            StallError: ``deadline`` (``time.monotonic()``) passed.
        """
        for process, boot in zip(self._processes, boots, strict=True):
            _send(process, boot)
        for index in range(len(boots)):
            self._expect(index, b"open\n", deadline)

    def watch(self, on_death: OnDeath) -> None:
        """Call ``on_death`` for every sampler that ends from now on."""
        self._on_death = on_death
        for index in range(len(self._processes)):
            self._watch(index)

    def replace(self, boot: SamplerBoot, snapshot: Snapshot) -> None:
        """Start a new process for ``boot.index``, with the state of the one that died."""
        with self._lock:
            if self._closed:
                return
            self._processes[boot.index] = self._start(boot.index)
        _send(self._processes[boot.index], replace(boot, snapshot=snapshot))
        self._watch(boot.index)

    def stop_watching(self) -> None:
        """From now on a sampler that ends was asked to."""
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """End every process; returns when all are gone."""
        self.stop_watching()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        cores = self._cores[index]
        process = subprocess.Popen(
            [sys.executable, "-m", "sipipe.sampler", *self._warm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # select() must see what readline() has not taken
            env={**os.environ, "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        if cores:
            os.sched_setaffinity(process.pid, cores)
        return process

    def _expect(self, index: int, word: bytes, deadline: float) -> None:
        """Read lines of a starting process until ``word``."""
        process = self._processes[index]
        stream = cast(IO[bytes], process.stdout)
        while True:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise StallError(
                    f"sampler{index} (pid {process.pid}) was not ready in time: raise "
                    '"start_timeout" in the sipipe config'
                )
            line = stream.readline()
            if line == word:
                return
            if not line:
                raise WorkerDiedError(
                    f"sampler{index} (pid {process.pid}) ended while starting, exit code "
                    f"{process.wait()}: see its message above"
                )

    def _watch(self, index: int) -> None:
        process = self._processes[index]
        threading.Thread(
            target=self._wait, args=(index, process), name=f"SiPipeSampler{index}", daemon=True
        ).start()

    def _wait(self, index: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._lock:
            if self._closed or self._processes[index] is not process:
                return
            self._incarnation[index] += 1
            incarnation = self._incarnation[index]
            deaths = self._deaths[index]
            deaths.append(time.monotonic())
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        assert self._on_death is not None
        if len(deaths) == RESTARTS and deaths[-1] - deaths[0] < RESTART_WINDOW:
            reason = f"exit code {code}, the {RESTARTS}th time within {RESTART_WINDOW:g} s"
            self._on_death(index, -1, reason)
        else:
            self._on_death(index, incarnation, f"exit code {code}")


def _send(process: subprocess.Popen[bytes], boot: SamplerBoot) -> None:
    data = pickle.dumps(boot)
    stream = cast(IO[bytes], process.stdin)
    try:
        left = memoryview(len(data).to_bytes(8, "little") + data)
        while left:
            left = left[stream.write(left) :]
    except BrokenPipeError:
        pass  # it died before it could read; whoever waits for it says so
