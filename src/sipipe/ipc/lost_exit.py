"""Exits that Python loses, asked for again.

A handler that raises SystemExit or KeyboardInterrupt runs in the main thread, between any two
instructions. In a ``__del__`` method, or a callback of the collector's, what it raises is printed as
"Exception ignored in" with a traceback, and the process goes on. Imports compile thousands of
patterns, whose parts have such methods, and a process that is told to end amid its imports is an
ordinary one: another has failed.

Who runs here: the main thread, wherever the signal met it; for a moment a thread that sends it again.
Rejected: a handler that only sets a flag, because nobody looks at one amid an import.
Rejected: ``threading.Thread``, whose locks the interrupted code may hold.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from collections.abc import Callable

AGAIN_SECONDS = 0.05
"""Seconds until the signal is sent again: what it interrupted has ended by then."""


def ask_again_for_lost_exits(renew: Callable[[], None] = lambda: None) -> None:
    """Have this process send itself SIGTERM, or SIGINT, again where what its handler raised was lost.

    Args:
        renew: Is called before, in the main thread, so that the handler raises again.
    """
    before = sys.unraisablehook

    def ask_again(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, SystemExit):
            number = signal.SIGTERM
        elif issubclass(lost.exc_type, KeyboardInterrupt):
            number = signal.SIGINT
        else:
            before(lost)
            return
        renew()
        # Not here: what is raised in this function is lost, too.
        _thread.start_new_thread(_send_again, (number,))

    sys.unraisablehook = ask_again


def _send_again(number: signal.Signals) -> None:
    time.sleep(AGAIN_SECONDS)  # wait: 0.05 s; nobody
    os.kill(os.getpid(), number)
