"""The samplers of an engine, on processes that only say that they are ready."""

import os
import queue
import signal
import socket
import time
from array import array
from types import SimpleNamespace

import pytest

from sipipe.engine.children import samplers as module
from sipipe.engine.children import spare_sampler as spare
from sipipe.engine.children.children import Children
from sipipe.engine.children.samplers import Samplers
from sipipe.errors import WorkerDiedError
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.logits import LogitsShape
from sipipe.messages.replies import Trying
from sipipe.messages.start_records import SPARE
from sipipe.messages.step import Snapshot
from sipipe.observe.live import Word
from sipipe.observe.phases import COUNTED_PHASES


class StandIns(Samplers):
    def _start(self, name):
        ours, theirs = socket.socketpair()
        theirs.close()
        says = "warm" if name == SPARE else "ready"
        return self._children.start(name, "tests.engine.child", [says]), ours

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
        children, None, dtype="float32", cores=[()], figures=[], events=engine, stall_timeout=300.0
    )
    samplers.engine = engine

    def died(child, how):
        samplers.spare.ended(how) if child.name == SPARE else samplers.replace(child.name, how)

    children.watch(
        heard=lambda child, message: samplers.heard(child.name, message),
        died=died,
        turn=lambda: min(0.1, samplers.spare.keep()),
        failed=engine.failures.append,
    )
    ring = DispatchProducer("bic-i", readers=samplers.names)
    logits = LogitsChannel("bic-l", LogitsShape(vocab=8), rows=3, entries=3, readers=samplers.names)
    samplers.open(ring, logits, time.monotonic() + 60)
    yield samplers
    children.close()
    samplers.spare.close()
    ring.close()
    logits.close()
    for sock in samplers.sockets:
        sock.close()
    assert not engine.failures


def test_a_successor_that_stops_before_it_attaches_is_killed_too(one, monkeypatch):
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.0)
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


def spare_of(samplers, not_of=-1):
    """The child that has compiled and has no place."""
    while True:
        child = samplers._children._children.get(SPARE)
        if child is not None and samplers.spare.warm and child.process.pid != not_of:
            return child
        time.sleep(0.01)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(spare, "SPARE_SECONDS", 0.0)
    monkeypatch.setattr(spare, "AGAIN_SECONDS", 0.0)


def test_the_spare_takes_the_place_of_a_sampler_that_dies_and_there_is_another(at_once, one):
    first = spare_of(one)
    one._started[0].process.kill()
    assert one.engine.started.get(timeout=30) == 0
    assert one._started[0] is first
    assert first.name == "sampler0"
    second = spare_of(one, first.process.pid)
    first.process.kill()  # it is a sampler like any other
    assert one.engine.started.get(timeout=30) == 0
    assert one._started[0] is second
    assert len(one._deaths[0]) == 2


def test_a_spare_that_dies_is_replaced_and_nothing_else_happens(at_once, one):
    first = spare_of(one)
    first.process.kill()
    spare_of(one, first.process.pid)
    assert not one._deaths[0]
    assert one.engine.started.empty()


def test_a_spare_that_has_not_compiled_is_not_waited_for(at_once, one):
    first = spare_of(one)
    one.spare.warm = False
    one._started[0].process.kill()
    assert one.engine.started.get(timeout=30) == 0
    assert one._started[0] is not first
    assert first.name == SPARE


def test_where_none_can_be_started_the_spare_is_tried_again(at_once, one, monkeypatch):
    kept = spare_of(one)
    refused = []

    def start(name):
        refused.append(name)
        if len(refused) < 3:
            raise OSError("too many open files")
        return StandIns._start(one, name)

    monkeypatch.setattr(one.spare, "_start", start)
    kept.process.kill()
    spare_of(one, kept.process.pid)
    assert refused == [SPARE] * 3


def test_a_spare_that_cannot_be_started_is_tried_again_in_a_minute(one, monkeypatch):
    def start(name):
        raise OSError("too many open files")

    later = spare.SpareSampler(one._children, start)
    later.want()
    monkeypatch.setattr(later, "_due", 0.0)
    assert later.keep() == spare.AGAIN_SECONDS


