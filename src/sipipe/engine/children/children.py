"""The child processes of an engine, workers and samplers alike: started, watched, ended.

Who runs here
    Whoever starts a child or speaks to it; the events thread, which sleeps on the pipes and the
    process descriptors of all children at once and calls the handlers.
Guarantees
    A death is reported at once, after the child's last words, unless it was asked to end. A child
    that is stopped amid a message holds nobody up: it is killed. When :meth:`Children.close`
    returns, all children are gone. A child whose engine is killed ends with its pipe
    (:class:`sipipe.ipc.parent.Parent`), and a worker that cannot with the engine's main thread. An
    engine whose front end is killed ends within 10 s, also while it starts.
Relies on
    Descriptors are close-on-exec: a child has its own ends only, so the kernel closes the engine's
    with the engine.
"""

import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from sipipe.errors import DamagedError, StallError, WorkerDiedError
from sipipe.ipc.child import import_path, limit_waits, start_child
from sipipe.ipc.errors import LinkClosedError
from sipipe.ipc.parent import end_this_process
from sipipe.ipc.starter import ends_in_order
from sipipe.linux import pidfd_open
from sipipe.messages.replies import Ready
from sipipe.messages.start_records import GRACE_SECONDS

logger = logging.getLogger(f"vllm.{__name__}")

PIPE_SECONDS = 10
"""Seconds for which a child may stop amid a message. Its thread on the pipe does nothing else, so one
that takes longer is stopped or broken."""
NEIGHBOUR_SECONDS = 1.0
"""Seconds by which a child's report that its neighbour has died is held back. The neighbour's own
last word or exit code arrives within them, and says more."""


class Child:
    """One process, and the engine's end of its control pipe."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], pipe: Connection) -> None:
        self.name = name
        self.process = process
        self.pipe: Connection | None = pipe
        self.descriptor = pidfd_open(process.pid)
        """Readable once the process has ended."""
        # wait: held while a message is sent; as that is
        self._saying = threading.Lock()
        """Held while a message is sent, which takes several writes if it is long."""
        self.asked_to_end = False
        """True once the child was asked to end: its end is then no failure."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.process.pid})"

    def say(self, message: Any) -> None:
        """Send a message as a pickle, or bytes as they are. Nothing is raised if the child is gone,
        since the events thread reports its death."""
        data = message if isinstance(message, bytes) else pickle.dumps(message)
        pipe = self.pipe
        if pipe is not None:
            # TypeError: the events thread has seen the child's end meanwhile, and closed the pipe.
            with self._saying, suppress(OSError, TypeError), self._bounded():
                # wait: 10 s (`PIPE_SECONDS`), then the child is killed; the child reads, or dies
                pipe.send_bytes(data)

    def hear(self) -> Any:
        """The next message of the child, whose pipe is readable; None when there will be no more. A
        message that cannot be unpickled is returned as a :class:`.DamagedError`."""
        assert self.pipe is not None
        with suppress(EOFError, OSError), self._bounded():
            # wait: 10 s (`PIPE_SECONDS`) for the rest of a message, then the child is killed; the
            # child, or its death
            data = self.pipe.recv_bytes()
            try:
                return pickle.loads(data)  # from our child, through a pipe of its own
            except Exception as error:
                return DamagedError(f"{self} sent what cannot be read here: {error!r}")
        self.hang_up()
        return None

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Kill a child that stops amid a message: the bytes after it would be no message."""
        try:
            yield
        except BlockingIOError:
            logger.warning("%s has stopped amid a message for %g s; killed", self, PIPE_SECONDS)
            self.process.kill()

    def ask_to_end(self) -> None:
        """Shut the control pipe down, at whose end a child ends itself. From any thread."""
        self.asked_to_end = True
        pipe = self.pipe  # once: the events thread may see the child's end meanwhile
        if pipe is not None:
            # Shut down and not closed: the events thread may be asleep on the descriptor, and wakes
            # up at its end of file. It closes it then (TypeError: just now).
            with suppress(OSError, TypeError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Close the engine's end of the control pipe, if it is open."""
        pipe = self.pipe
        self.pipe = None
        if pipe is not None:
            pipe.close()

    def release(self) -> None:
        """Close the descriptors of a child whose process has ended."""
        self.hang_up()
        os.close(self.descriptor)


