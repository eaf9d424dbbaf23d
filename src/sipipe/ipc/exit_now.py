"""A process's own end, without what nobody needs of it and everybody waits for."""

import atexit
import gc
import multiprocessing.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn
from unittest.mock import patch


def exit_now(status: int) -> NoReturn:
    """End this process with ``status`` once everything registered with ``atexit`` and
    ``multiprocessing`` has been done.

    Python would then take down each module and object. With torch or Numba loaded that takes a second,
    or several beside busy neighbours, and vLLM kills an engine that takes too long. The kernel does it
    at once. Threads are not waited for.
    """
    atexit._run_exitfuncs()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        # Whoever read it is gone, it is closed, or there is none.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)


@contextmanager
def no_collections() -> Iterator[None]:
    """While active, ``gc.collect`` does nothing. For the shutdown of a process that is to end.

    vLLM collects there, so that a process that goes on gets its memory back. vLLM's modules alone are
    700,000 objects, and going through them takes 0.4 s of a core.
    """
    with patch.object(gc, "collect", _collect_nothing):
        yield


def _collect_nothing(_generation: int = 2) -> int:
    return 0
