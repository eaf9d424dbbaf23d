"""A stage that dies, however, is an error at its neighbour; nothing of a link is left behind."""

from __future__ import annotations

import base64
import contextlib
import gc
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.errors import PeerDiedError
from sipipe.messages.link import LinkEndpoint

BOUND = 60.0  # of a machine at its worst; a death is noticed at once

PRELUDE = """
import base64, ctypes, itertools, os, pickle, signal, socket, sys, threading
import torch
from sipipe.ipc.link import shm
from sipipe.ipc.link.endpoint import open_sender, open_receiver
from tests.ipc.link import stand_in
endpoint, sock = pickle.loads(base64.b64decode(sys.argv[1])), None
if sys.argv[2:]:
    sock = socket.socket(fileno=int(sys.argv[2]))
if endpoint.device == "cuda":
    stand_in.use()
def hidden(n, i): return {"hidden_states": torch.full((n, 16), float(i)), "residual": torch.ones(n, 16)}
def say(what="ready"): print(what, flush=True)
def send_one():
    sender = open_sender(endpoint, sock)
    sender.send(0, 4, hidden(4, 0))
    sender.wait_sent(60)
    return sender
"""
SENDS_ONE_THEN_WAITS = """
sender = send_one()
say()
signal.pause()
"""
DIES_AMID_THE_COPY = """
sender = send_one()
say()
def half(to, start, nbytes):
    ctypes.memmove(to, start, nbytes // 2)
    os.kill(os.getpid(), signal.SIGKILL)
shm._move_holding_gil = half
stand_in.StandInDevice.copy = lambda self, to, part: half(0, 0, 0)
sender.send(1, 4, hidden(4, 1))
"""
DIES_AFTER_THE_COPY = """
sender = send_one()
say()
sender._transport._connection.send = lambda *packet: os.kill(os.getpid(), signal.SIGKILL)
sender.send(1, 4, hidden(4, 1))
"""
DIES_BEFORE_THE_MEMORY = """
shm.ShmSending._make_room = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
stand_in.cuda_ipc.CudaIpcSending._make_room = shm.ShmSending._make_room
send_one()
"""
LEAVES_A_CHILD_BEHIND = """
sender = send_one()
child = os.fork()
if child == 0:
    signal.pause()
say(child)
signal.pause()
"""
SENDS_FOR_EVER = """
sender = open_sender(endpoint, sock)
for i in itertools.count():
    sender.send(i, 1024, {"h": torch.full((1024, 8192), i % 100, dtype=torch.int8)})
"""
TAKES_ONE_THEN_WAITS = """
receiver = open_receiver(endpoint, sock)
receiver.take(0, 4, 60)
if endpoint.name == "forks" and os.fork() == 0:
    signal.pause()
say()
signal.pause()
"""


def hidden(num_tokens: int, value: float) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.full((num_tokens, 16), value),
        "residual": torch.ones(num_tokens, 16),
    }


class Stage:
    """Another process at the other end of a link."""

    def __init__(self, body: str, endpoint: LinkEndpoint, sock: socket.socket | None) -> None:
        argument = base64.b64encode(pickle.dumps(endpoint)).decode()
        with sock or contextlib.nullcontext():
            descriptors = [sock.fileno()] if sock is not None else []
            self.process = subprocess.Popen(
                [sys.executable, "-c", PRELUDE + body, argument, *map(str, descriptors)],
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=descriptors,
                process_group=0,
            )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill_later(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        return timer

    def clean_up(self) -> None:
        """With the children it left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    shm, descriptors = set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()  # tracebacks of the errors above hold on to mappings
    assert not [name for name in set(os.listdir("/dev/shm")) - shm if "sipipe" in name]
    assert set(os.listdir("/proc/self/fd")) <= descriptors


@pytest.fixture
def start(pair) -> Iterator:
    """Start a stage at an end of the test's pair of sockets; all are killed when it is over."""
    stages = []

    def start(body: str, endpoint: LinkEndpoint, sock: socket.socket | None) -> Stage:
        stages.append(Stage(body, endpoint, sock))
        return stages[-1]

    yield start
    for stage in stages:
        stage.clean_up()


def test_the_sender_is_killed_while_the_receiver_waits(endpoint, pair, start):
    stage = start(SENDS_ONE_THEN_WAITS, endpoint, pair[0])
    with closing(open_receiver(endpoint, pair[1])) as receiver:
        taken = receiver.take(0, 4, BOUND)
        assert stage.line() == "ready"
        killer = stage.kill_later(0.1)
        with pytest.raises(PeerDiedError, match=r"stage0-1\.r0.*previous stage died"):
            receiver.take(1, 4, BOUND)
        killer.join()
        assert torch.equal(taken["residual"], torch.ones(4, 16))  # what was taken stays usable
        receiver.release(0)


@pytest.mark.parametrize("body", [DIES_AMID_THE_COPY, DIES_AFTER_THE_COPY])
def test_the_sender_dies_in_the_middle_of_a_frame(endpoint, pair, start, body):
    if endpoint.kind == "zeromq":
        pytest.skip("ZeroMQ copies, and hands out whole messages")
    start(body, endpoint, pair[0])
    with closing(open_receiver(endpoint, pair[1])) as receiver:
        receiver.take(0, 4, BOUND)
        with pytest.raises(PeerDiedError, match="previous stage died"):
            receiver.take(1, 4, BOUND)


def test_the_sender_dies_between_a_schema_and_its_memory(endpoint, pair, start):
    if endpoint.kind == "zeromq":
        pytest.skip("the memory is the receiver's own")
    start(DIES_BEFORE_THE_MEMORY, endpoint, pair[0])
    with (
        closing(open_receiver(endpoint, pair[1])) as receiver,
        pytest.raises(PeerDiedError, match="previous stage died"),
    ):
        receiver.take(0, 4, BOUND)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(seconds, marks=() if seconds in (0, 0.013) else pytest.mark.slow)
        for seconds in (0, 0.003, 0.008, 0.013, 0.027, 0.041, 0.1)
    ],
)
def test_a_sender_that_is_killed_at_any_moment(pair, start, seconds):
    """8 MiB a frame: most of the time one is being copied. What is taken is whole."""
    endpoint = LinkEndpoint(kind="shm", buffer_tokens=1024, stall_timeout=BOUND)
    stage = start(SENDS_FOR_EVER, endpoint, pair[0])
    with closing(open_receiver(endpoint, pair[1])) as receiver:

        def take_all() -> None:
            for iteration in itertools.count():
                taken = receiver.take(iteration, 1024, BOUND)["h"]
                assert torch.equal(taken, torch.full_like(taken, iteration % 100))
                receiver.release(iteration)
                if iteration == 0:
                    stage.kill_later(seconds)

        with pytest.raises(PeerDiedError, match="previous stage died"):
            take_all()


