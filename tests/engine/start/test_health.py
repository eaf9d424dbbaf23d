"""What ``/health`` says while the engine lives and a stage of it does not answer, or it ends."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.instrumentator.health import router
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

try:
    from vllm.entrypoints.common.cli_args import FrontendArgs
except ImportError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

from sipipe.engine.start.health import Health
from sipipe.engine.start.launch import MIDDLEWARE
from sipipe.observe.live import LivePage, PageHeader, Word


@pytest.fixture
def page(monkeypatch):
    made = LivePage.create(PageHeader(stages=2, samplers=1))
    monkeypatch.setattr("sipipe.observe.live.find", lambda _run: [LivePage.attach(made.path)])
    yield made
    made.close()


def server(stopped=None, *, errored=False):
    """vLLM's application, as a middleware sees it. ``stopped``: set once the engine shall end; None:
    it is not this API server's."""
    manager = stopped and SimpleNamespace(manager_stopped=stopped)
    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
    client = SimpleNamespace(errored=errored, engine_core=core)
    return SimpleNamespace(state=SimpleNamespace(engine_client=client))


def ask(app, path="/health", kind="http", *, method="GET", at=None):
    """The status; "app" where vLLM's own answers."""
    said, body = [], [{"more_body": True}, {"more_body": False}]

    async def receive():
        return body.pop(0)

    async def send(message):
        said.append(message.get("status"))

    scope = {"type": kind, "path": path, "method": method, "app": at or server()}
    asyncio.run(app(scope, receive, send))
    # What is refused is read to its end: its connection is closed.
    assert method == "GET" or said[0] == "app" or not body
    return said[0]


async def vllms(_scope, _receive, send):
    await send({"status": "app"})


def test_a_stall_is_unhealthy_until_it_is_over(page):
    app, live = Health(vllms), page.writer("executor")
    assert ask(app) == "app"
    live.set(Word.STALLED, 1)
    assert ask(app) == 503
    assert ask(app, "/v1/models") == "app"
    assert ask(app, kind="websocket") == "app"
    live.set(Word.STALLED, 0)
    assert ask(app) == "app"


def test_what_is_new_is_refused_while_the_server_ends_and_its_engine_lives(page):
    app, stopped = Health(vllms), threading.Event()
    completions = {"path": "/v1/completions", "method": "POST"}
    for asked in ({}, completions):
        assert ask(app, **asked, at=server(stopped)) == "app"
    stopped.set()
    for asked in ({}, completions):
        assert ask(app, **asked, at=server(stopped)) == 503
        assert ask(app, **asked, at=server(stopped, errored=True)) == "app"
        assert ask(app, **asked) == "app"
    assert ask(app, "/metrics", at=server(stopped)) == "app"
    assert ask(app, "/v1/realtime", "websocket", at=server(stopped)) == "app"


def test_without_an_engine_it_is_vllms_word(monkeypatch, page):
    app = Health(vllms)
    page.writer("executor").set(Word.STALLED, 1)
    assert ask(app) == 503
    page.close()
    monkeypatch.setattr("sipipe.observe.live.find", lambda _run: [])
    assert ask(app) == "app"


def test_vllms_server_takes_it_by_its_name(page):
    """In vLLM's own way of adding middleware, around its own route."""
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = None  # vLLM's word is 200
    arguments = FrontendArgs(middleware=[MIDDLEWARE])
    init_entrypoints_middleware(arguments, app, ("generate",))
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
        page.writer("executor").set(Word.STALLED, 1)
        assert client.get("/health").status_code == 503
        assert client.get("/other").status_code == 404
