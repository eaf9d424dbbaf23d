"""The head's side of the other hosts: how they come, and each as a ``Host`` to the pipeline.

Who runs here
    The engine thread waits for the hosts and calls; whoever publishes BIC-I, admits and asks; a
    thread for each host takes in what its agent says, and calls the same handlers as the events
    thread of this host does.
Guarantees
    A host that is lost, or whose agent ends, fails the engine with its number, address and stages
    named, within the bound of :mod:`sipipe.ipc.connection`. Everything that was sent to a host
    arrives in the order of the calls.
"""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import cloudpickle
from vllm.logger import init_logger

from sipipe.engine.host import Events
from sipipe.engine.hosts import agreed, control_port, difference, stages_of_hosts
from sipipe.engine.rpc import result_of
from sipipe.engine.setup import Setup
from sipipe.engine.telemetry import Telemetry
from sipipe.errors import ConfigError, StallError, WorkerDiedError
from sipipe.ipc.connection import Connection
from sipipe.ipc.link.errors import PeerDiedError
from sipipe.ipc.ring.logits import LogitsEndpoint
from sipipe.ipc.tcp import resolve
from sipipe.messages import hosts as say
from sipipe.messages.logits import LogitsShape
from sipipe.messages.step import Snapshot

logger = init_logger(f"vllm.{__name__}")

HELLO_SECONDS = 30.0


def meet(setup: Setup) -> list[RemoteHost]:
    """Wait until all other hosts are there; ``setup.samplers`` is right from then on.

    Raises:
        ConfigError: a port that is taken, or a host with other versions or settings.
        StallError: a host did not come within the start timeout.
    """
    hosts = setup.config.hosts
    if hosts.count == 1:
        return []
    address = resolve(hosts.address, "--master-addr")
    deadline = time.monotonic() + setup.config.start_timeout
    remotes = [
        RemoteHost(setup, node, Connection(
            address, control_port(hosts, node), listens=True, who=f"host {node}"
        ))
        for node in range(1, hosts.count)
    ]  # fmt: skip
    logger.info(
        "SiPipe's head listens on %s: %s",
        address,
        ", ".join(f"port {control_port(hosts, r.node)} for host {r.node}" for r in remotes),
    )
    try:
        for remote in remotes:
            remote.meet(deadline)
    except BaseException as error:
        for remote in remotes:
            remote.close(str(error))
        raise
    return remotes


