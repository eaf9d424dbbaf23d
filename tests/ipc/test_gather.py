"""The gather channel: order, completeness, wrong frames, samplers that die and are replaced."""

import collections
import contextlib
import select
import socket
import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sipipe.errors import StallError
from sipipe.ipc import gather
from sipipe.ipc.errors import ChannelClosed, PeerDiedError
from sipipe.ipc.gather import GatherReceiver, GatherSender


def frame(iteration, payload, more=False):
    """The bytes that a sampler sends."""
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(GatherSender(theirs)) as sender:
        sender.send(iteration, payload, more=more)
        return ours.recv(1 << 16)


class WouldSleep(Exception):
    """Whoever collects has nothing more to read."""


class Kernel:
    """The receiver's ``epoll``; with ``sleeps`` false a wait that would sleep is :class:`WouldSleep`."""

    sleeps = True

    def __init__(self):
        self.epoll = select.epoll()
        self.register = self.epoll.register
        self.unregister = self.epoll.unregister
        self.close = self.epoll.close

    def poll(self, timeout):
        events = self.epoll.poll(timeout if self.sleeps else 0)
        if not (events or self.sleeps):
            raise WouldSleep
        return events


def joined(complete):
    iteration, answers = complete
    return iteration, {index: b"+".join(frames) for index, frames in answers.items()}


class Scene:
    """A receiver and the samplers' ends, all in this process."""

    def __init__(self, count):
        pairs = [socket.socketpair() for _ in range(count)]
        self.kernel = Kernel()
        epoll = SimpleNamespace(epoll=lambda: self.kernel, EPOLLIN=select.EPOLLIN)
        with patch.object(gather, "select", epoll):
            self.receiver = GatherReceiver([here for here, _ in pairs])
        self.ends = [there for _, there in pairs]

    def sender(self, index):
        return GatherSender(self.ends[index])

    def replace(self, index):
        self.ends[index].close()
        here, self.ends[index] = socket.socketpair()
        self.receiver.replace(index, here)

    def collect(self):
        """What the receiver collects, the frames of each answer joined."""
        return joined(self.receiver.collect())

    def read(self):
        """The same of what is there now; None if the next iteration is not complete."""
        self.kernel.sleeps = False
        try:
            return self.collect()
        except WouldSleep:
            return None
        finally:
            self.kernel.sleeps = True

    def close(self):
        self.receiver.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def scene():
    with contextlib.closing(Scene(2)) as made:
        yield made


def test_complete_and_in_order(scene):
    a, b = scene.sender(0), scene.sender(1)
    scene.receiver.expect(3, [0, 1])
    scene.receiver.expect(5, [1])
    scene.receiver.expect(6, [0, 1])
    a.send(3, b"a3")
    a.send(6, b"a6")
    b.send(3, b"b3")
    b.send(6, b"")
    assert scene.collect() == (3, {0: b"a3", 1: b"b3"})
    assert scene.read() is None
    b.send(5, b"b5")
    assert scene.collect() == (5, {1: b"b5"})
    assert scene.collect() == (6, {0: b"a6", 1: b""})
    assert scene.read() is None


def test_a_slow_executor_is_waited_for_up_to_the_bound(scene):
    scene.receiver.expect(0, [0])
    sender = scene.sender(0)
    with pytest.raises(StallError, match=r"the executor took nothing for 0\.05 s"):
        sender.send(0, bytes(1 << 21), timeout=0.05)
    with pytest.raises(PeerDiedError):  # a part may be sent, so that nothing can follow
        sender.send(0, b"x")
    assert scene.read() is None
    scene.replace(0)
    data = bytes(range(256)) * (1 << 13)
    thread = threading.Thread(target=scene.sender(0).send, args=(0, data))
    thread.start()
    assert scene.collect() == (0, {0: data})
    thread.join(30)


def test_close_ends_both_ends(scene):
    scene.receiver.close()
    scene.receiver.close()
    with pytest.raises(ChannelClosed):
        scene.collect()
    scene.receiver.expect(0, [0])  # the engine's thread may still be publishing
    sender = scene.sender(0)
    with pytest.raises(PeerDiedError):
        sender.send(0, b"x")
    scene.replace(1)  # a restart that was under way
    with pytest.raises(PeerDiedError):
        scene.sender(1).send(0, b"x")
    sender.close()
    sender.close()


def test_other_threads_wake_the_one_that_collects(scene):
    """Every call is made while ``collect`` sleeps, or is about to."""
    got = collections.deque()
    came = threading.Semaphore(0)

    def collect():
        while not isinstance(got[-1] if got else None, ChannelClosed):
            try:
                got.append(scene.collect())
            except ChannelClosed as error:
                got.append(error)
            came.release()

    def await_next():
        assert came.acquire(timeout=30)
        return got[-1]

    thread = threading.Thread(target=collect)
    thread.start()
    scene.receiver.expect(1, [0])
    scene.sender(0).send(1, b"one")
    assert await_next() == (1, {0: b"one"})
    scene.receiver.expect(2, [0])
    scene.ends[0].close()
    scene.replace(0)
    scene.sender(0).send(2, b"two")
    assert await_next() == (2, {0: b"two"})
    scene.receiver.close()
    assert isinstance(await_next(), ChannelClosed)
    thread.join(30)


