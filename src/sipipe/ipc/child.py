"""Starts a process of ours that ends with this one: :mod:`sipipe.ipc.parent` is its side."""

import atexit
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import IO, Any


def start_child(
    program: Sequence[str],
    arguments: Sequence[str] = (),
    *,
    ends: Sequence[socket.socket | IO[bytes]] = (),
    begin: Callable[[], None] | None = None,
    **options: Any,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start ``python PROGRAM CONTROL END... ARGUMENT...``; returns it, and our end of its control
    socket, whose other end is CONTROL: the kernel ends that with ours when this process dies.
    ``ends``: more descriptors that it takes over; this process lets go of them. ``begin``: it is a
    fork of this process, which calls this and then runs the module of ``program``; None: a new
    interpreter. ``options``: of ``subprocess.Popen``; of a fork ``env`` alone."""
    ours, theirs = socket.socketpair()
    given = [theirs, *ends]
    numbers = [end.fileno() for end in given]
    words = [*map(str, numbers), *arguments]
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    process: subprocess.Popen[bytes]
    try:
        if begin is None:
            process = subprocess.Popen(
                [sys.executable, *flags, "-P", *program, *words], pass_fds=numbers, **options
            )
        else:
            run = partial(_run, program[-1], words, begin)
            process = _Forked(fork(run, numbers, options["env"]))
    except BaseException:
        ours.close()
        raise
    finally:
        for end in given:
            end.close()
    return process, ours


def _run(module: str, words: list[str], begin: Callable[[], None]) -> None:
    begin()
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class _Forked(subprocess.Popen[bytes]):
    """A child that was forked: what there is to do with one that runs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.args = []
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()  # wait: as `Popen` has it; its end
        self._child_created = True


def fork(
    run: Callable[[], None], descriptors: Collection[int], environment: Mapping[str, str]
) -> int:
    """The number of a child that goes on from here: runs ``run`` with this environment and, beside
    its output, these descriptors alone, as a new interpreter would, and ends. From a thread whose
    locks no other thread holds, and before any computes: OpenMP's threads do not come along."""
    environment = dict(environment)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if pid := os.fork():
        return pid
    status = 1
    atexit._clear()  # what this process was to do at its end, it does itself
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        kept = {0, 1, 2, nothing, *descriptors}
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in kept and os.path.exists(f"/proc/self/fd/{descriptor}"):
                # Not closed: objects that this process has of its parent's will close the number.
                os.dup2(nothing, descriptor, inheritable=False)
        os.dup2(nothing, 0)
        os.environ.clear()
        os.environ.update(environment)
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
