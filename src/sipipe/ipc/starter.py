"""A rule for processes that vLLM starts through ``multiprocessing``: each ends with its starter.

Who runs here
    The starter, which makes a :class:`Tied` in place of a function of vLLM's that is the target of
    such a process; and in that process one thread, which sleeps on the starter's descriptor.
Guarantees
    The process ends at once with its starter, whatever it does: as soon as Python runs in it, also
    while it imports vLLM, and in vLLM's handshake, which waits for its front end for five minutes.
    An engine that has children ends in an orderly way first (:mod:`sipipe.engine.children.children`).
Relies on
    The starter opens a descriptor (pidfd) of itself, which the process inherits. So it cannot mean
    another process.
Rejected
    ``os.getppid()``, which after seconds of imports may be an orphan's new parent. A pipe, whose
    other end forks of the starter would hold open. The parent's sentinel of ``multiprocessing``,
    which is not known before everything that the process is started with has been imported.
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
"""Name of the thread that sleeps on the starter. It holds no lock, so it prevents no fork."""

_orderly = threading.Event()
"""Set if this process ends in good order by itself when its starter is gone. Nobody waits for it."""
_watching = False
"""True once this process has the thread."""


class Tied:
    """A function that vLLM makes the target of a process, which then ends with this process."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.pid = os.getpid()
        """Process id of the starter."""
        self._starter = pidfd_open(self.pid)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        end_with_starter(self._starter)  # a forked process begins here
        return self.run(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle for a process that is spawned, which unpickles this before the function's arguments.
        The function goes by its name: its module imports vLLM, for seconds in which the starter may
        end, and the thread has to watch by then."""
        popen: Any = get_spawning_popen()
        assert popen is not None, "it is the target of a process that is being spawned"
        starter = popen.duplicate_for_child(self._starter)
        return _begin_spawned, (starter, self.run.__module__, self.run.__qualname__)


def _begin_spawned(starter: int, module: str, name: str) -> Callable[..., Any]:
    """Watch the starter in a spawned process; returns the function ``name`` of ``module``, which is
    imported when it is called."""
    os.set_inheritable(starter, False)
    end_with_starter(starter)

    def run(*args: Any, **kwargs: Any) -> Any:
        function: Any = import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        # SiPipe's plugin may have put a `Tied` in the function's place in this process, too.
        if isinstance(function, Tied):
            function = function.run
        return function(*args, **kwargs)

    return run


def tied(run: Callable[..., Any]) -> Tied:
    """The function ``run``, whose processes end with this one. It may be tied already."""
    if isinstance(run, Tied):
        if run.pid == os.getpid():
            return run
        run = run.run  # this process is a fork of the one that tied it
    return Tied(run)


def end_with_starter(starter: int) -> None:
    """End this process when its starter, of which ``starter`` is a descriptor (pidfd), has ended."""
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
    """Give this process time to end its children when its starter is gone, which it notices itself."""
    _orderly.set()
