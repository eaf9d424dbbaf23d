"""Start of a process that ends with this one. The other side is :mod:`sipipe.ipc.parent`."""

import atexit
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any

from sipipe.ipc.exit_now import exit_now
from sipipe.linux import open_standard_streams


def start_child(
    program: Sequence[str],
    arguments: Sequence[str] = (),
    *,
    ends: Sequence[socket.socket | IO[bytes]] = (),
    begin: Callable[[], None] | None = None,
    **options: Any,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start ``python PROGRAM CONTROL END... ARGUMENT...``. Returns the process, and this process's end
    of its control socket, whose other end is CONTROL. When this process dies, the kernel closes its
    end, and the child sees that.

    Args:
        program: ``-m`` and a module, or a script.
        arguments: words behind the descriptors' numbers.
        ends: descriptors that the child takes over. They are closed in this process.
        begin: makes the child a fork of this process, which calls this function and then runs the
            module of ``program``. Without it the child is a new interpreter.
        options: those of ``subprocess.Popen``; for a fork only ``env``.
    """
    open_standard_streams()  # neither end may have the number of one
    control, child_control = socket.socketpair()
    handed_over = [child_control, *ends]
    numbers = [end.fileno() for end in handed_over]
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
        control.close()
        raise
    finally:
        for end in handed_over:
            end.close()
    return process, control


def limit_waits(control: socket.socket, seconds: int) -> None:
    """Let nobody wait for a child that stops amid a message: reading and writing raise
    BlockingIOError after ``seconds`` in which nothing has moved."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        control.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _run(module: str, words: list[str], begin: Callable[[], None]) -> None:
    """Run ``module`` as ``python -m`` would, after ``begin``."""
    begin()
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class _Forked(subprocess.Popen[bytes]):
    """Handle of a child that was forked: ``subprocess.Popen`` without the start."""

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
    """Fork this process; returns the child's process id. The child calls ``run`` with this environment,
    its output and these descriptors alone, as a new interpreter would have them, and ends.

    Call it from the only thread, or from one beside which no other can hold a lock, and before
    anything is computed in parallel: a fork has no threads of OpenMP's but believes that it has."""
    environment = dict(environment)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, or its disk is full
            stream.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    atexit._clear()  # the parent does at its end what it registered there
    try:
        _forget_parent(descriptors)
        os.environ.clear()
        os.environ.update(environment)
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        exit_now(status)


def _forget_parent(descriptors: Collection[int]) -> None:
    """Take back in a fork what a new interpreter would not have: handlers of signals, standard input,
    and all descriptors but its output and ``descriptors``."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    inherited = {0, 1, 2, null, *descriptors}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in inherited and os.path.exists(f"/proc/self/fd/{descriptor}"):
            # Replaced and not closed: copies of the parent's objects close the number some day, and
            # it may be another file's by then.
            os.dup2(null, descriptor, inheritable=False)
    os.dup2(null, 0)


def import_path() -> str:
    """The directories that this process imports from, as a child's ``PYTHONPATH``. The working
    directory, which an interactive Python has as an empty entry, is left out once it is gone."""
    entries = []
    for entry in sys.path:
        with suppress(OSError):
            entries.append(entry or os.getcwd())
    return os.pathsep.join(entries)
