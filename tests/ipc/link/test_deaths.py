"""A stage that dies, however, is an error at its neighbour; nothing of a link is left behind."""

from __future__ import annotations

import base64
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sipipe.ipc.link.endpoint import LinkEndpoint, create_link, open_receiver, open_sender
from sipipe.ipc.link.errors import PeerDiedError

BOUND = 60.0  # of a machine at its worst; a death is noticed at once

PRELUDE = """
import base64, os, pickle, signal, sys, time
import torch
from sipipe.ipc.link.endpoint import open_sender, open_receiver
from tests.ipc.link import stand_ins
endpoint = pickle.loads(base64.b64decode(sys.argv[1]))
if endpoint.device == "cuda":
    stand_ins.use()
def hidden(n, i): return {"hidden_states": torch.full((n, 16), float(i)), "residual": torch.ones(n, 16)}
def say(): print("ready", flush=True)
"""
SENDS_ONE_THEN_WAITS = """
sender = open_sender(endpoint)
sender.send(0, 4, hidden(4, 0))
sender.wait_sent(60)
say()
signal.pause()
"""
DIES_AMID_THE_COPY = """
from sipipe.ipc.link.frames import Row
from sipipe.ipc.link.records import Kind, Record
sender = open_sender(endpoint)
sender.send(0, 4, hidden(4, 0))
sender.wait_sent(60)
say()
def half(row):   # the record has left, the tensors have not all been copied
    value = sender._structures.structure.fingerprint
    sender._transport._send(sender._codec.pack(Record(Kind.DATA, 1, 1, 1, 1, 4, value)))
    os._exit(1)
Row.run = half
sender.send(1, 4, hidden(4, 1))
signal.pause()
"""
DIES_BEFORE_THE_COPY = """
sender = open_sender(endpoint)
sender.send(0, 4, hidden(4, 0))
sender.wait_sent(60)
say()
stand_ins.StandInDevice.copy = lambda *a: os._exit(1)
sender.send(1, 4, hidden(4, 1))
signal.pause()
"""
DIES_BEFORE_THE_DATA = """
sender = open_sender(endpoint)
sender.send(0, 4, hidden(4, 0))
sender.wait_sent(60)
say()
class Group:
    def send(self, *a): os._exit(1)   # the record has left, so the receive is posted
sender._transport._group = Group()
sender.send(1, 4, hidden(4, 1))
signal.pause()
"""
DIES_INSIDE_A_FRAME = """
from sipipe.ipc.link.tcp import TcpSending
sender = open_sender(endpoint)
sender.send(0, 4, hidden(4, 0))
sender.wait_sent(60)
say()
def half(self, flags):
    frame = b"".join(self._left)
    self._sock.sendall(frame[: len(frame) // 2])
    os._exit(1)
TcpSending._write = half
sender.send(1, 4, hidden(4, 1))
signal.pause()
"""
LEAVES_A_CHILD_BEHIND = """
sender = open_sender(endpoint)
sender.send(0, 4, hidden(4, 0))
sender.wait_sent(60)
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
signal.pause()
"""
SENDS_FOR_EVER = """
sender = open_sender(endpoint)
i = 0
while True:
    sender.post(i, 1024)
    sender.send(i, 1024, {"h": torch.full((1024, 8192), i % 100, dtype=torch.int8)})
    i += 1
"""
TAKES_ONE_THEN_WAITS = """
receiver = open_receiver(endpoint)
receiver.post(0, 4)
receiver.take(0, 60)
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

    def __init__(self, body: str, endpoint: LinkEndpoint) -> None:
        argument = base64.b64encode(pickle.dumps(endpoint)).decode()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + body, argument], stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    torch.distributed.TCPStore("127.0.0.1", 0, 1, True)  # the first one keeps a pipe for good
    shm, descriptors = set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()  # tracebacks of the errors above hold on to mappings
    left = set(os.listdir("/dev/shm")) - shm
    assert not {name for name in left if "transfer" in name}
    until = time.monotonic() + 5
    while set(os.listdir("/proc/self/fd")) - descriptors and time.monotonic() < until:
        time.sleep(0.01)  # gloo's threads close theirs when they end
    assert len(set(os.listdir("/proc/self/fd")) - descriptors) == 0


def test_the_sender_is_killed_while_the_receiver_waits(endpoint):
    with open_receiver(endpoint) as receiver:
        stage = Stage(SENDS_ONE_THEN_WAITS, endpoint)
        receiver.post(0, 4)
        receiver.post(1, 4)
        taken = receiver.take(0, BOUND)
        assert stage.line() == "ready"
        stage.process.kill()
        with pytest.raises(PeerDiedError, match=r"stage0-1\.r0.*previous stage died"):
            receiver.take(1, BOUND)
        assert torch.equal(taken["residual"], torch.ones(4, 16))  # what was taken stays usable
        receiver.release(0)
        stage.kill()
    assert endpoint.secret.hex() not in Path("/proc/net/unix").read_text()


def test_the_sender_dies_in_the_middle_of_a_transfer(endpoint):
    body = {
        "shm": DIES_AMID_THE_COPY,
        "socket": DIES_INSIDE_A_FRAME,
        "cuda_ipc": DIES_BEFORE_THE_COPY,
        "nccl": DIES_BEFORE_THE_DATA,
    }[endpoint.kind]
    with open_receiver(endpoint) as receiver:
        stage = Stage(body, endpoint)
        receiver.post(0, 4)
        receiver.post(1, 4)
        receiver.take(0, BOUND)
        with pytest.raises(PeerDiedError, match="previous stage died"):
            receiver.take(1, BOUND)
        stage.kill()


@pytest.mark.parametrize("seconds", [0.0, 0.013, 0.027, 0.041])
def test_a_sender_that_is_killed_at_any_moment(seconds):
    """8 MiB a frame: most of the time one is being copied. What is taken is whole."""
    endpoint = create_link("shm", max_tokens=1024, stall_timeout=BOUND)
    with open_receiver(endpoint) as receiver:
        stage = Stage(SENDS_FOR_EVER, endpoint)
        killer = threading.Timer(seconds, stage.process.kill)

        def take_all() -> None:
            for iteration in itertools.count():
                receiver.post(iteration, 1024)
                taken = receiver.take(iteration, BOUND)["h"]
                assert torch.equal(taken, torch.full_like(taken, iteration % 100))
                receiver.release(iteration)
                if iteration == 0:
                    killer.start()

        with pytest.raises(PeerDiedError, match="previous stage died"):
            take_all()
        stage.kill()


def test_the_receiver_is_killed(endpoint):
    stage = Stage(TAKES_ONE_THEN_WAITS, endpoint)
    with open_sender(endpoint) as sender:
        sender.send(0, 4, hidden(4, 0))
        assert stage.line() == "ready"
        stage.kill()

        def send_on() -> None:
            for iteration in range(1, 6):  # the fourth at the latest needs a slot back
                sender.send(iteration, 4, hidden(4, iteration))

        with pytest.raises(PeerDiedError, match=r"stage0-1\.r0.*next stage died"):
            send_on()


def test_the_receiver_is_killed_while_the_sender_waits(endpoint):
    stage = Stage(TAKES_ONE_THEN_WAITS, endpoint)
    with open_sender(endpoint) as sender:
        for iteration in range(endpoint.depth):
            sender.send(iteration, 4, hidden(4, iteration))
        assert stage.line() == "ready"
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {stage.process.pid}"])
        with pytest.raises(PeerDiedError, match="next stage died"):
            sender.send(endpoint.depth, 4, hidden(4, 9))
        killer.wait()
        stage.kill()


def test_a_death_that_a_forked_child_hides():
    """The child keeps the socket open, so there is no end of file; shm watches the process too."""
    endpoint = create_link("shm", max_tokens=64, stall_timeout=BOUND)
    with open_receiver(endpoint) as receiver:
        stage = Stage(LEAVES_A_CHILD_BEHIND, endpoint)
        receiver.post(0, 4)
        receiver.post(1, 4)
        receiver.take(0, BOUND)
        child = int(stage.line())
        try:
            stage.process.kill()
            with pytest.raises(PeerDiedError):
                receiver.take(1, BOUND)
        finally:
            os.kill(child, signal.SIGKILL)
            stage.kill()


def test_a_stage_that_never_starts():
    endpoint = create_link("shm", max_tokens=4, start_timeout=0.05, name="stage2-3.r1")
    with open_sender(endpoint) as sender:
        sender.send(0, 1, hidden(1, 0))
        with pytest.raises(PeerDiedError, match=r"stage2-3\.r1.*did not start within 0\.05 s"):
            sender.wait_sent(BOUND)
