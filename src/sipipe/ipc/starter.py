"""A process that vLLM starts through ``multiprocessing`` ends with the process that started it.

Who runs here
    The starter, which makes a :class:`Tied` in place of a function of vLLM's that is the target of
    such a process; and in that process one thread, which sleeps on the starter's descriptor.
Guarantees
    The process ends at once with its starter, whatever it does: as soon as Python runs in it, also
    while it imports vLLM, and in vLLM's handshake, which waits for its front end for five minutes.
    An engine that has children ends in an orderly way first (:mod:`sipipe.engine.children.children`).
Relies on
    The descriptor (pidfd) is opened by the starter, of itself, and inherited. So it cannot mean
    another process. Rejected: ``os.getppid()``, which is that of an orphan's new parent when it is
    asked after seconds of imports; a pipe, whose other end forks of the starter would hold open; the
    parent's sentinel of ``multiprocessing``, which is not known before all that the process is
    started with has been imported.
"""

import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.context import get_spawning_popen
from typing import Any

from sipipe.linux import pidfd_open
from sipipe.messages.start_records import GRACE_SECONDS

STARTER = "SiPipeStarter"
"""A thread that sleeps, and holds no lock."""

_orderly = threading.Event()
"""Whether this process has an end of its own for that; nobody waits for it."""
_watching = False


class Tied:
    """A function that vLLM starts a process with, whose process ends with this one."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.pid = os.getpid()
        """The starter."""
        self._starter = pidfd_open(self.pid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        end_with_starter(self._starter)  # a forked process begins here
        return self.run(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """For a process that is spawned, which unpickles this before what the function is called
        with. The function goes by its name: its module imports vLLM, for seconds in which the
        starter may end."""
        popen: Any = get_spawning_popen()
        assert popen is not None, "it is the target of a process that is being spawned"
        starter = popen.duplicate_for_child(self._starter)
        return _begin_spawned, (starter, self.run.__module__, self.run.__qualname__)


def _begin_spawned(starter: int, module: str, name: str) -> Callable[..., Any]:
    os.set_inheritable(starter, False)
    end_with_starter(starter)

    def run(*args: Any, **kwargs: Any) -> Any:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        # SiPipe's plugin may have put one in its place here too.
        return getattr(found, "run", found)(*args, **kwargs)

    return run


def tied(run: Callable[..., Any]) -> Tied:
    """``run``, or what stands in its place, tied to this process."""
    if isinstance(run, Tied):
        if run.pid == os.getpid():
            return run
        run = run.run  # this process is a fork of the one that has tied it
    return Tied(run)


def end_with_starter(starter: int) -> None:
    """End this process when the one that this descriptor means has ended."""
    global _watching

    def watch() -> None:
        wait([starter])  # wait: none; the end of the process that started this one
        if _orderly.is_set():
            time.sleep(1.5 * GRACE_SECONDS)  # wait: 15 s; nobody, its orderly end takes 10 at most
        os._exit(1)

    if not _watching:
        _watching = True
        threading.Thread(target=watch, name=STARTER, daemon=True).start()


def ends_in_order() -> None:
    """Called where this process ends its children itself when its starter has gone: it gets the
    time for that."""
    _orderly.set()
