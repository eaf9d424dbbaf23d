"""The supervisor on processes that do nothing: who dies is named at once, and nobody is left."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace

import psutil
import pytest

from sipipe.engine.children import children as module
from sipipe.engine.children.children import Child, Children
from sipipe.errors import DamagedError, StallError, WorkerDiedError
from sipipe.messages.replies import ASK_STATUS, Status

CHILD = "tests.engine.child"


class Watched:
    """Children whose messages and deaths are kept, and stop whoever waits for them."""

    def __init__(self):
        self.children = Children()
        self.deadly = True
        self.heard, self.deaths, self.errors = queue.SimpleQueue(), queue.SimpleQueue(), []
        self.order = queue.SimpleQueue()
        """Names of the children whose messages and deaths were reported, in their order."""
        self.turn = lambda: 5.0
        self.children.watch(
            heard=self.on_message,
            died=self.on_death,
            turn=lambda: self.turn(),
            failed=self.errors.append,
        )

    def on_message(self, child, message):
        self.order.put(child.name)
        self.heard.put((child.name, message))
        if isinstance(message, Exception):
            self.children.fail(message)

    def on_death(self, child, how):
        self.order.put(child.name)
        self.deaths.put((child.name, how))
        if self.deadly:
            self.children.fail(WorkerDiedError(f"{child.name} died, {how}"))

    def start(self, name, what):
        return self.children.start(name, CHILD, [what])

    def wait_ready(self, *names, seconds=60):
        self.children.wait_ready(names, time.monotonic() + seconds)


@pytest.fixture
def watched():
    watched = Watched()
    yield watched
    watched.children.close()
    assert not watched.errors


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("die", WorkerDiedError, "second died, exit code -9"),
        ("raise", ValueError, "no such model"),
    ],
)
def test_one_that_dies_or_raises_while_another_loads_is_named_at_once(watched, what, error, says):
    watched.start("first", "load")
    watched.start("second", what)
    with pytest.raises(error, match=says):
        watched.wait_ready("first", "second")


def test_who_died_is_named_before_who_missed_it(watched):
    """The neighbour's word of it may come first: its connection ends before the process does."""
    watched.deadly = False
    hold, reached, held = threading.Event(), threading.Event(), threading.Event()

    def turn():
        if hold.is_set():
            reached.set()
            held.wait(60)
        return 0.05

    watched.turn = turn
    dying = watched.start("dying", "ready")
    mourner = watched.start("mourner", "mourn")
    watched.wait_ready("dying", "mourner")
    hold.set()
    assert reached.wait(60)
    mourner.say("it died")
    assert mourner.pipe.poll(60)
    dying.process.kill()
    held.set()
    assert [watched.order.get(timeout=60) for _ in range(2)] == ["dying", "mourner"]
    assert watched.deaths.get(timeout=60) == ("dying", "exit code -9")
    name, error = watched.heard.get(timeout=60)
    assert (name, str(error)) == ("mourner", "my neighbour died")


def test_what_cannot_be_read_is_the_word_of_the_child_that_said_it(watched):
    child = watched.start("one", "mumble")
    name, error = watched.heard.get(timeout=60)
    assert name == "one"
    assert isinstance(error, DamagedError)
    assert str(error).startswith(f"one (pid {child.process.pid}) sent what cannot be read here")


def test_one_that_is_started_while_all_end_is_ended_once(watched):
    watched.children.expect_end()
    child = watched.start("one", "ready")
    assert child.process.returncode is not None
    watched.children.close()


def test_the_late_ones_are_named(watched):
    watched.start("first", "ready")
    watched.wait_ready("first")
    watched.start("second", "load")
    with pytest.raises(StallError, match=r'not ready in time: second.*"start_timeout"'):
        watched.wait_ready("first", "second", seconds=0)


