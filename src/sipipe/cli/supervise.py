"""Supervisor of ``sipipe serve``: it starts the server, passes signals on, and says how it ended.

Who runs here
    One thread, without vLLM. The server is a child in a process group of its own, with the engine
    in it. A terminal's Ctrl-C reaches this process alone.
Guarantees
    SIGTERM, SIGINT, SIGHUP (the terminal is closed) and SIGQUIT end the command in every state, also
    while the server starts: after the time that ``--shutdown-timeout`` gives to requests and
    :data:`GRACE`, at once at a second signal that is no SIGHUP. SIGHUP and SIGQUIT that were ignored
    when it began (``nohup``) still are.
    Status 0 is for servers that were told to end, for help, and for agents whose engine ended. The
    server does not outlive this process, and none of the server's processes outlives the server.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sipipe.errors import one_line, tell
from sipipe.ipc.child import start_child
from sipipe.ipc.last_word import VARIABLE as LAST_WORD
from sipipe.ipc.last_word import hold_last_word, take_last_word
from sipipe.ipc.parent import in_group, kill_group
from sipipe.ipc.sockets import own_sockets

SERVER: Sequence[str] = ("-m", "sipipe.engine.start.server")
GRACE = 8.0
"""Seconds in which a server has to end, after those that its requests have."""
TRACKERS = 2.0
"""Seconds for Python's resource trackers, which remove what killed processes have left."""
WORD_BYTES = 1 << 16
"""Bytes of a word of the server's command line, at most."""
FIRST_BREAK = 1.0
"""Seconds before a server is started again for the first time. They double each time."""
LONGEST_BREAK = 60.0
"""Seconds before a server is started again, at most."""
STEADY = 600.0
"""Seconds that a server has to run for the next break to be the first one again."""
ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def supervise(arguments: list[Any], *, restart: bool, follows: bool = False) -> int:
    """Run :mod:`sipipe.engine.start.server` with ``arguments`` until it ends; returns the exit status.

    Args:
        arguments: those of :func:`sipipe.engine.start.server.main`, which travel as JSON.
        restart: start the server again when it ends by itself, unless its configuration was wrong. It
            is not wrong if it has passed all checks once: what it names, such as a host or a network,
            may be away for a while.
        follows: the server is a host agent, which succeeds by ending with the main host.
    """
    # The process that started this one may have ignored it, which is inherited. SIGCHLD would then
    # never come, and the kernel would keep no exit status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The kernel hands out a blocked signal also where it is ignored.
    ignored = {
        number
        for number in (signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(number) is signal.SIG_IGN
    }
    watched = {*ENDS, signal.SIGCHLD} - ignored
    # Signals are taken by sigtimedwait: none is lost between two looks, none interrupts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        with own_sockets():
            # This is the outermost process, also of a server that a program starts which has had an
            # engine of its own.
            os.environ.pop(LAST_WORD, None)
            hold_last_word()
            pause = FIRST_BREAK
            sound = False  # the configuration has passed all checks once
            again = False
            while True:
                began = time.monotonic()
                try:
                    status, ends, checked = _run(arguments, before - watched, watched)
                except OSError as error:
                    if not again:
                        raise
                    # As when memory or process ids ran out, which is what ended the server before.
                    tell(f"the server cannot be started: {one_line(error)}")
                    status = 1
                    ends = checked = False
                again = True
                sound |= checked and status != 2
                reason = "" if ends else take_last_word() or _killed(status)
                if reason:
                    tell(reason)
                # vLLM's server returns 0 also when its engine has failed. Status 0 is right for a
                # server that showed its help, before any check, and for an agent.
                if not (ends or status or follows) and checked:
                    status = 1
                wrong = status == 2 and not sound
                if ends or wrong or not (restart and (status or checked)):
                    return status
                lived = time.monotonic() - began
                pause = FIRST_BREAK if lived > STEADY else pause
                tell(
                    f"the server ended by itself after {lived:.0f} s (status {status}); "
                    f"it is started again in {pause:.0f} s"
                )
                # wait: the break, 60 s at most; a signal that ends it
                if signal.sigtimedwait(watched - {signal.SIGCHLD}, pause) is not None:
                    return 0
                pause = min(2 * pause, LONGEST_BREAK)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    arguments: list[Any], mask: set[int], watched: set[signal.Signals]
) -> tuple[int, bool, bool]:
    """Run one server, with ``mask`` as its blocked signals. Returns its exit status; True if it was
    told to end; and True if it was not and its configuration had passed all checks."""
    server, control = start_child(
        SERVER,
        in_words(json.dumps(arguments)),
        process_group=0,
        # This process has one thread, so it is safe to run code in the child.
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    )
    with control:
        deadline: float | None = None
        ended_by = 0  # the signal that has told the server to end
        while server.poll() is None:
            if deadline is None:
                # wait: none, while it serves; SIGCHLD at the server's end, a signal that ends it
                received: Any = signal.sigwaitinfo(watched)
            else:
                # wait: `--shutdown-timeout` and 8 s, then SIGKILL; as above
                received = signal.sigtimedwait(watched, max(0.0, deadline - time.monotonic()))
            # A closed terminal sends two SIGHUP, its shell's and its own; systemd one after SIGTERM.
            ignored = (signal.SIGCHLD, signal.SIGHUP) if ended_by else (signal.SIGCHLD,)
            if received is not None and received.si_signo in ignored:
                continue
            if received is None or ended_by:  # out of time, or told a second time
                kill_group(server.pid)
                server.wait()  # wait: none: it has just been killed; its end
                break
            ended_by = received.si_signo
            # vLLM lets requests end at these two signals; at others it would die.
            server.send_signal(ended_by if ended_by == signal.SIGINT else signal.SIGTERM)
            deadline = time.monotonic() + (_shutdown_timeout(control) or 0.0) + GRACE
        _end_group(server.pid)
        status = server.returncode
        checked = not ended_by and _shutdown_timeout(control) is not None
        return (128 + (ended_by or -status) if status < 0 else status), bool(ended_by), checked


