"""What ``/health`` says while the engine lives and a stage of it does not answer."""

import asyncio

import pytest

from sipipe.engine import health
from sipipe.engine.health import Health
from sipipe.observe.live import LivePage, PageHeader, Word


@pytest.fixture
def page(monkeypatch):
    made = LivePage.create(PageHeader(stages=2, samplers=1))
    monkeypatch.setattr(health, "find", lambda _run: [LivePage.attach(made.path)])
    yield made
    made.close()


def ask(app, path="/health", kind="http"):
    """The status; "app" where vLLM's own answers."""
    said = []

    async def send(message):
        said.append(message.get("status"))

    asyncio.run(app({"type": kind, "path": path, "method": "GET"}, None, send))
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


def test_without_an_engine_it_is_vllms_word(monkeypatch, page):
    app = Health(vllms)
    page.writer("executor").set(Word.STALLED, 1)
    assert ask(app) == 503
    page.close()
    monkeypatch.setattr(health, "find", lambda _run: [])
    assert ask(app) == "app"
