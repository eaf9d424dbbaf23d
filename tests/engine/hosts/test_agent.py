"""What passes between hosts, where figures or a thread of the agent's fail. No process is started."""

import queue
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="the engine's side of hosts is vLLM's")

from sipipe.engine.hosts import agent as module
from sipipe.engine.hosts import remote
from sipipe.messages import hosts as say
from sipipe.messages.pickles import whole


class Link:
    """The agent's connection, whose messages lie in a queue; those of the class ``refused`` raise."""

    def __init__(self, refused=()):
        self.refused = refused
        self.sent = queue.SimpleQueue()

    def send(self, *parts):
        message = whole(list(map(bytes, parts)))
        if isinstance(message, self.refused):
            raise ValueError("a message that cannot be sent")
        self.sent.put(message)


def unreadable():
    raise KeyError("a figure that is not there")


@pytest.fixture
def made(monkeypatch):
    """Make an agent with a connection, and figures that can be read or not."""
    monkeypatch.setattr(module, "LocalHost", Mock())

    def make(link, figures_here):
        figures = Mock(figures_here=figures_here)
        monkeypatch.setattr(module, "Figures", lambda *_: figures)
        return module.Agent(SimpleNamespace(), say.Plan(b"", 1, "run"), 0, link)

    return make


def drawn(agent, data):
    """Have sampler 0 of the agent's host draw ``data``, and end."""
    ours, theirs = socket.socketpair()
    with ours:
        agent._forward(0, theirs)  # noqa: SLF001 - as for a sampler that is started
        ours.sendall(data)


@pytest.mark.parametrize(
    ("figures_here", "figures"), [(lambda: b"figures", b"figures"), (unreadable, b"")]
)
def test_tokens_are_sent_on_whatever_becomes_of_figures(made, figures_here, figures):
    link = Link()
    drawn(made(link, figures_here), b"tokens")
    assert link.sent.get(timeout=30) == say.Tokens(0, b"tokens", figures)
    assert link.sent.get(timeout=30) == say.Tokens(0, b"", figures)


def test_a_thread_of_the_agent_that_fails_is_told_to_the_main_host(made):
    """Nobody else would know why no token comes any more."""
    link = Link(refused=say.Tokens)
    drawn(made(link, lambda: b""), b"tokens")
    told = link.sent.get(timeout=30)
    assert isinstance(told, say.Failed)
    assert "a message that cannot be sent" in str(told.error)


def test_a_call_whose_result_cannot_be_sent_is_told_to_the_main_host(made):
    link = Link(refused=say.Done)
    agent = made(link, lambda: b"")
    agent._calls.put(say.WaitLoaded())  # noqa: SLF001 - as the main host's
    agent._start(agent._make_calls)  # noqa: SLF001 - as `run` does
    assert isinstance(link.sent.get(timeout=30), say.Failed)


def test_another_hosts_figures_that_cannot_be_read_end_nothing(monkeypatch):
    monkeypatch.setattr(remote, "Connection", Mock())
    setup = SimpleNamespace(config=SimpleNamespace(hosts=SimpleNamespace(port=1)))
    monkeypatch.setattr(remote, "control_port", lambda *_: 1)
    host = remote.RemoteHost(setup, 1, "127.0.0.1")
    host._telemetry = Mock(take_figures=Mock(side_effect=ValueError("of another layout")))  # noqa: SLF001
    with host._feed(0) as tokens:  # noqa: SLF001 - as `start` makes it
        host._take(say.HostFigures(b"figures"))  # noqa: SLF001 - as the thread that listens
        host._take(say.Tokens(0, b"tokens", b"figures"))  # noqa: SLF001
        assert tokens.recv(100) == b"tokens"
        host._take(say.Tokens(0, b"", b""))  # noqa: SLF001
        assert tokens.recv(100) == b""
    assert host._telemetry.take_figures.call_count == 2  # noqa: SLF001
    host.close()
