"""vLLM's front ends say which process of an engine ended, how, and why."""

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from vllm.v1.engine import async_llm, core, utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from sipipe.engine.start import ends
from sipipe.engine.start.ends import EngineProcesses
from sipipe.engine.start.failed_requests import tell_clients_why
from sipipe.errors import EngineDiedError
from sipipe.ipc.last_word import last_word, leave_last_word

pytestmark = pytest.mark.usefixtures("own_last_word")


def _fail(status, word):
    leave_last_word(word)
    os._exit(status)


def _die(number):
    os.kill(os.getpid(), number)


@pytest.fixture
def started(monkeypatch):
    """Makes a manager of a process that runs ``target``."""
    monkeypatch.setattr(utils, "shutdown", lambda processes, timeout=None: None)
    monkeypatch.setattr(utils.numa_utils, "configure_subprocess", lambda *_, **__: nullcontext())
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    parallel = SimpleNamespace(data_parallel_size=1, assigned_physical_gpu_ids=None, use_ray=False)
    vllm_config = SimpleNamespace(shutdown_timeout=0, parallel_config=parallel)

    def start(target, *args):
        made = multiprocessing.Event()

        def run(**_):
            made.wait(
                60
            )  # the manager looks for processes that have ended, when it has started them
            target(*args)

        monkeypatch.setattr(core.EngineCoreProc, "run_engine_core", run)
        manager = EngineProcesses(
            local_engine_count=1,
            start_index=0,
            local_start_index=0,
            vllm_config=vllm_config,
            local_client=True,
            handshake_address="",
            executor_class=object,
            log_stats=False,
        )
        made.set()
        return manager, manager.processes[0]

    return start


@pytest.mark.parametrize(
    ("target", "args", "cause", "status"),
    [
        (_die, (signal.SIGKILL,), r"EngineCore \(pid \d+\) was killed by SIGKILL while it st", 1),
        (_fail, (1, "stage worker stage1.0 died"), "^stage worker stage1.0 died$", 1),
        (_fail, (2, "--dtype is wrong"), "^--dtype is wrong$", 2),
        (_fail, (3, ""), r"EngineCore \(pid \d+\) ended with status 3 while it started", 1),
        (_fail, (0, ""), r"EngineCore \(pid \d+\) ended with status 0 while it started", 1),
    ],
)
def test_a_start_that_fails_names_process_and_cause(started, target, args, cause, status):
    """Also in the moment in which its descriptors are closed, and its status is still to come."""
    manager, process = started(target, *args)
    multiprocessing.connection.wait([process.sentinel])
    with pytest.raises(EngineDiedError, match=cause) as died:
        manager.finished_procs()
    assert isinstance(died.value, RuntimeError), "as vLLM's own is"
    assert died.value.status == status


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (2, 2), ("why", 1)])
def test_the_end_of_an_engine_waits_for_nothing(started, monkeypatch, code, status):
    """vLLM kills an engine that takes long, as for a thread that goes on."""

    def end():
        threading.Thread(target=threading.Event().wait).start()
        raise SystemExit(code)

    monkeypatch.setattr(ends, "_run_engine_core", end)
    monkeypatch.setattr(core.EngineCoreProc, "__init__", core.EngineCoreProc.__init__)
    monkeypatch.setattr(core.EngineCoreProc, "shutdown", core.EngineCoreProc.shutdown)
    _, process = started(ends.run_engine)
    process.join(60)
    assert process.exitcode == status
    process.kill()


def test_the_shutdown_of_an_engine_goes_through_no_objects(started, monkeypatch):
    class Cycle:
        def __init__(self):
            self.itself = self

    def shutdown(_engine):
        cycle = weakref.ref(Cycle())
        gc.collect()
        raise SystemExit(3 if cycle() else 4)

    monkeypatch.setattr(ends, "_run_engine_core", lambda: core.EngineCoreProc.shutdown(None))
    monkeypatch.setattr(core.EngineCoreProc, "__init__", core.EngineCoreProc.__init__)
    monkeypatch.setattr(core.EngineCoreProc, "shutdown", shutdown)
    gc.disable()  # which might run just then by itself
    try:
        _, process = started(ends.run_engine)
        process.join(60)
    finally:
        gc.enable()
    assert process.exitcode == 3


def test_an_engine_that_is_told_to_end_says_nothing(started):
    manager, process = started(signal.pause)
    assert manager.finished_procs() == {}
    manager.shutdown()
    process.kill()
    process.join()
    manager.shutdown()
    assert last_word() == ""


def test_an_engine_that_is_killed_while_it_serves_is_named(started):
    manager, process = started(signal.pause)
    process.kill()
    multiprocessing.connection.wait([process.sentinel])
    manager.shutdown()  # vLLM's monitor
    assert last_word().endswith("was killed by SIGKILL")


def test_clients_of_a_dead_engine_are_told_why(monkeypatch):
    monkeypatch.setattr(EngineDeadError, "__init__", EngineDeadError.__init__)
    for place in ("EngineCoreProc.run_engine_core", "DPCoordinatorProc.run_coordinator"):
        name, function = place.split(".")
        owner = getattr(ends.core, name, None) or getattr(ends.coordinator, name)
        monkeypatch.setattr(owner, function, staticmethod(getattr(owner, function)))
    run = ends.process_utils.run_api_server_worker_proc
    monkeypatch.setattr(ends.process_utils, "run_api_server_worker_proc", run)
    monkeypatch.setattr(utils, "CoreEngineProcManager", utils.CoreEngineProcManager)
    ends.watch_ends()
    assert "stack trace" in str(EngineDeadError()), "nobody has said any more"
    leave_last_word("stage worker stage1.0 died")
    assert str(EngineDeadError()) == "the engine has ended: stage worker stage1.0 died"


def test_clients_of_a_front_end_that_fails_are_told_why(monkeypatch):
    async def generate(*_, **__):
        yield SimpleNamespace(outputs=[])
        raise EngineGenerateError from ValueError("Counters can only be incremented")

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    tell_clients_why()

    async def ask():
        engine = SimpleNamespace(errored=True)
        return [output async for output in async_llm.AsyncLLM.generate(engine, "a prompt", None)]

    told = "vLLM's front end failed: ValueError: Counters can only be incremented"
    with pytest.raises(EngineGenerateError, match=told):
        asyncio.run(ask())
    assert last_word() == told, "the server ends, and says it last"


LAST = """
import sys, weakref
from sipipe.engine.start.ends import say_cause_last
from sipipe.errors import EngineDiedError
from sipipe.ipc.last_word import hold_last_word, leave_last_word
class Manager: pass
manager = Manager()
hold_last_word()
say_cause_last()
weakref.finalize(manager, print, "vLLM ends its processes", file=sys.stderr)
if "died" in sys.argv[1]:
    leave_last_word("stage worker stage1.0 died")
raise eval(sys.argv[1])
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("error", "last"),
    [
        ("EngineDiedError('died')", "sipipe: stage worker stage1.0 died"),
        ("RuntimeError('a process')", "sipipe: RuntimeError: a process"),
    ],
)
def test_under_vllm_serve_the_cause_is_the_last_line(error, last):
    ended = subprocess.run(
        [sys.executable, "-c", LAST, error], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-2:] == ["vLLM ends its processes", last]
    assert ("Traceback" in ended.stderr) == error.startswith("RuntimeError")