@settings(deadline=None)
@given(
    answers=st.permutations([(index, n) for index in range(3) for n in range(4)]),
    pieces=st.lists(st.integers(1, 30), max_size=60),
    size=st.integers(0, 20),
)
def test_any_order_in_any_pieces(answers, pieces, size):
    """Each sampler's stream arrives in pieces that end anywhere; what is sent twice is dropped."""
    streams = [b"", b"", b""]
    for index, n in answers:
        streams[index] += frame(n, b"%d of %d" % (n, index) + bytes(size))
        streams[index] += frame(answers[0][1] if n else 0, b"twice") if n % 2 else b""
    with contextlib.closing(Scene(3)) as scene:
        for n in range(4):
            scene.receiver.expect(n, range(3))
        collected = []
        turns = iter(pieces)
        while any(streams):
            for index in range(3):
                count = next(turns, 1000)
                piece, streams[index] = streams[index][:count], streams[index][count:]
                scene.ends[index].sendall(piece)
            while (complete := scene.read()) is not None:
                collected.append(complete)
        assert [n for n, _ in collected] == [0, 1, 2, 3]
        for n, payloads in collected:
            for index, payload in payloads.items():
                own = b"%d of %d" % (n, index) + bytes(size)
                assert payload in (own, b"twice")


class Twin:
    """What the receiver should do, with lists in place of sockets."""

    def __init__(self, count):
        self.pending = []  # [iteration, missing, payloads]
        self.unread = [[] for _ in range(count)]  # frames
        self.open = [True] * count

    def read(self):
        """An iteration, or None."""
        while True:
            if self.pending and not self.pending[0][1]:
                iteration, _, payloads = self.pending.pop(0)
                return iteration, payloads
            if not any(self.unread):
                return None
            for index, frames in enumerate(self.unread):
                for sent in frames:
                    self.take(index, sent)
                frames.clear()

    def take(self, index, sent):
        for iteration, missing, payloads in self.pending:
            if iteration == sent[0] and index in missing:
                before = payloads.get(index)
                payloads[index] = sent[1] if before is None else before + b"+" + sent[1]
                if not sent[2]:
                    missing.remove(index)


INDEX = st.integers(0, 2)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("expect"), st.frozensets(INDEX, min_size=1)),
        st.tuples(st.just("send"), INDEX, st.integers(0, 3), st.booleans()),
        st.tuples(st.just("die"), INDEX, st.booleans()),
        st.tuples(st.just("replace"), INDEX),
        st.tuples(st.just("cut"), INDEX),
        st.tuples(st.just("read")),
    ),
    max_size=60,
)


def spelled(operations):
    """``cut`` is a sampler that is replaced between two frames of one answer, of which the first has
    been read: its half and its successor's whole answer must not be joined."""
    for operation in operations:
        if operation[0] == "cut":
            index = operation[1]
            yield ("send", index, 0, True)
            yield ("read",)
            yield ("replace", index)
            yield ("send", index, 0, False)
        else:
            yield operation


@settings(deadline=None)
@given(operations=OPERATIONS)
@example(operations=[("expect", frozenset({0})), ("cut", 0)])
@example(operations=[("expect", frozenset({0, 1})), ("cut", 0), ("send", 1, 0, False)])
def test_deaths_and_replacements_against_a_twin(operations):
    declared = 0
    twin = Twin(3)
    with contextlib.closing(Scene(3)) as scene:
        for number, (name, *arguments) in enumerate(spelled(operations)):
            if name == "expect":
                scene.receiver.expect(declared, arguments[0])
                twin.pending.append([declared, set(arguments[0]), {}])
                declared += 1
            elif name == "read":
                assert scene.read() == twin.read()
            elif name == "replace":
                index = arguments[0]
                scene.replace(index)
                twin.unread[index].clear()
                for _, missing, payloads in twin.pending:
                    if index in missing:
                        payloads.pop(index, None)
                twin.open[index] = True
            elif twin.open[index := arguments[0]]:
                if name == "die":
                    if arguments[1]:
                        scene.ends[index].sendall(frame(0, b"half")[:5])
                    scene.ends[index].close()
                    twin.open[index] = False
                elif declared:
                    sent = (max(0, declared - 1 - arguments[1]), b"%d" % number, arguments[2])
                    scene.sender(index).send(sent[0], sent[1], more=sent[2])
                    twin.unread[index].append(sent)
        while (want := twin.read()) is not None:
            assert scene.read() == want
        assert scene.read() is None