class Children:
    """All child processes of one engine on one host, as the module's text describes. Nothing is
    watched before :meth:`watch`."""

    def __init__(self) -> None:
        if (
            multiprocessing.parent_process() is not None
            and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        ):
            # The process that started the engine ignored this signal, and the engine inherited that.
            # The kernel would then keep no exit status of any child.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._changed = threading.Condition()  # wait: held for moments; nobody waits under it
        self._children: dict[str, Child] = {}
        self._ready: dict[str, Ready] = {}
        self._error: BaseException | None = None
        self._ending = False
        self._neighbours_deaths: list[tuple[float, Child, WorkerDiedError | LinkClosedError]] = []
        """Reports of children that a neighbour has died, in order: the time at which each is passed
        on (``time.monotonic()``), the child that reported, and its report."""
        self._wake_read, self._wake_write = os.pipe()
        self._thread: threading.Thread | None = None

    def watch(
        self,
        *,
        heard: Callable[[Child, Any], None],
        died: Callable[[Child, str], None],
        turn: Callable[[], float],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Start the events thread.

        Args:
            heard: called with each message of a child but :class:`Ready`.
            died: called with a child that ended unasked, and how.
            turn: called after all messages and deaths; returns the seconds to sleep at most.
            failed: called with what one of these functions raised. Nothing is watched from then on.
        """
        self._heard = heard
        self._died = died
        self._turn = turn
        self._failed = failed
        self._thread = threading.Thread(target=self._listen, name="SiPipeEvents", daemon=True)
        self._thread.start()

    def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        ends: Sequence[socket.socket | IO[bytes]] = (),
        environment: Mapping[str, str] | None = None,
        begin: Callable[[], None] | None = None,
    ) -> Child:
        """Start ``python -m module`` with a control pipe.

        Args:
            name: the child's name in messages and in the log. It may be that of a dead child.
            arguments: the command line behind the module.
            ends: sockets and files that the child inherits, in this order.
            environment: variables that differ from the engine's.
            begin: run in a fork of this process instead of a new interpreter
                (:func:`~sipipe.ipc.child.start_child`).
        """
        process, control = start_child(
            ("-m", module),
            arguments,
            ends=ends,
            begin=begin,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": import_path(), **(environment or {})},
        )
        limit_waits(control, PIPE_SECONDS)
        child = Child(name, process, Connection(control.detach()))
        with self._changed:
            ending = self._ending
            if not ending:
                self._children[name] = child
                # Under the lock: afterwards `close` may have closed the pipe, and its number may be
                # another file's.
                self._wake()
        if ending:  # `close` has not seen this child, and nobody else will end it
            _end([child])
        return child

    def rename(self, child: Child, name: str) -> None:
        """Give ``child`` another part, whose name no living child has."""
        with self._changed:
            self._children.pop(child.name, None)
            child.name = name
            self._children[name] = child

    def wait_ready(self, names: Sequence[str], deadline: float) -> list[Ready]:
        """Wait until all of ``names`` are ready; return what each said then, in the order of ``names``.

        Raises BaseException: what :meth:`fail` was called with. StallError: ``deadline``
        (``time.monotonic()``) passed first."""
        with self._changed:
            while late := [name for name in names if name not in self._ready]:
                if self._error is not None:
                    raise self._error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StallError(
                        f"not ready in time: {', '.join(late)}. Raise "
                        '"start_timeout" in the sipipe config if the model takes longer to load'
                    )
                # wait: `start_timeout`; each child's READY, the first death of any (`fail`)
                self._changed.wait(left)
            return [self._ready[name] for name in names]

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in every thread that waits in :meth:`wait_ready`, now or later."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def end(self, names: Sequence[str]) -> None:
        """Ask the children of these names to end. Their end is not reported."""
        with self._changed:
            for name in names:
                if name in self._children:
                    self._children[name].ask_to_end()

    def expect_end(self) -> None:
        """Report no child's end from now on."""
        self._ending = True

    def close(self) -> None:
        """End all children: close their pipes, then SIGTERM, then SIGKILL."""
        self.expect_end()
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        with self._changed:
            children = list(self._children.values())
            self._children = {}
            wake_write = self._wake_write
            self._wake_write = -1
        _end(children)
        if wake_write >= 0:
            os.close(wake_write)
            os.close(self._wake_read)

    def _wake(self) -> None:
        """Wake the events thread, which then looks at all children."""
        if self._wake_write >= 0:
            # wait: none: one byte for each child and close; the events thread, which reads them
            os.write(self._wake_write, b"x")

    # ---- the events thread ------------------------------------------------------------------

    def _listen(self) -> None:
        """Run the events thread until :meth:`close`, or until a handler raises."""
        parent = multiprocessing.parent_process()
        sentinel = None if parent is None else parent.sentinel
        if sentinel is not None:
            ends_in_order()
        try:
            while not self._ending:
                if self._serve_events(sentinel):
                    sentinel = None
        except Exception as error:
            if not self._ending:
                self._failed(error)

    def _serve_events(self, sentinel: int | None) -> bool:
        """Sleep until something happens, and handle all of it. True if the process that started the
        engine is gone, whose descriptor is ``sentinel``."""
        patience = self._turn()
        if self._neighbours_deaths:
            patience = min(patience, NEIGHBOUR_SECONDS)
        with self._changed:
            children = list(self._children.values())
        pipes = {child.pipe: child for child in children if child.pipe is not None}
        processes = {child.descriptor: child for child in children}
        handles: list[Any] = [*pipes, *processes, self._wake_read]
        if sentinel is not None:
            handles.append(sentinel)
        # wait: 5 s, then it looks at all bounds; any child's word, a new one, the parent's end
        ready = wait(handles, patience)
        orphaned = sentinel is not None and sentinel in ready
        if orphaned:
            self._end_with_parent()
        if self._wake_read in ready:
            os.read(self._wake_read, 1024)  # wait: none: it is readable
        # Messages before deaths, of all children: a last word explains more than an exit code.
        for handle in ready:
            if handle in pipes:
                self._hear(pipes[handle])
        for handle in ready:
            if handle in processes:
                self._report_end(processes[handle])
        while self._neighbours_deaths and self._neighbours_deaths[0][0] <= time.monotonic():
            _, child, report = self._neighbours_deaths.pop(0)
            self._heard(child, report)
        return orphaned

    def _end_with_parent(self) -> None:
        """End this engine within ``GRACE_SECONDS``, since its front end is gone. vLLM's engine process
        does not watch its front end, and does not end at SIGTERM while it starts or has requests that
        a shutdown waits for."""
        logger.error("the process that started this engine is gone; ending it")
        self.fail(RuntimeError("the process that started this engine is gone"))
        threading.Thread(
            target=end_this_process,
            args=(GRACE_SECONDS, lambda: self._ending),
            name="SiPipeEnd",
            daemon=True,
        ).start()

    def _hear(self, child: Child) -> None:
        """Pass on the next message of ``child``, whose pipe is readable."""
        message = child.hear()
        if isinstance(message, Ready):
            with self._changed:
                self._ready[child.name] = message
                self._changed.notify_all()
        elif isinstance(message, WorkerDiedError | LinkClosedError):
            # It tells of a neighbour, whose own word or end arrives in a moment, and says more.
            due = time.monotonic() + NEIGHBOUR_SECONDS
            self._neighbours_deaths.append((due, child, message))
        elif message is not None:
            self._heard(child, message)

    def _report_end(self, child: Child) -> None:
        """Pass on the last words of ``child``, whose process has ended, and its exit code, unless it
        was asked to end or has told why it ends."""
        with self._changed:
            if self._ending:
                return
            if self._children.get(child.name) is child:
                del self._children[child.name]
                self._ready.pop(child.name, None)
        while child.pipe is not None and child.pipe.poll(0):
            self._hear(child)
        code = child.process.wait()  # wait: none: its descriptor says that it has ended; its end
        child.release()
        explained = any(child is reporter for _, reporter, _ in self._neighbours_deaths)
        if not child.asked_to_end and not explained:
            self._died(child, f"exit code {code}")


def _end(children: Sequence[Child]) -> None:
    """End ``children`` and return when all are gone: shut their pipes down, then SIGTERM, then
    SIGKILL, each after ``GRACE_SECONDS``."""
    alive = list(children)
    for child in alive:
        child.ask_to_end()
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None and alive:
            names = ", ".join(child.name for child in alive)
            logger.warning("%s still running: sending %s", names, number.name)
            for child in alive:
                child.process.send_signal(number)
        deadline = time.monotonic() + GRACE_SECONDS
        for child in list(alive):
            with suppress(subprocess.TimeoutExpired):
                # wait: 10 s (`GRACE_SECONDS`), then SIGTERM, then SIGKILL; the child's end
                child.process.wait(max(0.0, deadline - time.monotonic()))
                alive.remove(child)
                child.release()