def test_the_receiver_is_killed(endpoint, pair, start):
    stage = start(TAKES_ONE_THEN_WAITS, endpoint, pair[1])
    with closing(open_sender(endpoint, pair[0])) as sender:
        sender.send(0, 4, hidden(4, 0))
        assert stage.line() == "ready"
        stage.process.kill()
        stage.process.wait()

        def send_on() -> None:
            for iteration in range(1, 6):  # the fourth at the latest needs a buffer back
                sender.send(iteration, 4, hidden(4, iteration))

        with pytest.raises(PeerDiedError, match=r"stage0-1\.r0.*next stage died"):
            send_on()


def test_the_receiver_is_killed_while_the_sender_waits(endpoint, pair, start):
    stage = start(TAKES_ONE_THEN_WAITS, endpoint, pair[1])
    with closing(open_sender(endpoint, pair[0])) as sender:
        for iteration in range(endpoint.depth):
            sender.send(iteration, 4, hidden(4, iteration))
        assert stage.line() == "ready"
        killer = stage.kill_later(0.2)
        with pytest.raises(PeerDiedError, match="next stage died"):
            sender.send(endpoint.depth, 4, hidden(4, 9))
        killer.join()


def test_the_receiver_dies_before_it_gives_memory(endpoint, pair):
    """The sender's thread waits for it, where the memory is the receiver's."""
    if endpoint.kind == "zeromq":
        pytest.skip("nobody is waited for; a receiver that never comes is a stall")
    with closing(open_sender(endpoint, pair[0])) as sender:
        sender.send(0, 4, hidden(4, 0))
        pair[1].close()

        def send_on() -> None:
            for iteration in range(1, 6):
                sender.send(iteration, 4, hidden(4, iteration))

        with pytest.raises(PeerDiedError, match="next stage died"):
            send_on()


def test_a_sender_whose_death_a_forked_child_hides(pair, start):
    """The child keeps the socket open, so there is no end of it; the process is watched too."""
    endpoint = LinkEndpoint(kind="shm", buffer_tokens=64, stall_timeout=BOUND)
    stage = start(LEAVES_A_CHILD_BEHIND, endpoint, pair[0])
    with closing(open_receiver(endpoint, pair[1])) as receiver:
        receiver.take(0, 4, BOUND)
        child = int(stage.line())
        killer = stage.kill_later(0.1)
        with pytest.raises(PeerDiedError):
            receiver.take(1, 4, BOUND)
        killer.join()
        os.kill(child, 0)  # it is still there


def test_a_receiver_whose_death_a_forked_child_hides(pair, start):
    endpoint = LinkEndpoint(kind="shm", buffer_tokens=64, stall_timeout=BOUND, name="forks")
    stage = start(TAKES_ONE_THEN_WAITS, endpoint, pair[1])
    with closing(open_sender(endpoint, pair[0])) as sender:
        for iteration in range(endpoint.depth):
            sender.send(iteration, 4, hidden(4, iteration))
        assert stage.line() == "ready"
        killer = stage.kill_later(0.1)
        with pytest.raises(PeerDiedError):
            sender.send(endpoint.depth, 4, hidden(4, 9))
        killer.join()
