"""The samplers of an engine, on processes that only say that they are ready."""

import os
import queue
import signal
import time
from array import array
from types import SimpleNamespace

import pytest
from tests.engine.children.named_children import NamedChildren

from sipipe.engine.children import samplers as module
from sipipe.engine.children import spare_sampler as spare
from sipipe.engine.children.samplers import Samplers
from sipipe.errors import WorkerDiedError
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.logits import LogitsShape
from sipipe.messages.replies import Ready, Trying
from sipipe.messages.start_records import SPARE
from sipipe.messages.step import Snapshot
from sipipe.observe.live import Word
from sipipe.observe.phases import COUNTED_PHASES


class StandIns(NamedChildren):
    """Samplers that say that they are ready, spares that say that they have compiled, and no more."""

    def __init__(self):
        super().__init__()
        self.refusals = 0
        """Spares that cannot be started from now on."""

    def start(self, name, module, arguments, **options):
        if name == SPARE and self.refusals:
            self.refusals -= 1
            for end in options["ends"]:
                end.close()
            raise OSError("too many open files")
        says = "warm" if name == SPARE else "ready"
        return super().start(name, "tests.engine.child", [says], **options)


class Engine:
    """What is told of samplers that die."""

    def __init__(self):
        self.started, self.poisons, self.failures = queue.SimpleQueue(), [], []

    def started_again(self, index, tokens, poison):
        tokens.close()
        self.poisons.append(poison)
        self.started.put(index)

    def failed(self, error):
        self.failures.append(error)


def make(children, engine):
    """The samplers of a host with one."""
    return Samplers(
        children, None, dtype="float32", cores=[()], figures=[], events=engine, stall_timeout=300.0
    )


@pytest.fixture
def one():
    engine, children = Engine(), StandIns()
    samplers = make(children, engine)
    samplers.engine, samplers.processes = engine, children.by_name
    samplers.stand_ins = children

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
    one.processes["sampler0"].process.kill()
    assert one.engine.started.get(timeout=30) == 0
    second = one.processes["sampler0"].process
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
        child = samplers.processes.get(SPARE)
        if child is not None and samplers.spare.warm and child.process.pid != not_of:
            return child
        time.sleep(0.01)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(spare, "SPARE_SECONDS", 0.0)
    monkeypatch.setattr(spare, "AGAIN_SECONDS", 0.0)


def test_the_spare_takes_the_place_of_a_sampler_that_dies_and_there_is_another(
    at_once, one, monkeypatch
):
    monkeypatch.setattr(module, "DEATHS", 3)
    first = spare_of(one)
    one.processes["sampler0"].process.kill()
    assert one.engine.started.get(timeout=30) == 0
    assert one.processes["sampler0"] is first
    assert first.name == "sampler0"
    second = spare_of(one, first.process.pid)
    first.process.kill()  # it is a sampler like any other
    assert one.engine.started.get(timeout=30) == 0
    assert one.processes["sampler0"] is second
    second.process.kill()
    while not one.engine.failures:
        time.sleep(0.01)
    assert "sampler0 keeps dying (exit code -9, the 3th time" in str(one.engine.failures.pop())


def test_a_spare_that_dies_is_replaced_and_nothing_else_happens(at_once, one):
    first = spare_of(one)
    first.process.kill()
    spare_of(one, first.process.pid)
    assert one.engine.started.empty()


def test_a_spare_that_has_not_compiled_is_not_waited_for(at_once, one):
    first = spare_of(one)
    one.spare.warm = False
    one.processes["sampler0"].process.kill()
    assert one.engine.started.get(timeout=30) == 0
    assert one.processes["sampler0"] is not first
    assert first.name == SPARE


def test_where_none_can_be_started_the_spare_is_tried_again(at_once, one):
    first = spare_of(one)
    one.stand_ins.refusals = 2
    first.process.kill()
    spare_of(one, first.process.pid)
    assert one.stand_ins.refusals == 0


def test_a_spare_that_cannot_be_started_is_tried_again_in_a_minute(monkeypatch):
    def start(name):
        raise OSError("too many open files")

    monkeypatch.setattr(spare, "SPARE_SECONDS", 0.0)
    later = spare.SpareSampler(Idle(), start)
    later.want()
    assert later.keep() == spare.AGAIN_SECONDS
    assert 0 < later.keep() <= spare.AGAIN_SECONDS


class Idle:
    """Children without processes. Those of ``ready`` are ready, and the others never heard of."""

    def __init__(self):
        self.ready, self.killed = [], []
        self.ended = queue.SimpleQueue()
        """Names of those that were asked to end."""
        self.amid_start = lambda: None
        """What another thread does while a child is being started."""
        self.last = None
        """The child that was started last."""

    def start(self, name, module, arguments, *, ends, environment):
        for end in ends:
            end.close()
        self.last = SimpleNamespace(name=name, process=self.process(), say=lambda _: None)
        self.amid_start()
        return self.last

    def end(self, names):
        for name in names:
            self.ended.put(name)

    def process(self):
        return SimpleNamespace(pid=1, returncode=None, kill=lambda: self.killed.append(self.last))

    def wait_ready(self, names, deadline):
        return self.ready


class Channel:
    """BIC-I or BIC-L of samplers without processes."""

    endpoint = None

    def __init__(self):
        self.uses = {}
        self.readers = []

    def behind(self):
        return self.uses

    def add_reader(self, name):
        self.readers.append(name)

    def remove_reader(self, name):
        pass


