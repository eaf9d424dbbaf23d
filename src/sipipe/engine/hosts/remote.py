"""Other hosts as the main host sees them: how they come, and each as a :class:`.Host`.

Who runs here
    The engine thread, which waits for the hosts and makes calls. The threads that publish BIC-I,
    admit samplers and ask workers. One thread for each host, which takes in its agent's messages and
    calls the same handlers as this host's events thread.
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

from sipipe.best_effort import BestEffort
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
"""Seconds for which a host that has connected may say nothing."""


def meet(setup: Setup) -> list[RemoteHost]:
    """Wait until all other hosts are there; returns them by number, without this one.

    Raises ConfigError: a port is taken, or a host has other versions or settings. StallError: a host
    did not come within the start timeout."""
    hosts = setup.config.hosts
    if hosts.count == 1:
        return []
    address = main_address(hosts, setup.node, setup.config.start_timeout)
    deadline = time.monotonic() + setup.config.start_timeout
    remotes: list[RemoteHost] = []
    try:
        for node in range(1, hosts.count):
            remotes.append(RemoteHost(setup, node, address))
        ports = ", ".join(
            f"port {control_port(hosts, remote.node)} for host {remote.node}" for remote in remotes
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
    """A host whose agent does there what :class:`.LocalHost` does here."""

    def __init__(self, setup: Setup, node: int, address: str) -> None:
        """Listen for host ``node`` on this host's ``address``."""
        self.node = node
        self.address = ""
        """The host's address; empty until it was met."""
        self.samplers = 0
        """Samplers of the host; 0 until it was met."""
        self._setup = setup
        port = control_port(setup.config.hosts, node)
        self._listen_again = partial(Connection, address, port, listens=True, who=f"host {node}")
        self._connection = self._listen_again()
        self._calls: deque[Future[Any]] = deque()
        """Results of calls that were made and not answered yet, oldest first."""
        # Held while a call is appended and sent: an agent answers in the order in which it is asked.
        # wait: held for moments; nobody waits under it, as sending over ZeroMQ does not
        self._calling = threading.Lock()
        self._feeds: dict[int, socket.socket] = {}
        """Sending ends of socket pairs, by sampler, into which the agent's samplers' tokens go."""
        self._taking = BestEffort("taking another host's figures in", bounded=False)
        self._ending = False
        """True once the end of the host is no failure."""
        self._end_sent = False
        """True once the host was told that the engine ends, or was refused."""
        self._failure: BaseException | None = None
        """Error that every later call raises."""

    @property
    def host_stages(self) -> range:
        """The stages of the host."""
        return stages_of_hosts(self._setup.stages, self._setup.config.hosts)[self.node]

    def __str__(self) -> str:
        return f"host {self.node} ({self.address or 'not met'}, {named(self.host_stages)})"

    def meet(self, deadline: float) -> None:
        """Wait for the agent's hello until ``deadline`` (``time.monotonic()``), and compare its
        versions and settings with this host's. Raises as :func:`meet`."""
        while True:
            try:
                self._wait_for_agent(deadline)
                hello = self._receive_hello()
                break
            except PeerDiedError:  # it came while another host was waited for, and may come again
                self._connection.close()
                self._connection = self._listen_again()
        self.address = hello.address
        self.samplers = hello.samplers
        self._connection.who = str(self)
        different = difference(agreed(self._setup), hello.agreed)
        if different:
            error = f"host {self.node} ({hello.address}) does not fit: {different}"
            self._end_sent = True
            self._send(say.Refused(error))
            raise ConfigError(error)

    def _wait_for_agent(self, deadline: float) -> None:
        """Wait until an agent with the same secret is connected. Raises StallError: none came."""
        connection = self._connection
        warned = False
        began = time.monotonic()
        logged = began
        # wait: `start_timeout`; the agent
        while not connection.wait_for_peer(
            min(SAID_SECONDS, max(0.0, deadline - time.monotonic()))
        ):
            now = time.monotonic()
            if now - logged >= SAID_SECONDS:
                logged = now
                logger.info("waits for host %d to come, %.0f s by now", self.node, now - began)
            if now > deadline:
                raise StallError(
                    f"host {self.node} did not come within {self._setup.config.start_timeout:g} s: was it "
                    f"started (--node-rank {self.node} --headless), and can it reach this address?"
                )
            if connection.refused:
                connection.refused = False
                if warned:
                    continue
                warned = True  # once, however often somebody comes
                logger.warning("Somebody with another secret, or none, came for %s", self)

    def _receive_hello(self) -> say.Hello:
        """Answer the agent's questions for this host's clock, and return its hello."""
        message = self._receive(HELLO_SECONDS)
        while isinstance(message, say.Clock):
            self._connection.send(*out_of_band(say.Clock(time.time_ns())))
            message = self._receive(HELLO_SECONDS)
        if not isinstance(message, say.Hello):
            raise StallError(f"{self} came and said nothing; look at its own log")
        return message

    # ---- the host as the pipeline sees it -------------------------------------------------------

    def begin(self, events: Events, telemetry: Telemetry, samplers: int) -> None:
        """Tell the agent what the engine is, and listen to it. ``samplers`` is the number of those of
        all hosts."""
        self._events = events
        self._telemetry = telemetry
        plan = say.Plan(
            setup=cloudpickle.dumps(self._setup), samplers=samplers, run=telemetry.watched.run
        )
        self._send(plan)
        threading.Thread(target=self._listen, name=f"SiPipeHost{self.node}", daemon=True).start()

    def start(self) -> list[socket.socket]:
        ends = [self._feed(index) for index in range(self.samplers)]
        self._call(say.Start())
        return ends

    def do(self, request: Request[T]) -> T:
        reason = f"{request} waits for {self}"
        return result_of(self._call(request), lambda: reason, self._setup.config.start_timeout)

    def publish(self, message: Sequence[Any]) -> None:
        self._send(say.Publish([pickle.PickleBuffer(part) for part in message]))

    def draft(self, message: bytes) -> None:
        self._send(say.Draft(message))

    def admit(self, index: int, snapshot: Snapshot) -> None:
        self._send(say.Admit(index, snapshot))

    def ask(self) -> None:
        self._send(say.AskWorkers())

    def fail(self, error: BaseException) -> None:
        with self._calling:
            self._failure = error
            calls = self._calls
            self._calls = deque()
        for call in calls:
            with suppress(InvalidStateError):
                call.set_exception(error)

    def expect_end(self) -> None:
        self._ending = True

    def say_end(self, reason: str) -> None:
        self._ending = True
        if not self._end_sent:
            self._end_sent = True
            self._send(say.End(reason))

    def close(self, reason: str = "") -> None:
        self.say_end(reason)
        self._connection.interrupt()
        self._connection.close()
        for feed in self._feeds.values():
            feed.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        # The thread that listens reports that the host is gone.
        with suppress(PeerDiedError):
            self._connection.send(*out_of_band(message))

    def _receive(self, seconds: float | None) -> Any:
        parts = self._connection.receive(seconds)
        return whole(parts) if parts else None

    def _call(self, request: Request[T]) -> Future[T]:
        """Send a call; returns the future of its answer. Raises what :meth:`fail` was called with."""
        future: Future[T] = Future()
        with self._calling:
            if self._failure is not None:
                raise self._failure
            self._calls.append(future)
            self._send(request)
        return future

    def _feed(self, index: int) -> socket.socket:
        """Make a socket pair for the tokens of sampler ``index``, or of its successor; returns the end
        from which they are gathered."""
        sender, receiver = socket.socketpair()
        predecessor = self._feeds.get(index)
        self._feeds[index] = sender
        if predecessor is not None:
            predecessor.close()
        return receiver

    def _listen(self) -> None:
        """Take in the agent's messages until the end."""
        try:
            while not self._ending:
                message = self._receive(None)
                if not message:
                    break
                self._take(message)
        except PeerDiedError as error:
            if not self._ending:
                self._events.failed(WorkerDiedError(f"{error}; the engine stops"))
        except Exception as error:
            self._events.failed(error)

    def _take(self, message: object) -> None:
        """Pass on what the agent says."""
        match message:
            case say.Tokens(index, data, figures):
                if figures:
                    self._taking(None, self._telemetry.take_figures, figures)
                with suppress(OSError):  # the engine is shutting down
                    # wait: as the gather thread, which reads, does to publish; `close`
                    self._feeds[index].sendall(data)
                    if not data:  # the sampler is gone
                        self._feeds[index].shutdown(socket.SHUT_WR)
            case say.Heard(name, said):
                self._events.heard(name, said)
            case say.HostFigures(figures):
                self._taking(None, self._telemetry.take_figures, figures)
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
