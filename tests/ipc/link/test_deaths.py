"""A stage that dies, however, is an error at its neighbour; nothing of a link is left behind."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.engine import forks
from tests.engine.forks import Forked
from tests.ipc.link import dying_stage
from tests.ipc.link.conftest import BETWEEN_HOSTS, KINDS, endpoint_of
from tests.ipc.link.dying_stage import hidden

from sipipe.ipc.errors import PeerDiedError
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.messages.link import LinkEndpoint

BOUND = 60.0  # of a machine at its worst; a death is noticed at once


@pytest.fixture(
    params=[
        pytest.param(kind, marks=pytest.mark.slow if "not" in kind else ())
        for kind in KINDS
        if "stand-in" not in kind
    ]
)
def endpoint(request, monkeypatch):
    """NIXL's stand-in has both ends in one process. Encryption changes nothing of how a death is noticed: without it only `make test-all`."""
    return endpoint_of(request.param, monkeypatch)


class Stage:
    """Another process at the other end of a link, which goes on as :mod:`.dying_stage` has it."""

    def __init__(
        self, how: str, endpoint: LinkEndpoint, sock: socket.socket | None, log: Path
    ) -> None:
        self._log = log
        argument = base64.b64encode(pickle.dumps(endpoint)).decode()
        with sock or contextlib.nullcontext(), log.open("w") as out:
            self._process = Forked(
                Path(dying_stage.__file__),
                [how, argument],
                env=dict(os.environ),
                out=out,
                ends=[sock.fileno()] if sock else [],
            )

    def line(self) -> str:
        """The first one that it prints."""
        deadline = time.monotonic() + BOUND
        while "\n" not in (said := self._log.read_text()):
            assert time.monotonic() < deadline, said
            time.sleep(0.005)
        return said.splitlines()[0]

    def kill(self) -> None:
        """It alone, without the children it left behind."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def kill_later(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        return timer

    def clean_up(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.close()


@pytest.fixture(autouse=True, scope="module")
def _fork_server() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed, with which the other processes begin")
    forks.start()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    descriptors = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()  # tracebacks of the errors above hold on to mappings
    assert set(os.listdir("/proc/self/fd")) <= descriptors


@pytest.fixture
def start(pair, tmp_path) -> Iterator:
    """Start a stage at an end of the test's pair of sockets; all are killed when it is over."""
    stages = []

    def start(how: str, endpoint: LinkEndpoint, sock: socket.socket | None) -> Stage:
        stages.append(Stage(how, endpoint, sock, tmp_path / f"stage{len(stages)}"))
        return stages[-1]

    yield start
    for stage in stages:
        stage.clean_up()


@pytest.mark.parametrize("how", ["sends_one_then_waits", "leaves_a_child_behind"])
def test_the_sender_is_killed_while_the_receiver_waits(endpoint, pair, start, how):
    """A child keeps its socket open, so that there is no end of it; the process is watched too."""
    leaves = how == "leaves_a_child_behind"
    if leaves and endpoint.kind != "shm":
        pytest.skip("sockets are the same")
    stage = start(how, endpoint, pair[0])
    with closing(open_receiver(endpoint, pair[1])) as receiver:
        taken = receiver.take(0, 4, BOUND)
        said = stage.line()
        killer = stage.kill_later(0.1)
        with pytest.raises(PeerDiedError, match=r"stage0-1\.r0.*previous stage died"):
            receiver.take(1, 4, BOUND)
        killer.join()
        assert torch.equal(taken["residual"], torch.ones(4, 16))  # what was taken stays usable
        receiver.release(0)
        if leaves:
            os.kill(int(said), 0)  # it is still there


@pytest.mark.parametrize(
    ("how", "whole"),
    [("dies_before_the_memory", 0), ("dies_amid_the_copy", 1), ("dies_after_the_copy", 1)],
)
def test_the_sender_dies_in_the_middle_of_a_frame(endpoint, pair, start, how, whole):
    if endpoint.kind in BETWEEN_HOSTS:
        pytest.skip("ZeroMQ copies into the receiver's own memory, and hands out whole messages")
    start(how, endpoint, pair[0])
    with closing(open_receiver(endpoint, pair[1])) as receiver:
        for iteration in range(whole):
            receiver.take(iteration, 4, BOUND)
        with pytest.raises(PeerDiedError, match="previous stage died"):
            receiver.take(whole, 4, BOUND)


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
    stage = start("sends_for_ever", endpoint, pair[0])
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


def send_on(sender) -> None:
    for iteration in range(1, 6):  # the fourth at the latest needs a buffer back
        sender.send(iteration, 4, hidden(4, iteration))


def test_the_receiver_is_killed(endpoint, pair, start):
    stage = start("takes_one_then_waits", endpoint, pair[1])
    with closing(open_sender(endpoint, pair[0])) as sender:
        sender.send(0, 4, hidden(4, 0))
        assert stage.line() == "ready"
        stage.kill()
        with pytest.raises(PeerDiedError, match=r"stage0-1\.r0.*next stage died"):
            send_on(sender)


@pytest.mark.parametrize("forks", [False, True])
def test_the_receiver_is_killed_while_the_sender_waits(endpoint, pair, start, forks):
    if forks and endpoint.kind != "shm":
        pytest.skip("sockets are the same")
    endpoint = dataclasses.replace(endpoint, name="forks") if forks else endpoint
    stage = start("takes_one_then_waits", endpoint, pair[1])
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
    if endpoint.kind in BETWEEN_HOSTS:
        pytest.skip("it has the receiver before it is open")
    with closing(open_sender(endpoint, pair[0])) as sender:
        sender.send(0, 4, hidden(4, 0))
        pair[1].close()
        with pytest.raises(PeerDiedError, match="next stage died"):
            send_on(sender)
