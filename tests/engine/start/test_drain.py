"""What an engine does that is told to end while it is paused, and what its clients are told."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import MPClient
from vllm.v1.engine.exceptions import EngineDeadError

from sipipe.engine.start.drain import (
    EndedFirstError,
    drain_though_paused,
    is_ending,
    tell_left_over,
    telling_of_the_end,
)
from sipipe.engine.start.new_requests import check_new_requests


class Engine(EngineCoreProc):
    """What vLLM's ``_handle_shutdown`` looks at, without an engine."""

    def goes_on(self):
        """True if the engine, which was told to end, does not end yet."""
        return self._handle_shutdown()

    def __init__(self, state, timeout, *, sleeps=False):
        self.shutdown_state = EngineShutdownState.REQUESTED
        self.vllm_config = SimpleNamespace(shutdown_timeout=timeout)
        self.model_executor = SimpleNamespace(is_sleeping=sleeps)
        self.batch_queue = None
        self.engines_running = False
        self.aborted, self.sent = False, []
        self.scheduler = self
        self.pause_state = state

    def set_pause_state(self, state):
        self.pause_state = state

    def finish_requests(self, requests, _status):
        assert requests is None
        self.aborted = True
        return ["r"]

    def _send_abort_outputs(self, aborted):
        self.sent += aborted

    def get_num_unfinished_requests(self):
        return int(not self.aborted and self.pause_state == PauseState.UNPAUSED)

    def has_requests(self):
        return bool(self.get_num_unfinished_requests())


@pytest.fixture(autouse=True)
def mended(monkeypatch):
    # Another is put in its place, and goes with this fixture.
    own = EngineCoreProc._handle_shutdown  # noqa: SLF001
    monkeypatch.setattr(EngineCoreProc, "_handle_shutdown", own)
    for name in ("shutdown", "dead_error", "add_request"):
        monkeypatch.setattr(AsyncLLM, name, getattr(AsyncLLM, name))
    monkeypatch.setattr(MPClient, "_format_exception", MPClient._format_exception)  # noqa: SLF001
    drain_though_paused()
    tell_left_over()
    check_new_requests()


@pytest.mark.parametrize("state", PauseState)
def test_a_paused_engine_goes_on_with_its_requests_until_they_end(state):
    engine = Engine(state, 8)
    assert engine.goes_on(), "it has ended with a request"
    assert engine.pause_state == PauseState.UNPAUSED
    engine.aborted = True  # it is done
    assert not engine.goes_on()


def test_one_without_weights_aborts_them_and_tells_their_clients():
    engine = Engine(PauseState.PAUSED_ALL, 8, sleeps=True)
    assert not engine.goes_on()
    assert engine.sent == ["r"]


def test_without_time_vllm_aborts_them():
    engine = Engine(PauseState.PAUSED_ALL, 0)
    assert not engine.goes_on()
    assert engine.sent == ["r"]


class Client(AsyncLLM):
    """What vLLM's and SiPipe's ends of an ``AsyncLLM`` look at, without an engine."""

    def __init__(self, handler, dead=False):
        self.told = []
        self.output_handler = handler
        self.output_processor = SimpleNamespace(propagate_error=self.told.append)
        self.engine_core = SimpleNamespace(
            resources=SimpleNamespace(engine_dead=dead, engine_manager=None),
            shutdown=lambda timeout: None,
        )


def ended(dead=False):
    """A client that has ended, in the server's way."""

    async def end():
        client = Client(asyncio.get_running_loop().create_future(), dead)
        assert not is_ending(client)
        await asyncio.to_thread(client.shutdown)
        await asyncio.sleep(0)
        return client

    return asyncio.run(end())


def test_who_still_waits_when_the_engine_has_ended_is_told():
    (error,) = ended().told
    assert type(error) is EndedFirstError
    assert error.http_status == 503
    assert "has ended" in error.message


def test_who_comes_later_is_told_too():
    """By the server's look at the engine, by the engine's, and by a step that fails on the way."""
    client = ended()
    assert is_ending(client)
    assert type(client.dead_error) is EndedFirstError
    with pytest.raises(EndedFirstError):
        asyncio.run(client.add_request("a", [1], SamplingParams()))
    with pytest.raises(EndedFirstError), telling_of_the_end(client):
        raise OSError("the socket is closed")


@pytest.mark.parametrize(("told", "kind"), [(True, EndedFirstError), (False, EngineDeadError)])
def test_who_waits_as_vllm_stops_listening_is_told_of_an_end_that_was_meant(told, kind):
    """The reader of the engine's answers hands an error on, perhaps before ``shutdown`` goes on."""
    engine_core = SimpleNamespace(
        resources=SimpleNamespace(engine_dead=True), _sipipe_told_to_end=told
    )
    error = MPClient._format_exception(engine_core, EngineDeadError())  # noqa: SLF001
    assert type(error) is kind


def test_clients_of_an_engine_that_has_ended_by_itself_are_told_by_vllm():
    client = ended(dead=True)
    assert client.told == []
    assert not is_ending(client)
    assert type(client.dead_error) is EngineDeadError
    with pytest.raises(EngineDeadError):
        asyncio.run(client.add_request("a", [1], SamplingParams()))
    with pytest.raises(OSError, match="closed"), telling_of_the_end(client):
        raise OSError("the socket is closed")


def test_a_client_that_nobody_has_asked_ends_too():
    client = Client(None)
    client.shutdown()
    assert is_ending(client)
    assert client.told == []
