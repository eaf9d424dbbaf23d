"""What ``sipipe serve`` stays: the process that starts the server, passes signals on, and says how
it ended.

Who runs here
    One thread, without vLLM. The server is a child in a process group of its own, with the engine
    in it; a terminal's Ctrl-C reaches this process alone.
Guarantees
    SIGTERM, SIGINT, SIGHUP (the terminal is closed) and SIGQUIT end the command in every state, also
    while the server starts: after the time that ``--shutdown-timeout`` gives to requests and
    :data:`GRACE`, at once at a second signal that is no SIGHUP. SIGHUP and SIGQUIT that were ignored
    when it began (``nohup``) still are.
    Status 0 is for ends that were asked for, help, and agents whose engine ended. The server does not
    outlive this process, and no process of the server the server.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sipipe.errors import tell
from sipipe.ipc.child import start_child
from sipipe.ipc.last_word import hold_last_word, take_last_word
from sipipe.ipc.parent import in_group, kill_group
from sipipe.ipc.sockets import own_sockets

SERVER: Sequence[str] = ("-m", "sipipe.engine.start.server")
GRACE = 8.0
"""Seconds that a server has to end in, beside those that its requests have."""
TRACKERS = 2.0
"""Seconds for Python's resource trackers, which take away what the killed have left."""
FIRST_BREAK, LONGEST_BREAK = 1.0, 60.0
"""Seconds before a server is started again: doubled each time, from the first one on."""
STEADY = 600.0
"""A server that has run for so many seconds begins again with the first break."""
ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def supervise(arguments: list[Any], *, restart: bool, follows: bool = False) -> int:
    """Run :mod:`sipipe.engine.start.server` with these arguments until it ends; its exit status.

    ``restart``: start it again when it ends unasked, unless its configuration was wrong. One that has
    passed all checks is not: what it names may be away for a while, as a host or a network is.
    ``follows``: it is a host agent, for which it is a success to end with the main host.
    """
    # Who started this may have it ignored: it would never come, and no status would be kept.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The kernel hands out a blocked signal also where it is ignored.
    spared = {n for n in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(n) is signal.SIG_IGN}
    watched = {*ENDS, signal.SIGCHLD} - spared
    # Signals are taken by sigtimedwait: none is lost between two looks, none interrupts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        with own_sockets():
            hold_last_word()
            pause, sound = FIRST_BREAK, False
            while True:
                began = time.monotonic()
                status, asked, checked = _run(arguments, before - watched, watched)
                sound |= checked and status != 2
                if not asked and (reason := take_last_word() or _killed(status)):
                    tell(reason)
                # vLLM's server ends well also when its engine has failed. One that ends well before
                # its checks was asked for help; an agent, when its main host has ended.
                if not (asked or status or follows) and checked:
                    status = 1
                if asked or (status == 2 and not sound) or not (restart and (status or checked)):
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
    """One server, with ``mask`` as its blocked signals: its exit status, whether it was asked to end,
    and, where it was not, whether its configuration had passed all checks."""
    server, control = start_child(
        SERVER,
        [json.dumps(arguments)],
        process_group=0,
        # This process has one thread, so it is safe to run code in the child.
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    )
    with control:
        deadline: float | None = None
        asked = 0
        while server.poll() is None:
            if deadline is None:
                # wait: none, while it serves; SIGCHLD at the server's end, a signal that ends it
                got: Any = signal.sigwaitinfo(watched)
            else:
                # wait: `--shutdown-timeout` and 8 s, then SIGKILL; as above
                got = signal.sigtimedwait(watched, max(0.0, deadline - time.monotonic()))
            # A closed terminal sends two SIGHUP, its shell's and its own; systemd one after SIGTERM.
            ignored = (signal.SIGCHLD, signal.SIGHUP) if asked else (signal.SIGCHLD,)
            if got is not None and got.si_signo in ignored:
                continue
            if got is None or asked:  # out of time, or asked twice
                kill_group(server.pid)
                server.wait()  # wait: none: it has just been killed; its end
                break
            asked = got.si_signo
            # vLLM drains at these two; at others it would die.
            server.send_signal(asked if asked == signal.SIGINT else signal.SIGTERM)
            deadline = time.monotonic() + (_shutdown_timeout(control) or 0.0) + GRACE
        _end_group(server.pid)
        status = server.returncode
        checked = not asked and _shutdown_timeout(control) is not None
        return (128 + (asked or -status) if status < 0 else status), bool(asked), checked


def _killed(status: int) -> str:
    """Which signal ended a server, that could not say so itself; empty: none."""
    named = {128 + number: number.name for number in signal.Signals}
    return f"the server was killed ({named[status]})" if status in named else ""


def _end_group(group: int) -> None:
    """See that all processes of a server that has ended do: they do so by themselves, unless they
    are stopped, or hang where no Python runs."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGCONT)
        if not _ends(group, GRACE):
            kill_group(group)
            _ends(group, TRACKERS)
        os.killpg(group, signal.SIGKILL)
    # A container's first process is the parent of all that have lost theirs.
    with suppress(ChildProcessError):
        # wait: none: it does not wait; nobody
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _ends(group: int, seconds: float) -> bool:
    """Whether no process of a group lives any more, within ``seconds``."""
    deadline = time.monotonic() + seconds
    while in_group(group):
        if time.monotonic() > deadline:
            return False
        # wait: 8 s, then SIGKILL, and 2 s for Python's trackers; the end of the server's processes
        time.sleep(0.05)
    return True


def _shutdown_timeout(server: socket.socket) -> float | None:
    """Seconds that requests have to end in; None before all checks have passed."""
    with suppress(OSError):
        if told := server.recv(64, socket.MSG_DONTWAIT):
            return float(told)
    return None
