"""Calls that wait for an engine as it ends or dies: those who wait are told, and the server ends."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace

import psutil
import pytest
from tests.engine.engines import HERE, engine_environment, gone, kill, model, named
from tests.engine.servers import VLLM, Server, complete, metric, wait_until
from vllm.v1.engine.core_client import AsyncMPClient, SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from sipipe.engine.start.drain import EndedFirstError
from sipipe.engine.start.unanswered import end_unanswered_calls

DOORS = {"sipipe": (), VLLM: ("--distributed-executor-backend", "sipipe.Executor")}
OPTIONS = ("--enforce-eager", "--max-model-len", "2048")
LONG = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True, "logprobs": 0}


class Reading:
    """A client of an engine that never answers, whose reader waits: what SiPipe extends of vLLM's."""

    def __init__(self):
        self.resources = SimpleNamespace(output_queue_task=None)
        self.utility_results = {}

    def ensure_async(self):
        if self.resources.output_queue_task is None:
            forever = asyncio.get_running_loop().create_future()
            self.resources.output_queue_task = asyncio.ensure_future(forever)

    def begin_sync(self):
        Reading.__init__(self)
        self.outputs_queue = SimpleQueue()
        self.ends = Future()
        self.output_queue_thread = Thread(target=self.ends.result)
        self.output_queue_thread.start()


@pytest.fixture
def extended(monkeypatch):
    """vLLM's clients with readers that wait; all of it goes with the test."""
    monkeypatch.setattr(AsyncMPClient, "_ensure_output_queue_task", Reading.ensure_async)
    monkeypatch.setattr(SyncMPClient, "__init__", Reading.begin_sync)
    end_unanswered_calls()


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(("told", "error"), [(False, EngineDeadError), (True, EndedFirstError)])
def test_calls_of_an_async_client_end_with_its_reader(told, error):
    async def call():
        client = Reading()
        client._sipipe_told_to_end = told  # noqa: SLF001
        loop = asyncio.get_running_loop()
        given_up, waits = (client.utility_results.setdefault(k, loop.create_future()) for k in "ab")
        given_up.cancel()
        for _ in client.utility_results:  # by each call; the reader is one
            AsyncMPClient._ensure_output_queue_task(client)  # noqa: SLF001
        client.resources.output_queue_task.cancel()
        with pytest.raises(error):
            await waits
        assert not client.utility_results

    asyncio.run(call())


@pytest.mark.usefixtures("extended")
def test_calls_of_a_sync_client_end_with_its_reader():
    client = SyncMPClient()
    given_up, waits = (client.utility_results.setdefault(k, Future()) for k in "ab")
    given_up.cancel()
    client.ends.set_result(None)
    with pytest.raises(EngineDeadError):
        waits.result(60)
    assert type(client.outputs_queue.get(timeout=60)) is EngineDeadError


def paused(server):
    """Ask for a pause once all requests have ended, and return what the operator is told."""
    asked = urllib.request.Request(f"{server.address}/pause?mode=wait", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=120)
    with refused.value as answer:
        return json.loads(answer.read())["error"]


def is_paused(server):
    """True once a pause has reached the engine."""
    with urllib.request.urlopen(f"{server.address}/is_paused", timeout=60) as answer:
        return json.loads(answer.read())["is_paused"]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("door", "ends"),
    [
        pytest.param("sipipe", "it is killed", marks=pytest.mark.ci),
        pytest.param(VLLM, "it is told to", marks=pytest.mark.ci),
        pytest.param("sipipe", "it is told to", marks=pytest.mark.slow),
        pytest.param(VLLM, "it is killed", marks=pytest.mark.slow),
    ],
)
def test_an_operator_who_waits_as_a_server_ends_is_told(models, tmp_path, door, ends):
    options = (*OPTIONS, *DOORS[door])
    more = {"VLLM_SERVER_DEV_MODE": "1"}
    with (
        Server(model(models), tmp_path / "log", *options, module=door, more=more) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        everybody = server.everybody()
        request = pool.submit(complete, server.address, [5, 6], LONG)
        wait_until(lambda: metric(server.address, "vllm:num_requests_running") == 1)
        operator = pool.submit(paused, server)
        wait_until(lambda: is_paused(server))
        if ends == "it is told to":
            server.process.send_signal(signal.SIGTERM)
            expected = "the server has ended"
        else:
            server.find("EngineCore").kill()
            expected = "was killed by SIGKILL"
        assert expected in operator.result(90)
        request.exception(90)  # it has ended, somehow: test_sudden_end.py, test_drain.py
        server.process.wait(60)
        assert gone(everybody)


@pytest.mark.engine
@pytest.mark.ci
@pytest.mark.parametrize("call", ["check_health", "generate"])
def test_a_call_of_an_engine_that_dies_raises(models, call):
    """In a user's own process. A stage is held, so that the call waits when the engine is killed."""
    script = subprocess.Popen(
        [sys.executable, str(HERE / "lives_llm.py"), str(model(models))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=engine_environment(),
        start_new_session=True,
    )
    with script:
        everybody = [psutil.Process(script.pid)]
        try:
            assert "READY\n" in iter(script.stdout.readline, "")
            everybody += everybody[0].children(recursive=True)
            named(everybody, "Worker_PP1")[0].suspend()
            script.stdin.write(f"{call}\n")
            script.stdin.flush()
            assert "CALLS\n" in iter(script.stdout.readline, "")
            named(everybody, "EngineCore")[0].kill()
            said, _ = script.communicate(timeout=90)
        finally:
            kill(everybody)
    assert "EngineDeadError: the engine has ended: " in said
