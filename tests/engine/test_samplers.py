"""The samplers of an engine, on processes that only say that they are ready."""

import os
import queue
import signal
import socket
import time

import pytest

from sipipe.engine import samplers as module
from sipipe.engine.children import Children
from sipipe.engine.samplers import Samplers
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.logits import LogitsShape
from sipipe.messages.step import Snapshot


class StandIns(Samplers):
    def _start(self, index):
        ours, theirs = socket.socketpair()
        theirs.close()
        return self._children.start(self.names[index], "tests.engine.child", ["ready"]), ours

    def _boot(self, index, **more):
        return index, more


class Engine:
    """What is told of samplers that die."""

    def __init__(self):
        self.started, self.failures = queue.SimpleQueue(), []

    def started_again(self, index, tokens, poison):
        tokens.close()
        self.started.put(index)

    def failed(self, error):
        self.failures.append(error)


@pytest.fixture
def one():
    engine, children = Engine(), Children()
    samplers = StandIns(
        children, None, dtype="float32", cores=[()], succession=engine, stall_timeout=300.0
    )
    samplers.engine = engine
    children.watch(
        heard=lambda *_: None,
        died=lambda child, how: samplers.replace(child.name, how),
        turn=lambda: 5.0,
        failed=engine.failures.append,
    )
    ring = DispatchProducer("bic-i", readers=samplers.names)
    logits = LogitsChannel("bic-l", LogitsShape(vocab=8), rows=3, entries=3, readers=samplers.names)
    samplers.open(ring, logits, time.monotonic() + 60)
    yield samplers
    children.close()
    ring.close()
    logits.close()
    for sock in samplers.sockets:
        sock.close()
    assert not engine.failures


def test_a_successor_that_stops_before_it_attaches_is_killed_too(one, monkeypatch):
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.0)
    one._patience = [0.0]
    assert one.end_stuck() == 0.0  # nobody is behind
    one._started[0].process.kill()
    assert one.engine.started.get(timeout=30) == 0
    second = one._started[0].process
    os.kill(second.pid, signal.SIGSTOP)
    one.end_stuck()
    assert second.poll() is None  # it is not to do anything yet
    one.admit(0, Snapshot([], [], []))
    while second.poll() is None:
        one.end_stuck()
    assert second.returncode == -signal.SIGKILL
    assert one.engine.started.get(timeout=30) == 0