class RemoteHost:
    """A host with an agent on it. Also what :class:`sipipe.engine.host.Host` is."""

    def __init__(self, setup: Setup, node: int, connection: Connection) -> None:
        self.node = node
        self.address = ""
        self._setup = setup
        self._connection = connection
        self._calls: deque[Future[Any]] = deque()
        # wait: held for moments; nobody waits under it, as sending over ZeroMQ does not
        self._calling = threading.Lock()
        self._feeds: dict[int, socket.socket] = {}
        """Our ends of socket pairs, by sampler: what an agent's sampler sent goes in here."""
        self._ending = self._said = False
        self._failure: BaseException | None = None

    @property
    def here(self) -> range:
        """The stages of the host."""
        return stages_of_hosts(self._setup.stages, self._setup.config.hosts)[self.node]

    def __str__(self) -> str:
        first, last = self.here[0], self.here[-1]
        stages = f"stage {first}" if first == last else f"stages {first} to {last}"
        return f"host {self.node} ({self.address or 'not met'}, {stages})"

    def meet(self, deadline: float) -> None:
        """Wait for the agent's hello, and compare.

        Raises: see :func:`meet`.
        """
        setup, connection, warned = self._setup, self._connection, False
        while not connection.wait_for_peer(max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise StallError(
                    f"host {self.node} did not come within {setup.config.start_timeout:g} s: was it "
                    f"started (--node-rank {self.node} --headless), and can it reach this address?"
                )
            if connection.refused:
                connection.refused = False
                if warned:
                    continue
                warned = True  # once, however often somebody comes
                logger.warning("Somebody with another secret, or none, came for %s", self)
        while (answer := connection.receive(HELLO_SECONDS)) == [say.CLOCK]:
            connection.send(say.CLOCK, str(time.time_ns()).encode())
        if answer is None or answer[0] != say.HELLO:
            raise StallError(f"{self} came and said nothing; look at its own log")
        hello: say.Hello = pickle.loads(answer[1])
        self.address = hello.address
        connection.who = str(self)
        if different := difference(agreed(setup), hello.agreed):
            error = f"host {self.node} ({hello.address}) does not fit: {different}"
            self._said = True
            self._send(say.REFUSED, error.encode())
            raise ConfigError(error)
        setup.samplers += hello.samplers

    # ---- what a host is to the pipeline ---------------------------------------------------------

    def begin(self, events: Events, telemetry: Telemetry) -> None:
        """Tell the agent what the engine is, and listen to it."""
        self._events, self._telemetry = events, telemetry
        plan = cloudpickle.dumps(say.Plan(setup=self._setup, run=telemetry.watched.run))
        self._send(say.PLAN, plan)
        threading.Thread(target=self._listen, name=f"SiPipeHost{self.node}", daemon=True).start()

    def start(self) -> list[socket.socket]:
        """Start all processes there; returns the receiving ends of BIC-O."""
        last = self._setup.stages - 1 in self.here
        ends = [self._feed(index) for index in range(self._setup.samplers if last else 0)]
        self._call("start")
        return ends

    def wait_loaded(self) -> None:
        self._wait("wait_loaded")

    def publish(self, message: Sequence[Any]) -> None:
        self._send(say.PUBLISH, *message)

    def make_logits(self, shape: LogitsShape) -> LogitsEndpoint:
        endpoint: LogitsEndpoint = self._wait("make_logits", shape)
        return endpoint

    def open_samplers(self) -> dict[str, float]:
        measured: dict[str, float] = self._wait("open_samplers")
        return measured

    def end_samplers(self) -> None:
        self._wait("end_samplers")

    def admit(self, index: int, snapshot: Snapshot) -> None:
        self._send(say.ADMIT, str(index).encode(), pickle.dumps(snapshot))

    def ask(self) -> None:
        self._send(say.ASK)

    def fail(self, error: BaseException) -> None:
        with self._calling:
            self._failure = error
            calls, self._calls = self._calls, deque()
        for call in calls:
            with suppress(InvalidStateError):
                call.set_exception(error)

    def expect_end(self) -> None:
        self._ending = True

    def say_end(self, reason: str) -> None:
        """Let the agent end its processes, while others end theirs; the first reason counts."""
        said, self._ending, self._said = self._said, True, True
        if not said:
            self._send(say.END, reason.encode())

    def close(self, reason: str = "") -> None:
        self.say_end(reason)
        self._connection.interrupt()
        self._connection.close()
        for feed in self._feeds.values():
            feed.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _send(self, *parts: bytes | memoryview) -> None:
        # The thread that listens says that the host is gone.
        with suppress(PeerDiedError):
            self._connection.send(*parts)

    def _call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._calling:
            if self._failure is not None:
                raise self._failure
            self._calls.append(future)
            self._send(say.CALL, pickle.dumps((method, arguments)))
        return future

    def _wait(self, method: str, *arguments: Any) -> Any:
        called = self._call(method, *arguments)
        late = f"{method} waits for {self}"
        return result_of(called, lambda: late, self._setup.config.start_timeout)

    def _feed(self, index: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        before, self._feeds[index] = self._feeds.get(index), ours
        if before is not None:
            before.close()
        return theirs

    def _listen(self) -> None:
        try:
            while not self._ending and (message := self._connection.receive(None)):
                self._take(*message)
        except PeerDiedError as error:
            if not self._ending:
                self._events.failed(WorkerDiedError(f"{error}; the engine stops"))
        except Exception as error:
            self._events.failed(error)

    def _take(self, kind: bytes, *parts: bytes) -> None:
        if kind == say.TOKENS:
            self._telemetry.take_figures(parts[2])
            feed = self._feeds[int(parts[0])]
            with suppress(OSError):  # the engine is shutting down
                # wait: none; the gather thread, which always reads, or `close`
                feed.sendall(parts[1]) if parts[1] else feed.shutdown(socket.SHUT_WR)
        elif kind == say.HEARD:
            self._events.heard(parts[0].decode(), pickle.loads(parts[1]))
        elif kind == say.FIGURES:
            self._telemetry.take_figures(parts[0])
        elif kind == say.DONE:
            result = pickle.loads(parts[0])
            with self._calling:
                call = self._calls.popleft() if self._calls else None
            if isinstance(result, BaseException):
                self._events.failed(result)
            elif call is not None:
                with suppress(InvalidStateError):
                    call.set_result(result)
        elif kind == say.SUCCESSOR:
            index = int(parts[0])
            self._events.started_again(index, self._feed(index), pickle.loads(parts[1]))
        elif kind == say.FAILED:
            self._events.failed(pickle.loads(parts[0]))
        elif kind == say.END and not self._ending:
            error = f"{self} was ended{': ' + parts[0].decode() if parts[0] else ''}"
            self._events.failed(WorkerDiedError(f"{error}; the engine stops"))
