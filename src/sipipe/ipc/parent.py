"""A child process's end of its control pipe, and its rule that it does not outlive the engine.

Who runs here
    One thread sleeps on the pipe from the first moment on. It stores messages for
    :meth:`Parent.receive`, hands urgent ones on, answers the question what the process does, and ends
    the process with the pipe, which the kernel closes for an engine that was killed. Any thread may
    send.
Guarantees
    The process ends when the pipe does, also while it loads a model: first as by SIGTERM, so that
    ``finally`` clauses run, and a few seconds later in any case in which Python runs. Where it does
    not (stopped, or in C with Python's lock held), :func:`end_with_parent_thread` helps. A
    peer that is closed with unread data makes the end a reset (ECONNRESET): any error is the end.
Relies on
    Nobody else holds the engine's end; a message is unpickled in the thread that receives it,
    because the thread on the pipe must never wait for an import.
"""

import ctypes
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from sipipe.ipc.lost_exit import ask_again_for_lost_exits
from sipipe.messages.drafts import URGENT
from sipipe.messages.replies import ASK_STATUS, Status
from sipipe.messages.start_records import GRACE_SECONDS


class Parent:
    """The engine as its child sees it. Made in the child's main thread, whose SIGTERM and SIGINT it
    takes over. ``descriptor`` is the child's end of the control pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self.doing: Callable[[], str] = lambda: "is starting"
        """Returns what this process does now, as a predicate, for the report of a stall. The pipe's
        thread calls it."""
        self.urgent: Callable[[bytes], None] = lambda _: None
        """Takes each urgent message, without its mark. The pipe's thread calls it, so it may not wait."""
        self.on_gone: Callable[[], None] = lambda: None
        """Cleans up when the engine is gone. The pipe's thread calls it."""
        self._pipe = Connection(descriptor)
        self._saying = threading.Lock()  # wait: held while a message is sent; as that is
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ending = False
        ask_again_for_lost_exits(self._renew)
        signal.signal(signal.SIGTERM, self._end_on_signal)
        # Ctrl-C reaches the whole foreground process group; the engine decides when to stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._listen, name="SiPipeParent", daemon=True).start()

    def receive(self) -> Any:
        """Wait for the next message, and unpickle it in this thread."""
        # wait: none; the engine, whose death ends this process
        return pickle.loads(self._inbox.get())  # from our parent, through a pipe of its own

    def say(self, message: Any) -> None:
        """Send one message to the engine; nothing is raised if it is gone. Raises what pickling
        ``message`` raises."""
        data = pickle.dumps(message)
        with self._saying, suppress(OSError):
            # wait: none; the engine, whose events thread always reads, or its death
            self._pipe.send_bytes(data)

    def let_end(self) -> bool:
        """Have SIGTERM interrupt this process no more, which is about to end. False if it was ending
        already."""
        ending = self._ending
        self._ending = True
        return not ending

    def _end_on_signal(self, _signum: int, _frame: Any) -> None:
        """End as by ``sys.exit``, so that ``finally`` clauses run."""
        if self.let_end():
            raise SystemExit(0)

    def _renew(self) -> None:
        """Have the next SIGTERM interrupt this process: what the last one raised was lost."""
        self._ending = False

    def _listen(self) -> None:
        """Run the thread on the pipe until the engine is gone, then end this process."""
        try:
            while True:
                # wait: none, between messages; the engine, or its death
                data = self._pipe.recv_bytes()
                if data == ASK_STATUS:
                    self.say(Status(self.doing()))
                elif data.startswith(URGENT):
                    self.urgent(data.removeprefix(URGENT))
                else:
                    self._inbox.put(data)
        except (EOFError, OSError):
            pass
        except Exception:
            # A fault in `doing`. Without this thread nobody would see the engine's end, so end now.
            traceback.print_exc()
        with suppress(OSError):
            self.on_gone()
        end_this_process(GRACE_SECONDS / 2, lambda: self._ending)


def end_this_process(seconds: float, ending: Callable[[], bool] = lambda: False) -> None:
    """End this process from a thread that is not the main one: by SIGTERM first, so that ``finally``
    clauses run, and after ``seconds`` in any case. ``ending`` tells that the signal was handled."""
    deadline = time.monotonic() + seconds
    # The signal is repeated. One that comes just before the main thread enters a system call does not
    # wake it up, and its handler runs when the next one interrupts the call.
    while not ending() and time.monotonic() < deadline:
        os.kill(os.getpid(), signal.SIGTERM)
        # wait: `seconds`, 10 at most, then the process ends; the main thread's `finally` clauses
        time.sleep(0.5)
    # wait: the rest of these seconds; the process's end
    time.sleep(max(0.0, deadline - time.monotonic()))
    os._exit(1)


def end_with_parent_thread() -> None:
    """Have the kernel kill this process when the *thread* ends that started it.

    Rejected for samplers: a sampler that was started again was started by a thread that lives for a
    second."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_group_with(other: socket.socket, grace: float = 0.0) -> None:
    """Kill this process group as soon as the other end of the socket ``other`` is closed. With a
    ``grace``, this process gets SIGTERM then, and the group is killed so many seconds later."""

    def watch() -> None:
        with suppress(OSError):  # a reset: the other end was closed with unread data
            while other.recv(1):  # wait: none; the death of the process at the other end
                pass
        if grace:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(grace)  # wait: 10 s (`GRACE_SECONDS`), then SIGKILL; the process's end
        kill_group(os.getpgrp())
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="EndWithParent", daemon=True).start()


def kill_group(group: int) -> None:
    """Kill every process of a group but this one and Python's resource trackers. A tracker ends by
    itself when all processes that it serves have, and removes the semaphores that they leave."""
    # Repeated for those that the killed ones had just started. After 2 s everything is killed.
    for _ in range(100):
        processes = [p for p in in_group(group) if p.pid != os.getpid() and not _is_tracker(p)]
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        if not processes:
            return
        time.sleep(0.02)  # wait: 0.02 s; nobody
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def in_group(group: int) -> list[psutil.Process]:
    """The processes of a group that live."""
    processes = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):  # it ends just now
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def _is_tracker(process: psutil.Process) -> bool:
    """True if ``process`` is a resource tracker of ``multiprocessing``."""
    with suppress(psutil.Error):  # a process whose command line cannot be read is none
        return any("resource_tracker" in word for word in process.cmdline())
    return False
