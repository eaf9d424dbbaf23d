"""Ends of engines, as vLLM's front ends hear of them: which process ended, how, and why.

The cause is the engine's last word (:mod:`sipipe.ipc.last_word`); where it could not say any, because
it was killed, this side says so, from the exit status. Processes that vLLM starts are tied to this one
here.

Who runs here: the process that starts engines, by every door, and vLLM's API servers.
"""

import signal
import sys
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import finalize

from vllm.v1 import utils as process_utils
from vllm.v1.engine import coordinator, core
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.exceptions import EngineDeadError

from sipipe.errors import EngineDiedError, tell
from sipipe.extending import extends
from sipipe.ipc.exit_now import exit_now, no_collections
from sipipe.ipc.last_word import hold_last_word, last_word, leave_last_word
from sipipe.ipc.starter import tied
from sipipe.linux import open_standard_streams

_run_engine_core = core.EngineCoreProc.run_engine_core
"""vLLM's own, before :func:`watch_ends` puts another in its place."""

REAPED_SECONDS = 5.0
"""Time from the end of a process's descriptors to its exit status, which the kernel has a little later."""


class EngineProcesses(engine_utils.CoreEngineProcManager):
    """vLLM's manager of engine processes, which says how they ended."""

    def finished_procs(self) -> dict[str, int]:
        """Return nothing while all run. Raises EngineDiedError: one has ended.

        vLLM asks while it waits for the start. Its own function would read exit statuses that are
        still to come, and say ``{}``.
        """
        ended = self._ended()
        if not ended:
            return {}
        for process in ended:
            _leave_word_of(process, "while it started")
        self.shutdown()
        # An engine that found the configuration wrong has ended with a command's status for it.
        wrong = any(process.exitcode == 2 for process in ended)
        raise EngineDiedError(last_word(), wrong=wrong)

    def shutdown(self, timeout: float | None = None) -> None:
        """End all processes, as vLLM's, which calls it too when one has ended by itself."""
        if not self.manager_stopped.is_set():
            for process in self._ended():
                _leave_word_of(process)
        super().shutdown(timeout)

    def _ended(self) -> list[BaseProcess]:
        """Processes that have ended, each with its exit status."""
        sentinels = set(wait(self.sentinels(), 0))
        processes = [process for process in self.processes if process.sentinel in sentinels]
        for process in processes:
            process.join(REAPED_SECONDS)
        return processes


def _leave_word_of(process: BaseProcess, when: str = "") -> None:
    """Say how an engine's process ended, if it has not said itself why.

    Args:
        when: A phrase that says when, such as "while it started".
    """
    status = process.exitcode
    if status is None or (status == 0 and not when):  # it was told to end
        return
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}
        how = f"was killed by {names.get(-status, f'signal {-status}')}"
    else:
        how = f"ended with status {status}"
    leave_last_word(f"the engine process {process.name} (pid {process.pid}) {how} {when}")


def run_engine(*args: Any, **kwargs: Any) -> None:
    """Run vLLM's ``run_engine_core``, in the engine's process. A failure until the engine is ready,
    also before it makes its executor, is one line and the cause that front ends name. An engine that
    is told to end ends its process too, before vLLM has waited long enough to kill it."""
    from sipipe.engine.executor import one_cause

    engine = core.EngineCoreProc
    engine.__init__ = one_cause()(engine.__init__)
    core.EngineCoreProc.shutdown = no_collections()(engine.shutdown)
    try:
        _run_engine_core(*args, **kwargs)
    except SystemExit as end:
        exit_now(end.code if isinstance(end.code, int) else int(end.code is not None))


def watch_ends() -> None:
    """Have this process's engines, and whatever else vLLM starts for them, end with it, and errors of
    vLLM's clients name the cause. Safe to call again."""
    open_standard_streams()
    hold_last_word()
    engine = core.EngineCoreProc
    balancer = coordinator.DPCoordinatorProc
    engine.run_engine_core = tied(run_engine)
    balancer.run_coordinator = tied(balancer.run_coordinator)
    process_utils.run_api_server_worker_proc = tied(process_utils.run_api_server_worker_proc)
    engine_utils.CoreEngineProcManager = EngineProcesses

    @extends(EngineDeadError, "__init__")
    def begin_with_cause(begin: Any, self: EngineDeadError, *args: Any, **kwargs: Any) -> None:
        """vLLM's text points to a stack trace above, which clients do not have."""
        begin(self, *args, **kwargs)
        if cause := last_word():
            self.args = (f"the engine has ended: {cause}",)


def say_cause_last() -> None:
    """Have ``vllm serve`` end with the cause as its last line, and without a traceback of what an
    engine has said."""
    show_others = sys.excepthook

    def show(kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, EngineDiedError):
            return
        show_others(kind, error, traceback)
        if isinstance(error, Exception):  # as of an API server of several that was killed
            leave_last_word(f"{kind.__name__}: {error}")

    def say() -> None:
        if cause := last_word():
            tell(cause)

    if show_others.__name__ != show.__name__:
        sys.excepthook = show
        # Finalizers run in the opposite order of their making at the interpreter's end, and vLLM's,
        # which end its processes and log it, are made later. Rejected: atexit, whose order depends
        # on who was the first to make a finalizer.
        finalize(sys.modules[__name__], say)
