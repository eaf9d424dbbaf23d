"""The host agent: ``sipipe serve ... --node-rank N --headless``, or the child of a Ray actor.

Who runs here
    The main thread, which follows the main host and publishes what it sends in this host's ring, at
    once and in order. One thread makes the calls, which wait for children. One for each sampler sends
    on the tokens that it drew. One sends the figures. The events thread watches the children.
Guarantees
    When the main host ends, is lost, or says so, this process ends with all of its children, and says
    why. When this process ends, the main host is told; when it is killed, its connection says so, and
    its children end with it (:mod:`sipipe.ipc.parent`).
"""

import dataclasses
import logging
import pickle
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from sipipe.best_effort import BestEffort
from sipipe.core_binding import claim
from sipipe.engine.children.events import Poison
from sipipe.engine.hosts.local import LocalHost
from sipipe.engine.iteration.stall import LONGEST_SLEEP
from sipipe.engine.iteration.telemetry import Figures
from sipipe.engine.setup.host_agreement import (
    OWN_SETTINGS,
    agreed,
    control_port,
    link_port,
    main_address,
    nixl_ports,
    own_address,
    tries_nixl,
)
from sipipe.engine.setup.record import Setup, assign_devices
from sipipe.errors import ConfigError, StallError, tell
from sipipe.ipc.connection import Connection
from sipipe.ipc.errors import ChannelClosed, PeerDiedError
from sipipe.ipc.tcp import OTHER_PORT, SAID_SECONDS, check_port
from sipipe.messages import hosts as say
from sipipe.messages.calls import Request
from sipipe.messages.pickles import out_of_band, whole

logger = logging.getLogger(f"vllm.{__name__}")

FIGURES_SECONDS = 0.5
"""Seconds between two looks at this host's figures, which are sent if they have changed."""
CHUNK = 1 << 18
"""Bytes of a sampler's tokens that are read and sent at once, at most."""
CLOCK_QUESTIONS = 5
"""Times that the main host is asked for its clock. One answer in five is quick enough to say it within
a fraction of a millisecond."""


def run_agent(
    setup: Setup,
    ready: Callable[[], object] = lambda: None,
    met: Callable[[], object] = lambda: None,
) -> int:
    """Serve this host's stages until the engine ends; returns the exit status of ``sipipe serve``.

    Args:
        setup: what this host has decided for itself.
        ready: called when only the main host is missing.
        met: called when the main host has taken this host.

    Raises ConfigError: the main host cannot be reached, or refuses this host. StallError: the main
    host never came.
    """
    hosts = setup.config.hosts
    seconds = setup.config.start_timeout
    address = own_address(hosts, seconds)
    port = control_port(hosts, setup.node)
    ranks = [(setup.host_stages[0] - 1) * setup.ranks + rank for rank in range(setup.ranks)]
    ports = [link_port(setup, rank) for rank in ranks]
    if tries_nixl(setup.config):
        ports += [port for rank in ranks for port in nixl_ports(setup, rank)]
    for listening_port in ports:
        check_port(address, listening_port, OTHER_PORT)
    main = f"the main host ({hosts.address}:{port})"
    unit = "ports" if len(ports) > 1 else "port"
    links = f"{unit} {', '.join(map(str, ports))}"
    tell(f"{setup.host_parts()}; connects to {main}; links on {address}: {links}")
    ready()
    connection = Connection(main_address(hosts, setup.node, seconds), port, listens=False, who=main)
    try:
        plan, clock_offset_ns = _introduce(setup, connection, address, main)
    except BaseException:
        connection.close()
        raise
    met()
    # From our main host, over a connection that both secrets have authenticated.
    engine_setup = _with_host_settings(pickle.loads(plan.setup), setup)
    with claim(setup.cores):
        return Agent(engine_setup, plan, clock_offset_ns, connection).run()


def _with_host_settings(main_setup: Setup, setup: Setup) -> Setup:
    """The main host's ``main_setup``, with what this host has decided for itself in ``setup``."""
    settings = {key: getattr(setup.config, key) for key in OWN_SETTINGS}
    merged = dataclasses.replace(
        main_setup,
        cores=setup.cores,
        node=setup.node,
        host_stages=setup.host_stages,
        config=msgspec.structs.replace(main_setup.config, **settings),
    )
    if setup.kv_bytes is not None:
        merged.vllm_config.cache_config.kv_cache_memory_bytes = setup.kv_bytes
    # The main host's vLLM configuration names the main host's GPUs, if it names any.
    if setup.config.devices is not None or main_setup.config.devices is not None:
        assign_devices(merged.vllm_config, setup.config.devices)
    return merged