def in_words(text: str) -> list[str]:
    """Cut an ASCII text into words that a command line can have: Linux takes 128 KiB a word, and a
    command line that it has taken may be longer in all."""
    return [text[start : start + WORD_BYTES] for start in range(0, len(text), WORD_BYTES)]


def _killed(status: int) -> str:
    """Line on the signal that killed a server, which could not say so itself; empty if none did."""
    named = {128 + number: number.name for number in signal.Signals}
    return f"the server was killed ({named[status]})" if status in named else ""


def _end_group(group: int) -> None:
    """Wait until all processes of a server that has ended are gone, then kill the rest. They end by
    themselves, unless they are stopped, or hang where no Python runs."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGCONT)
        if not _ends(group, GRACE):
            kill_group(group)
            _ends(group, TRACKERS)
        os.killpg(group, signal.SIGKILL)
    # This may be a container's first process, which inherits all children that have lost their parent.
    with suppress(ChildProcessError):
        # wait: none: it does not wait; nobody
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _ends(group: int, seconds: float) -> bool:
    """Wait until no process of a group lives; False if one still does after ``seconds``."""
    deadline = time.monotonic() + seconds
    while in_group(group):
        if time.monotonic() > deadline:
            return False
        # wait: 8 s, then SIGKILL, and 2 s for Python's trackers; the end of the server's processes
        time.sleep(0.05)
    return True


def _shutdown_timeout(server: socket.socket) -> float | None:
    """Seconds that requests have to end in, which the server sends when all checks have passed; None:
    it has not, or they were read before."""
    with suppress(OSError):
        text = server.recv(64, socket.MSG_DONTWAIT)
        if text:
            return float(text)
    return None