@pytest.fixture
def idle():
    """A sampler without a process."""
    engine, children = Engine(), Idle()
    samplers = make(children, engine)
    samplers.engine, samplers.idle, samplers.logits = engine, children, Channel()
    samplers.open(Channel(), samplers.logits, 0.0)
    yield samplers
    for sock in samplers.sockets:
        sock.close()
    assert not engine.failures


def test_requests_that_no_sampler_survives_never_end_the_engine(idle):
    """However many come, one after the other; and no death is counted but those of the sampler."""

    def die():
        idle.replace("sampler0", "signal 11")
        idle.engine.started.get(timeout=30)

    for handle in range(100):
        die()  # it is not known yet at whose row
        for _ in range(module.STRIKES):
            idle.heard("sampler0", Trying(handle))
            die()
    assert [poison[0] for poison in idle.engine.poisons if poison] == list(range(100))
    for _ in range(module.DEATHS - 1):
        die()
    with pytest.raises(WorkerDiedError, match="sampler0 keeps dying"):
        die()


def test_a_sampler_that_dies_just_before_all_end_is_no_failure(idle):
    """Nobody draws on CPUs from then on, so nobody needs it, and nobody has to be told."""
    idle.let_go()
    idle.replace("sampler0", "signal 9")
    assert idle.engine.started.empty()


def test_a_successor_that_starts_while_all_are_let_go_ends_too(idle):
    """Those who end the samplers end them by name, and this one had no name yet."""
    idle.idle.amid_start = idle.let_go
    idle.replace("sampler0", "signal 9")
    assert idle.idle.ended.get(timeout=30) == "sampler0"
    assert idle.engine.started.empty()


def test_a_successor_is_no_reader_of_channels_that_were_let_go(idle):
    """Whoever publishes would wait for it."""
    idle.admit(0, Snapshot([], [], []))
    assert idle.logits.readers == ["sampler0"]
    idle.let_go()
    idle.admit(0, Snapshot([], [], []))
    assert idle.logits.readers == ["sampler0"]


def test_a_spare_that_starts_while_all_are_let_go_ends_too(idle, at_once):
    idle.spare.want()
    idle.idle.amid_start = idle.let_go
    idle.spare.keep()
    assert idle.idle.ended.get(timeout=30) == SPARE


def test_what_is_measured_is_what_the_others_say_where_one_died(idle):
    def opened(measure):
        return idle.open(Channel(), idle.logits, 0.0, measure)

    idle.idle.ready = [Ready(measured={}), Ready(measured={"greedy": 2.0})]
    assert opened(8) == {"greedy": 2.0}
    idle.idle.ready.pop()
    with pytest.raises(WorkerDiedError, match="all samplers ended while they measured"):
        opened(8)
    assert opened(0) == {}


class Looks:
    """Looks at a sampler that is behind, whose CPU seconds, place and time the test says."""

    def __init__(self, samplers, monkeypatch):
        self.cpu = self.now = 1000.0
        self.use = 0
        self.logged = []
        self._samplers = samplers
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(
            module.psutil, "Process", lambda _: SimpleNamespace(cpu_times=lambda: (self.cpu,))
        )
        monkeypatch.setattr(
            module.logger, "warning", lambda text, *values: self.logged.append(text % values)
        )

    def after(self, seconds, cpu=0.0):
        """The reason for which the sampler is killed after so many seconds more; empty if it is not."""
        self.now, self.cpu = self.now + seconds, self.cpu + cpu
        self._samplers.logits.uses = {"sampler0": self.use}
        before = len(self.logged)
        self._samplers.end_stuck()
        assert len(self._samplers.idle.killed) == len(self.logged)
        return "".join(self.logged[before:])

    def move(self):
        """The sampler, or a successor of one that was killed, is at the next iteration."""
        self.use += 1
        self._samplers.idle.last.process = self._samplers.idle.process()
        assert self.after(0.0) == ""


@pytest.fixture
def looks(idle, monkeypatch):
    return Looks(idle, monkeypatch)


def test_the_patience_with_what_does_nothing_doubles_and_comes_back(idle, looks):
    idle.stall_timeout = 1000.0
    for bound in (5, 10, 20, 40, 80, 80):
        looks.move()
        assert looks.after(bound - 0.1) == ""
        assert "has done nothing" in looks.after(0.2)
    looks.now += module.STUCK_WINDOW
    looks.move()
    assert "has done nothing" in looks.after(5.1)


def test_a_lone_request_may_use_a_multiple_of_what_draws_take(idle, looks):
    """And a few seconds where they take nothing; a core that it does not get does not count."""
    idle.heard("sampler0", Trying(7))
    looks.move()
    assert looks.after(200.0, cpu=3.9) == ""
    assert "at one request" in looks.after(0.1, cpu=0.2)
    figures = array("q", bytes(512))
    figures[Word.BATCHES], figures[Word.SEQUENCES] = 10, 100
    figures[Word.PHASE_NS + COUNTED_PHASES["sampler"][0]] = 2_000_000_000
    idle.figures = [memoryview(figures)]
    idle.heard("sampler0", Trying(8))
    looks.move()
    assert looks.after(19.0, cpu=19.0) == ""  # 1,000 times 20 ms
    assert "at one request" in looks.after(2.0, cpu=2.0)
    idle.heard("sampler0", Trying(None))
    looks.move()
    assert looks.after(0.0) == ""
    assert "at one iteration" in looks.after(75.1, cpu=75.1)


def test_a_sampler_that_is_killed_is_killed_once(idle, looks):
    looks.move()
    assert looks.after(5.1)
    for _ in range(4):
        assert looks.after(5.1) == ""
    assert len(idle.idle.killed) == 1