def test_messages_go_both_ways_and_a_question_is_answered(watched):
    watched.start("one", "echo").say({"any": "thing"})
    assert watched.heard.get(timeout=30) == ("one", {"any": "thing"})
    two = watched.start("two", "ready")
    watched.wait_ready("two")
    two.say(ASK_STATUS)
    assert watched.heard.get(timeout=30) == ("two", Status("waits for its test"))


def test_one_that_stops_amid_a_message_is_killed_and_holds_nobody_up(watched, monkeypatch):
    monkeypatch.setattr(module, "PIPE_SECONDS", 1)
    watched.deadly = False
    watched.start("half", "half")
    watched.start("other", "echo").say("heard")
    found = {watched.heard.get(timeout=30), watched.deaths.get(timeout=30)}
    assert found == {("other", "heard"), ("half", "exit code -9")}


def test_one_that_is_hung_up_on_while_it_is_told_something_is_passed_over(watched):
    child = Child("a", SimpleNamespace(pid=os.getpid()), SimpleNamespace(close=lambda: None))

    def send_bytes(_):
        child.hang_up()
        os.write(None, b"the rest")

    child.pipe.send_bytes = send_bytes
    child.say(b"much")
    child.say(b"more")
    os.close(child.descriptor)


def test_one_that_does_not_read_is_killed_and_holds_nobody_up(watched, monkeypatch):
    monkeypatch.setattr(module, "PIPE_SECONDS", 1)
    watched.deadly = False
    deaf = watched.start("deaf", "deaf")
    watched.wait_ready("deaf")
    deaf.say(bytes(1 << 22))  # returns
    assert watched.deaths.get(timeout=30) == ("deaf", "exit code -9")


def test_a_name_is_used_again_and_an_asked_end_is_not_a_death(watched):
    watched.deadly = False
    first = watched.start("one", "ready")
    watched.wait_ready("one")
    first.process.kill()
    assert watched.deaths.get(timeout=30) == ("one", "exit code -9")
    second = watched.start("one", "ready")
    watched.wait_ready("one")
    assert second.process.pid != first.process.pid
    watched.children.end(["one"])
    assert second.process.wait(30) == 0  # ended as by SIGTERM, in good order
    third = watched.start("two", "die")
    assert watched.deaths.get(timeout=30) == ("two", "exit code -9")
    third.process.wait(30)


@pytest.mark.parametrize("stopped", [False, True])
def test_none_is_left_when_the_engine_closes(watched, monkeypatch, stopped):
    """Also one that loads, and one that takes no signal but SIGKILL."""
    child = watched.start("one", "load")
    if stopped:
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
        os.kill(child.process.pid, signal.SIGSTOP)
    watched.children.close()
    assert child.process.returncode == (-9 if stopped else 0)
    assert watched.deaths.empty()


def test_children_of_a_killed_engine_end_also_while_they_load():
    program = (
        "from sipipe.engine.children.children import Children; children = Children(); import time; "
        f"print(children.start('a', '{CHILD}', ['load']).process.pid, "
        f"children.start('b', '{CHILD}', ['load']).process.pid, flush=True); time.sleep(1000)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    engine = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    )
    processes = [psutil.Process(int(pid)) for pid in engine.stdout.readline().split()]
    engine.kill()
    engine.wait()
    engine.stdout.close()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


class Leaving(Child):
    """A child whose end the events thread sees as soon as somebody has looked at its pipe."""

    @property
    def pipe(self):
        pipe = self._pipe
        self._pipe = None
        return pipe

    @pipe.setter
    def pipe(self, pipe):
        self._pipe = pipe


def test_a_child_that_ends_just_when_it_is_asked_to():
    ours, theirs = socket.socketpair()
    pipe = Connection(ours.detach())
    child = Leaving("child", SimpleNamespace(pid=os.getpid()), pipe)
    child.ask_to_end()
    assert theirs.recv(1) == b""
    theirs.close()
    os.close(child.descriptor)
    pipe.close()
    child.pipe = pipe  # closed, and not yet known to be
    child.ask_to_end()