def _introduce(
    setup: Setup, connection: Connection, address: str, main: str
) -> tuple[say.Plan, int]:
    """Introduce this host to the main host, at whose other end of ``connection`` it waits. Returns the
    main host's plan, and nanoseconds that, added to this host's wall clock, give the main host's.
    Raises as :func:`run_agent`."""
    deadline = time.monotonic() + setup.config.start_timeout
    _wait_for_main_host(setup, connection, main, deadline)

    def ask(message: object) -> Any:
        connection.send(*out_of_band(message))
        parts = connection.receive(max(1.0, deadline - time.monotonic()))
        if parts is None:
            raise StallError(f"{main} is there and waits for other hosts, which did not come")
        match whole(parts):
            case say.Refused(why):
                raise ConfigError(f"{main} refused this host: {why}")
            # The main host ended for a reason of its own, after which --restart may try again.
            case say.End(why):
                raise PeerDiedError(f"{main} ended before it began: {why}")
            case answer:
                return answer

    clocks = []
    for _ in range(CLOCK_QUESTIONS):
        asked_ns = time.time_ns()
        main_ns = ask(say.Clock()).nanoseconds
        answered_ns = time.time_ns()
        clocks.append((answered_ns - asked_ns, main_ns - (asked_ns + answered_ns) // 2))
    # The quickest answer leaves the least doubt when within it the other clock was read.
    _, clock_offset_ns = min(clocks)
    hello = say.Hello(
        node=setup.node,
        address=address,
        agreed=agreed(setup),
        samplers=len(setup.cores.samplers),
    )
    return ask(hello), clock_offset_ns


def _wait_for_main_host(setup: Setup, connection: Connection, main: str, deadline: float) -> None:
    """Wait until the main host is at the other end of ``connection``, and tell every
    ``SAID_SECONDS`` that this host still waits. Raises as :func:`run_agent`."""
    began = time.monotonic()
    told_at = began
    refusals = 0
    # wait: `start_timeout`; the main host
    while not connection.wait_for_peer(min(SAID_SECONDS, max(0.0, deadline - time.monotonic()))):
        if not connection.refused:
            now = time.monotonic()
            if now < deadline:
                if now - told_at >= SAID_SECONDS:
                    told_at = now
                    tell(f"waits for {main}, {now - began:.0f} s by now")
                continue
            raise StallError(
                f"{main} cannot be reached within {setup.config.start_timeout:g} s: is it started, "
                "and --master-addr one of its addresses that this host can reach?"
            )
        refusals += 1
        if refusals > 1:  # the first may have come from an engine that was just ending
            raise ConfigError(
                f"{main} refused this host: the secret (SIPIPE_SECRET) is not the same on both, or "
                "something else listens there"
            )
        connection.refused = False


class Agent:
    """The agent of one host once the main host has taken it. It also is the :class:`.Events` of its
    :class:`.LocalHost`, which it passes on to the main host."""

    def __init__(
        self, setup: Setup, plan: say.Plan, clock_offset_ns: int, connection: Connection
    ) -> None:
        self._connection = connection
        self._figures = Figures(setup, plan.samplers, plan.run, clock_offset_ns)
        self._host = LocalHost(setup, self._figures.watched, self)
        # The main thread, which would hear of the loss, may wait for a reader of the ring that hangs.
        connection.lost = lambda _: self._host.say_end("")
        self._calls: queue.SimpleQueue[Request[Any]] = queue.SimpleQueue()
        self._forwarding: dict[int, threading.Thread] = {}
        """Threads that send on the tokens of each sampler, by index."""
        self._admitted: dict[int, threading.Event] = {}
        """Events of the last successor of each sampler, set once the main host has admitted it."""
        self._ended = threading.Event()
        # Held from the reading of figures until they are sent, so that they arrive in the order in
        # which they were read: a counter of the main host's metrics never goes back.
        self._telling = threading.Lock()  # wait: held for moments; nobody waits under it
        self._reading = BestEffort("reading this host's figures", bounded=False)

    def run(self) -> int:
        """Follow the main host; returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        for work in (self._make_calls, self._send_figures):
            self._start(work)
        status = 1
        reason = "its agent failed"
        last_line = ""
        try:
            while (parts := self._connection.receive(None)) is not None:
                message = whole(parts)
                if isinstance(message, say.End):
                    reason = message.why
                    last_line = f"the engine ended{': ' + reason if reason else ''}"
                    status = 1 if reason else 0
                    break
                self._take(message)
        except PeerDiedError as error:
            last_line = f"{error}; this host's stages end"
        except SystemExit:
            reason = "it was told to (SIGTERM, SIGINT, or the end of its Ray actor)"
            status = 143
        except Exception as error:
            reason = str(error)
            last_line = f"this host's stages end: {reason}"
        finally:
            self._ended.set()
            try:
                self._host.expect_end()
                self._send(say.End(reason))
                self._host.fail(RuntimeError("the engine ended"))
                self._host.close()
                self._connection.close()
                self._figures.close()
            finally:
                if last_line:
                    # Behind whatever the workers say: one that loses its link at the same moment
                    # logs a traceback.
                    tell(last_line)
        return status

    def _take(self, message: object) -> None:
        """Do what the main host asks for."""
        match message:
            case say.Publish(parts):
                with suppress(ChannelClosed):  # the next message is the reason
                    self._host.publish(parts)
            case Request():
                self._calls.put(message)
            case say.Admit(index, snapshot):
                self._host.admit(index, snapshot)
                self._admitted[index].set()
            case say.Draft(message):
                self._host.draft(message)
            case say.AskWorkers():
                self._host.ask()

    def _on_signal(self, _number: int, _frame: Any) -> None:
        """End in good order at the first signal, which the wait for the main host does not outlive."""
        if not self._ended.is_set():
            raise SystemExit(143)

    def _send(self, message: object) -> None:
        with suppress(PeerDiedError):  # the main thread sees it too, and ends this process
            self._connection.send(*out_of_band(message))

    # ---- events of the host, for the engine -----------------------------------------------------

    def heard(self, name: str, message: Any) -> None:
        self._send(say.Heard(name, message))

    def failed(self, error: BaseException) -> None:
        self._send(say.Failed(_sendable(error)))

    def started_again(self, index: int, tokens: socket.socket, poison: Poison | None) -> None:
        # First everything that the predecessor has drawn. Its thread reads to the end of its socket,
        # which closed with the predecessor, and never waits for the network.
        # wait: none: its socket's only writer is dead; the end of that socket
        self._forwarding[index].join()
        admitted = threading.Event()
        self._admitted[index] = admitted
        self._send(say.Successor(index, poison))
        self._forward(index, tokens)
        # The main host's answer is meant for this successor. If it dies before that, too, the next
        # one must not be introduced earlier, or it would be given this one's snapshot.
        # wait: 1 s, again and again; the main host, which admits every one, or the engine's end
        while not (admitted.wait(1.0) or self._ended.is_set()):
            pass

    def turn(self) -> float:
        return LONGEST_SLEEP

    # ---- threads --------------------------------------------------------------------------------

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        """Start a thread that does ``work``, and return it. What it raises ends the engine: the main host
        waits for this thread, and would not hear that it is gone."""

        def do() -> None:
            try:
                work()
            except Exception as error:
                if not self._ended.is_set():
                    logger.exception("a thread of this host's agent failed")
                    self.failed(error)

        thread = threading.Thread(target=do, name="SiPipeAgent", daemon=True)
        thread.start()
        return thread

    def _make_calls(self) -> None:
        """Make the main host's calls one after the other, and send their results."""
        while True:
            # wait: none, for the main host's next request; a daemon, it ends with the process
            request = self._calls.get()
            try:
                if isinstance(request, say.Start):
                    for index, tokens in enumerate(self._host.start()):
                        self._forward(index, tokens)
                    result = None
                else:
                    result = self._host.do(request)
            except BaseException as error:
                result = _sendable(error)
            self._send(say.Done(result))

    def _forward(self, index: int, tokens: socket.socket) -> None:
        """Start the thread that sends on what sampler ``index`` writes to ``tokens``."""
        self._forwarding[index] = self._start(partial(self._send_tokens, index, tokens))

    def _send_tokens(self, index: int, tokens: socket.socket) -> None:
        """Send on what sampler ``index`` writes to ``tokens``, each time with this host's figures, if they
        can be read: tokens do not wait for those. An empty message says that the sampler is gone."""
        with tokens:
            data: bytes | None = None
            while data != b"":
                try:
                    # wait: none, while nothing is drawn; the sampler's death, which closes its end
                    data = tokens.recv(CHUNK)
                except OSError:
                    data = b""
                if self._ended.is_set():
                    return  # nobody waits for tokens any more
                with self._telling:
                    self._send(say.Tokens(index, data, self._figures_here()))

    def _send_figures(self) -> None:
        """Send this host's figures when they have changed, also while no tokens are drawn."""
        sent = b""
        while not self._ended.wait(FIGURES_SECONDS):
            with self._telling:
                figures = self._figures_here()
                if figures and figures != sent:
                    sent = figures
                    self._send(say.HostFigures(figures))

    def _figures_here(self) -> bytes:
        """This host's blocks of the statistics page; empty if they cannot be read."""
        return self._reading(b"", self._figures.figures_here)


def _sendable(error: BaseException) -> BaseException:
    """``error``, or one with the same text in the place of an error that cannot be pickled."""
    try:
        pickle.dumps(error)
        return error
    except Exception:  # the class is a library's, and pickling may raise anything
        return RuntimeError(str(error))
