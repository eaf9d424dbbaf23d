"""BIC-I and the workers' replies: one order for iterations and calls, one place that sees death.

Who runs here
    The engine thread publishes; the events thread sleeps on pipes and sentinels, resolves calls,
    hands iteration reports on, and enforces the stall bound. Publishing is under ``_publishing``,
    the tables under ``_lock``; neither is held while waiting for the other side of a pipe.
Guarantees
    A call's future is resolved with the replies, with the first worker's exception, or with the
    failure of the executor. A dead worker or a stalled iteration is reported to ``fail`` once.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
from vllm.logger import init_logger

from sipipe.config import SiPipeConfig
from sipipe.engine.processes import StageProcess
from sipipe.errors import StallError, WorkerDiedError
from sipipe.ipc.errors import ChannelError, ChannelPeerDied
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.messages.boots import Ready
from sipipe.messages.header import Kind, encode_header

logger = init_logger(f"vllm.{__name__}")

ENTRY_BYTES = 64 * 1024
"""Bytes of a BIC-I entry: a decode step of some hundred sequences; a longer message is cut."""


def bic_i_shape(microbatches: int) -> dict[str, int]:
    """Entries of BIC-I and their bytes: bitmasks and control calls travel on it too."""
    return {"entries": max(16, 4 * microbatches), "entry_bytes": ENTRY_BYTES}


class Reports(Protocol):
    """Who wants to hear what the last stage says of iterations."""

    def report(self, iteration: int, extras: dict[str, Any]) -> None: ...

    def oldest(self) -> tuple[float, str] | None:
        """When the oldest iteration in flight began (monotonic), and what it waits for."""


@dataclass(slots=True)
class _Call:
    method: str
    waiting: set[int]
    single: int | None
    future: Future[Any] = field(default_factory=Future)
    results: dict[int, Any] = field(default_factory=dict)


class ControlPlane:
    """See the module's text. ``fail`` is called at most once, from the events thread."""

    def __init__(
        self,
        workers: Sequence[StageProcess],
        config: SiPipeConfig,
        *,
        samplers: Sequence[str],
        slots: int,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.workers = workers
        self._config = config
        self._fail = fail
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._next_call = 0
        self._reports: Reports | None = None
        self._status: dict[int, str] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread: threading.Thread | None = None
        self.producer = DispatchProducer.create(
            name="bic-i",
            **bic_i_shape(slots),
            readers=[worker.name for worker in workers] + list(samplers),
            directory=config.shm_dir,
        )

    def wait_ready(self, deadline: float) -> list[Ready]:
        """Wait until every worker has loaded its model, and hand it BIC-I."""
        ready: list[Ready] = []
        for worker in self.workers:
            message = worker.receive(deadline)
            assert isinstance(message, Ready)
            ready.append(message)
        for worker in self.workers:
            worker.pipe.send(self.producer.endpoint)
        return ready

    def start(self) -> None:
        """Start to listen; calls are answered from now on."""
        self._thread = threading.Thread(target=self._listen, name="SiPipeEvents", daemon=True)
        self._thread.start()

    def listen_for(self, reports: Reports) -> None:
        self._reports = reports

    def call(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        only: int | None = None,
    ) -> Future[Any]:
        """Publish one call; its future has the results by rank, or that of rank ``only``."""
        named = method if isinstance(method, str) else cloudpickle.dumps(method)
        title = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        ranks = {only} if only is not None else set(range(len(self.workers)))
        call = _Call(title, ranks, only)
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(f"SiPipe's executor has failed: {self._failure}")
            number = self._next_call
            self._next_call += 1
            self._calls[number] = call
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps((named, args, kwargs, only), 5, buffer_callback=buffers.append)
        self.publish(Kind.CONTROL, 0, number, [b"", body, *(b.raw() for b in buffers)])
        return call.future

    def publish(self, kind: Kind, slot: int, number: int, parts: Sequence[Any]) -> None:
        """Publish one message on BIC-I; waits for late readers, at most the stall bound.

        Raises:
            StallError: a reader did not free a slot in time; names it.
        """
        with self._publishing:
            message = [encode_header(kind, slot, number), *parts]
            while True:
                try:
                    self.producer.publish(message, timeout=self._config.stall_timeout)
                    return
                except ChannelPeerDied as error:
                    # A worker's death stops the engine, a sampler's is mended: the events
                    # thread and the pool see to both. The message must reach the others.
                    self.producer.remove_reader(error.name)
                except ChannelError as error:
                    raise self._failure or StallError(f"BIC-I: {error}") from error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While active, nothing is published: readers can be exchanged at a known point."""
        with self._publishing:
            yield

    def fail(self, error: BaseException) -> None:
        """Resolve everything that is out with ``error``."""
        with self._lock:
            self._failure = error
            calls, self._calls = self._calls, {}
        for call in calls.values():
            with suppress(InvalidStateError):
                call.future.set_exception(RuntimeError(f"call to {call.method} failed: {error}"))

    def close(self) -> None:
        """Stop listening and close BIC-I; readers see the end."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):
            os.write(self._wake_write, b"x")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self.fail(RuntimeError("shut down"))
        self.producer.close()
        for end in (self._wake_read, self._wake_write):
            with suppress(OSError):
                os.close(end)

    # ---- the events thread ------------------------------------------------------------------

    def _listen(self) -> None:
        pipes = {worker.pipe: worker for worker in self.workers}
        sentinels = {worker.process.sentinel: worker for worker in self.workers}
        parent = multiprocessing.parent_process()
        try:
            while not self._closed:
                wanted: list[Any] = [*pipes, *sentinels, self._wake_read]
                if parent is not None:
                    wanted.append(parent.sentinel)
                for item in multiprocessing.connection.wait(wanted, self._patience()):
                    if item is self._wake_read or self._closed:
                        return
                    if parent is not None and item == parent.sentinel:
                        # vLLM's engine process does not watch its front end: a killed one
                        # would leave the engine, its workers and samplers behind.
                        logger.error("the process that started this engine is gone; ending it")
                        os.kill(os.getpid(), signal.SIGTERM)
                        return
                    if item in pipes:
                        if not self._take(pipes[item]):
                            del pipes[item]
                    else:
                        self._report_death(sentinels.pop(item))
                        return
                self._check_stall()
        except Exception as error:
            if not self._closed:
                self._fail(error)

    def _take(self, worker: StageProcess) -> bool:
        """One message of a worker; False when its pipe has ended."""
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            return False
        match message:
            case ("reply", number, good, value):
                self._reply(worker.place.rank, number, good, value)
            case ("report", iteration, extras):
                if self._reports is not None:
                    self._reports.report(iteration, extras)
            case ("status", text):
                self._status[worker.place.rank] = text
            case Exception():
                self._fail(
                    RuntimeError(
                        f"worker {worker.name} failed: {type(message).__name__}: {message}"
                    )
                )
            case _:
                raise AssertionError(f"worker {worker.name} sent {message!r}")
        return True

    def _reply(self, rank: int, number: int, good: bool, value: Any) -> None:
        with self._lock:
            call = self._calls.get(number)
            if call is None:
                return
            if good:
                call.results[rank] = value
                call.waiting.discard(rank)
                if call.waiting:
                    return
            del self._calls[number]
        with suppress(InvalidStateError):
            if not good:
                call.future.set_exception(
                    RuntimeError(
                        f"Worker {self.workers[rank].name} failed in {call.method} with error "
                        f"'{value}', please check the stack trace above for the root cause"
                    )
                )
            elif call.single is not None:
                call.future.set_result(call.results[call.single])
            else:
                call.future.set_result([call.results[r] for r in sorted(call.results)])

    def _report_death(self, worker: StageProcess) -> None:
        worker.process.join(1.0)
        # Its last words, if it had any, explain more than its exit code.
        with suppress(EOFError, OSError):
            while worker.pipe.poll(0):
                message = worker.pipe.recv()
                if isinstance(message, Exception):
                    self._fail(RuntimeError(f"worker {worker.name} failed: {message}"))
                    return
        self._fail(
            WorkerDiedError(
                f"stage worker {worker.name} (pid {worker.process.pid}) died, exit code "
                f"{worker.process.exitcode}; the engine stops"
            )
        )

    def _patience(self) -> float | None:
        """Seconds to sleep at most: until the oldest iteration would be a stall."""
        oldest = self._reports.oldest() if self._reports is not None else None
        if oldest is None:
            return 5.0
        return max(0.05, min(5.0, oldest[0] + self._config.stall_timeout - time.monotonic()))

    def _check_stall(self) -> None:
        oldest = self._reports.oldest() if self._reports is not None else None
        if oldest is None or time.monotonic() - oldest[0] < self._config.stall_timeout:
            return
        self._fail(
            StallError(
                f"no progress for {self._config.stall_timeout:g} s: {oldest[1]}. "
                + "; ".join(self._ask_status())
                + '. Raise "stall_timeout" in the sipipe config if one iteration may take this long'
            )
        )

    def _ask_status(self) -> list[str]:
        """What each worker says it is doing; asked of a thread that does nothing else."""
        self._status.clear()
        for worker in self.workers:
            with suppress(OSError):
                worker.pipe.send("status")
        deadline = time.monotonic() + 2.0
        while len(self._status) < len(self.workers) and time.monotonic() < deadline:
            pipes = {worker.pipe: worker for worker in self.workers}
            for item in multiprocessing.connection.wait(
                list(pipes), max(0.0, deadline - time.monotonic())
            ):
                self._take(pipes[item])  # type: ignore[index]
        return [
            f"{worker.name} {self._status.get(worker.place.rank, 'does not answer')}"
            for worker in self.workers
        ]
