"""What an engine does that is told to end while it is paused, and what its clients are told."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from sipipe.engine.start.drain import EndedFirstError, drain_though_paused, tell_left_over


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
    monkeypatch.setattr(AsyncLLM, "shutdown", AsyncLLM.shutdown)
    drain_though_paused()
    tell_left_over()


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


@pytest.mark.parametrize("errored", [False, True])
def test_who_still_waits_when_the_engine_has_ended_is_told(errored):
    told = []

    async def end():
        asked = asyncio.get_running_loop().create_future()
        client = SimpleNamespace(
            output_handler=asked,
            errored=errored,
            output_processor=SimpleNamespace(propagate_error=told.append),
        )
        await asyncio.to_thread(AsyncLLM.shutdown, client)  # the server's way
        await asyncio.sleep(0)

    asyncio.run(end())
    assert [type(error) for error in told] == ([] if errored else [EndedFirstError])
    assert all(error.http_status == 503 and "has ended" in error.message for error in told)
