"""An abort, and a new request with the same id right behind it."""

import queue
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from sipipe.engine.start.aborts import abort_once


@pytest.fixture
def engine(monkeypatch):
    """The parts of vLLM's engine that aborts and new requests go through; ``live`` has the ids of its
    requests."""
    handle = EngineCoreProc._handle_client_request  # noqa: SLF001
    monkeypatch.setattr(
        EngineCoreProc, "_handle_client_request", handle
    )  # as it is, after the test
    abort_once()
    abort_once()
    live = {"r"}
    return SimpleNamespace(
        live=live,
        aborts_queue=queue.Queue(),
        abort_requests=live.difference_update,
        add_request=lambda request, _: live.add(request),
        _reject_add_in_shutdown=lambda _: False,
        _reject_add_while_paused=lambda _: False,
    )


@pytest.mark.parametrize("amid_step", [False, True])
def test_an_abort_does_not_meet_the_next_request_with_its_id(engine, amid_step):
    """vLLM's input thread has put it in both queues."""
    abort = ["r"]
    engine.aborts_queue.put(abort)
    engine.aborts_queue.put(["another"])
    engine.live.add("another")
    if amid_step:
        EngineCore._process_aborts_queue(engine)  # noqa: SLF001
        assert not engine.live
    for message in ((EngineCoreRequestType.ABORT, abort), (EngineCoreRequestType.ADD, ("r", 0))):
        EngineCoreProc._handle_client_request(engine, *message)  # noqa: SLF001
    EngineCore._process_aborts_queue(engine)  # noqa: SLF001
    assert engine.live == {"r"}
