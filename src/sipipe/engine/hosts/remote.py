"""The main host's side of the others: how they come, and each as a :class:`.Host` to the pipeline.

Who runs here
    The engine thread waits for the hosts and calls; whoever publishes BIC-I, admits and asks; a
    thread for each host takes in what its agent says, and calls the same handlers as the events
    thread of this host does.
Guarantees
    A host that was met and is lost, or ends, fails the engine, named by number, address and stages.
    Everything that was sent to a host arrives in the order of the calls.
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
from functools import partial
from typing import Any, TypeVar

import cloudpickle
from vllm.logger import init_logger

from sipipe.engine.children.events import Events
from sipipe.engine.iteration.calls import result_of
from sipipe.engine.iteration.telemetry import Telemetry
from sipipe.engine.setup.host_agreement import agreed, control_port, difference, main_address
from sipipe.engine.setup.record import Setup
from sipipe.engine.setup.stages import named, stages_of_hosts
from sipipe.errors import ConfigError, StallError, WorkerDiedError
from sipipe.ipc.connection import Connection
from sipipe.ipc.errors import PeerDiedError
from sipipe.ipc.tcp import SAID_SECONDS
from sipipe.messages import hosts as say
from sipipe.messages.calls import Request
from sipipe.messages.pickles import out_of_band, whole
from sipipe.messages.step import Snapshot

logger = init_logger(f"vllm.{__name__}")

T = TypeVar("T")

HELLO_SECONDS = 30.0


def meet(setup: Setup) -> list[RemoteHost]:
    """Wait until all other hosts are there. Raises ConfigError: a port that is taken, or a host
    with other versions or settings. StallError: a host did not come within the start timeout."""
    if (hosts := setup.config.hosts).count == 1:
        return []
    address = main_address(hosts, setup.node, setup.config.start_timeout)
    deadline = time.monotonic() + setup.config.start_timeout
    remotes: list[RemoteHost] = []
    try:
        for node in range(1, hosts.count):
            remotes.append(RemoteHost(setup, node, address))
        ports = ", ".join(
            f"port {control_port(hosts, it.node)} for host {it.node}" for it in remotes
        )
        logger.info("SiPipe's main host listens on %s: %s", address, ports)
        for remote in remotes:
            remote.meet(deadline)
    except BaseException as error:
        for remote in remotes:
            remote.close(str(error))
        raise
    return remotes


class RemoteHost:
    """A host with an agent on it, which does there what :class:`.LocalHost` does here."""

    def __init__(self, setup: Setup, node: int, address: str) -> None:
        """Listen for it on this host's ``address``."""
        self.node = node
        self.address = ""
        self.samplers = 0
        """How many it has; known when it was met, as the address is."""
        self._setup = setup
        port = control_port(setup.config.hosts, node)
        self._listen_again = partial(Connection, address, port, listens=True, who=f"host {node}")
        self._connection = self._listen_again()
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
        return f"host {self.node} ({self.address or 'not met'}, {named(self.here)})"

    def meet(self, deadline: float) -> None:
        """Wait for the agent's hello, and compare. Raises as :func:`meet`."""
        while True:
            try:
                return self._meet(deadline)
            except PeerDiedError:  # it came while others were waited for, and may come again
                self._connection.close()
                self._connection = self._listen_again()

    def _meet(self, deadline: float) -> None:
        setup, connection, warned = self._setup, self._connection, False
        began = time.monotonic()
        said = began
        # wait: `start_timeout`; the agent
        while not connection.wait_for_peer(
            min(SAID_SECONDS, max(0.0, deadline - time.monotonic()))
        ):
            now = time.monotonic()
            if now - said >= SAID_SECONDS:
                said = now
                logger.info("waits for host %d to come, %.0f s by now", self.node, now - began)
            if now > deadline:
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
        while isinstance(hello := self._receive(HELLO_SECONDS), say.Clock):
            connection.send(*out_of_band(say.Clock(time.time_ns())))
        if not isinstance(hello, say.Hello):
            raise StallError(f"{self} came and said nothing; look at its own log")
        self.address, self.samplers = hello.address, hello.samplers
        connection.who = str(self)
        if different := difference(agreed(setup), hello.agreed):
            error = f"host {self.node} ({hello.address}) does not fit: {different}"
            self._said = True
            self._send(say.Refused(error))
            raise ConfigError(error)

    # ---- what a host is to the pipeline ---------------------------------------------------------

    def begin(self, events: Events, telemetry: Telemetry, samplers: int) -> None:
        """Tell the agent what the engine is, and listen to it."""
        self._events, self._telemetry = events, telemetry
        setup, run = cloudpickle.dumps(self._setup), telemetry.watched.run
        self._send(say.Plan(setup=setup, samplers=samplers, run=run))
        threading.Thread(target=self._listen, name=f"SiPipeHost{self.node}", daemon=True).start()

    def start(self) -> list[socket.socket]:
        ends = [self._feed(index) for index in range(self.samplers)]
        self._call(say.Start())
        return ends

    def do(self, request: Request[T]) -> T:
        late = f"{request} waits for {self}"
        return result_of(self._call(request), lambda: late, self._setup.config.start_timeout)

    def publish(self, message: Sequence[Any]) -> None:
        self._send(say.Publish([pickle.PickleBuffer(part) for part in message]))

    def admit(self, index: int, snapshot: Snapshot) -> None:
        self._send(say.Admit(index, snapshot))

    def ask(self) -> None:
        self._send(say.AskWorkers())

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
        said, self._ending, self._said = self._said, True, True
        if not said:
            self._send(say.End(reason))

    def close(self, reason: str = "") -> None:
        self.say_end(reason)
        self._connection.interrupt()
        self._connection.close()
        for feed in self._feeds.values():
            feed.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        # The thread that listens says that the host is gone.
        with suppress(PeerDiedError):
            self._connection.send(*out_of_band(message))

    def _receive(self, seconds: float | None) -> Any:
        parts = self._connection.receive(seconds)
        return whole(parts) if parts else None

    def _call(self, request: Request[T]) -> Future[T]:
        future: Future[T] = Future()
        with self._calling:
            if self._failure is not None:
                raise self._failure
            self._calls.append(future)
            self._send(request)
        return future

    def _feed(self, index: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        before, self._feeds[index] = self._feeds.get(index), ours
        if before is not None:
            before.close()
        return theirs

    def _listen(self) -> None:
        try:
            while not self._ending and (message := self._receive(None)):
                self._take(message)
        except PeerDiedError as error:
            if not self._ending:
                self._events.failed(WorkerDiedError(f"{error}; the engine stops"))
        except Exception as error:
            self._events.failed(error)

    def _take(self, message: object) -> None:
        match message:
            case say.Tokens(index, data, figures):
                self._telemetry.take_figures(figures)
                with suppress(OSError):  # the engine is shutting down
                    # wait: as the gather thread, which reads, does to publish; `close`
                    self._feeds[index].sendall(data)
                    if not data:
                        self._feeds[index].shutdown(socket.SHUT_WR)
            case say.Heard(name, what):
                self._events.heard(name, what)
            case say.HostFigures(figures):
                self._telemetry.take_figures(figures)
            case say.Done(BaseException() as error) | say.Failed(error):
                self._events.failed(error)
            case say.Done(result):
                with self._calling:
                    call = self._calls.popleft() if self._calls else None
                if call is not None:
                    with suppress(InvalidStateError):
                        call.set_result(result)
            case say.Successor(index, poison):
                self._events.started_again(index, self._feed(index), poison)
            case say.End(why) if not self._ending:
                ended = f"{self} was ended{': ' + why if why else ''}"
                self._events.failed(WorkerDiedError(f"{ended}; the engine stops"))