def test_requests_that_no_sampler_survives_never_end_the_engine(one, monkeypatch):
    """However many come, one after the other."""
    given_up = []
    monkeypatch.setattr(
        module.Samplers, "_replace", lambda _, index, poison, *__: given_up.append(poison)
    )
    for handle in range(100):
        one.replace("sampler0", "signal 11")  # it is not known yet at whose row
        one._replacing[0].join()
        for _ in range(module.STRIKES):
            one.heard("sampler0", Trying(handle))
            one.replace("sampler0", "signal 11")
            one._replacing[0].join()
    assert [poison[0] for poison in given_up if poison] == list(range(100))
    assert not one._deaths[0]


def test_what_is_measured_is_what_the_others_say_where_one_died(one, monkeypatch):
    said = [SimpleNamespace(measured={}), SimpleNamespace(measured={"greedy": 2.0})]
    monkeypatch.setattr(one._children, "wait_ready", lambda *_: said)
    monkeypatch.setattr(one, "_started", [])
    monkeypatch.setattr(one, "_started", [SimpleNamespace(say=lambda _: None)] * 2)
    assert one.open(*one._channels, 0.0, measure=8) == {"greedy": 2.0}
    said.pop()
    with pytest.raises(WorkerDiedError, match="all samplers ended while they measured"):
        one.open(*one._channels, 0.0, measure=8)
    assert one.open(*one._channels, 0.0) == {}


class Looks:
    """Looks at a sampler whose CPU seconds, place and time the test says."""

    def __init__(self, samplers, monkeypatch):
        self.cpu = self.now = 1000.0
        self.use = 0
        self._samplers = samplers
        monkeypatch.setattr(
            module.psutil, "Process", lambda _: SimpleNamespace(cpu_times=lambda: (self.cpu,))
        )

    def after(self, seconds, cpu=0.0):
        self.now, self.cpu = self.now + seconds, self.cpu + cpu
        return self._samplers._why_stuck(0, 1, self.use, self.now)

    def move(self):
        self.use += 1
        assert self.after(0.0) == ""


def test_the_patience_with_what_does_nothing_doubles_and_comes_back(one, monkeypatch):
    looks, one.stall_timeout = Looks(one, monkeypatch), 1000.0
    for bound in (5, 10, 20, 40, 80, 80):
        looks.move()
        assert looks.after(bound - 0.1) == ""
        assert "has done nothing" in looks.after(0.2)
    looks.now += module.STUCK_WINDOW
    looks.move()
    assert "has done nothing" in looks.after(5.1)


def test_a_lone_request_may_use_a_multiple_of_what_draws_take(one, monkeypatch):
    """And a few seconds where they take nothing; a core that it does not get does not count."""
    looks = Looks(one, monkeypatch)
    one.heard("sampler0", Trying(7))
    looks.move()
    assert looks.after(200.0, cpu=3.9) == ""
    assert "at one request" in looks.after(0.1, cpu=0.2)
    figures = array("q", bytes(512))
    figures[Word.BATCHES], figures[Word.SEQUENCES] = 10, 100
    figures[Word.PHASE_NS + COUNTED_PHASES["sampler"][0]] = 2_000_000_000
    one.figures = [memoryview(figures)]
    one.heard("sampler0", Trying(8))
    assert looks.after(0.0) == ""
    assert looks.after(19.0, cpu=19.0) == ""  # 1,000 times 20 ms
    assert "at one request" in looks.after(2.0, cpu=2.0)
    one.heard("sampler0", Trying(None))
    assert looks.after(0.0) == ""
    assert "at one iteration" in looks.after(75.1, cpu=75.1)


def test_a_sampler_that_is_killed_is_killed_once(one, monkeypatch, caplog):
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.0)
    killed = []
    monkeypatch.setattr(one._started[0].process, "kill", lambda: killed.append(1))
    monkeypatch.setattr(LogitsChannel, "behind", lambda _: {"sampler0": 0})
    while not killed:
        one.end_stuck()
    for _ in range(4):
        one.end_stuck()
    assert killed == [1]
