"""The host agent: ``sipipe serve ... --node-rank N --headless``, or the child of a Ray actor.

Who runs here
    The main thread follows the main host: what it publishes goes to this host's ring at once, in order.
    A thread makes the calls, which wait for children; one for each sampler sends on what it drew;
    one sends the figures; and there is the events thread of the children.
Guarantees
    When the main host ends, is lost, or says so, this process ends with all of its children, and says
    why. When this process ends, the main host is told; when it is killed, its connection says so, and
    its children end with it (:mod:`sipipe.ipc.parent`).
"""

import dataclasses
import pickle
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from sipipe.cores import claim
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
    own_address,
)
from sipipe.engine.setup.record import Setup, assign_devices
from sipipe.errors import ConfigError, StallError, tell
from sipipe.ipc.connection import Connection
from sipipe.ipc.errors import ChannelClosed, PeerDiedError
from sipipe.ipc.tcp import OTHER_PORT, SAID_SECONDS, check_port
from sipipe.messages import hosts as say
from sipipe.messages.calls import Request
from sipipe.messages.pickles import out_of_band, whole

FIGURES_SECONDS = 0.5
CHUNK = 1 << 18
CLOCK_QUESTIONS = 5


def run_agent(
    setup: Setup,
    ready: Callable[[], object] = lambda: None,
    met: Callable[[], object] = lambda: None,
) -> int:
    """Serve this host's stages until the engine ends; returns the exit status. ``setup`` is this
    host's own; ``ready`` is called when only the main host is missing, ``met`` when it takes this host.

    Raises ConfigError: it cannot be reached, or it refuses this host. StallError: it never came.
    """
    hosts = setup.config.hosts
    seconds = setup.config.start_timeout
    address = own_address(hosts, seconds)
    port = control_port(hosts, setup.node)
    ranks = [(setup.here[0] - 1) * setup.ranks + rank for rank in range(setup.ranks)]
    ports = [link_port(setup, rank) for rank in ranks]
    for listens in ports:
        check_port(address, listens, OTHER_PORT)
    main = f"the main host ({hosts.address}:{port})"
    listed = f"port{'s' * (len(ports) > 1)} {', '.join(map(str, ports))}"
    tell(f"{setup.has()}; connects to {main}; links on {address}: {listed}")
    ready()
    at = main_address(hosts, setup.node, seconds)
    connection = Connection(at, port, listens=False, who=main)
    try:
        plan, clock_offset_ns = _introduce(setup, connection, address, main)
    except BaseException:
        connection.close()
        raise
    met()
    theirs: Setup = pickle.loads(plan.setup)
    own = {key: getattr(setup.config, key) for key in OWN_SETTINGS}
    config = msgspec.structs.replace(theirs.config, **own)
    agreed_setup = dataclasses.replace(
        theirs, cores=setup.cores, node=setup.node, here=setup.here, config=config
    )
    if setup.kv_bytes is not None:
        agreed_setup.vllm_config.cache_config.kv_cache_memory_bytes = setup.kv_bytes
    devices = setup.config.devices
    if (devices, theirs.config.devices) != (None, None):
        assign_devices(agreed_setup.vllm_config, devices)
    with claim(setup.cores):
        return Agent(agreed_setup, plan, clock_offset_ns, connection).run()


def _introduce(
    setup: Setup, connection: Connection, address: str, main: str
) -> tuple[say.Plan, int]:
    """What the main host wants, and what to add to this host's wall clock to have its."""
    began = time.monotonic()
    deadline = began + setup.config.start_timeout
    said = began
    refusals = 0
    # wait: `start_timeout`; the main host
    while not connection.wait_for_peer(min(SAID_SECONDS, max(0.0, deadline - time.monotonic()))):
        if not connection.refused:
            now = time.monotonic()
            if now < deadline:
                if now - said >= SAID_SECONDS:
                    said = now
                    tell(f"waits for {main}, {now - began:.0f} s by now")
                continue
            raise StallError(
                f"{main} cannot be reached within {setup.config.start_timeout:g} s: is it started, "
                "and --master-addr one of its addresses that this host can reach?"
            )
        refusals += 1
        if refusals > 1:  # once may be one that was just ending
            raise ConfigError(
                f"{main} refused this host: the secret (SIPIPE_SECRET) is not the same on both, or "
                "something else listens there"
            )
        connection.refused = False
    samplers = len(setup.cores.samplers)
    hello = say.Hello(node=setup.node, address=address, agreed=agreed(setup), samplers=samplers)

    def ask(message: object) -> Any:
        connection.send(*out_of_band(message))
        parts = connection.receive(max(1.0, deadline - time.monotonic()))
        if parts is None:
            raise StallError(f"{main} is there and waits for other hosts, which did not come")
        match whole(parts):
            case say.Refused(why):
                raise ConfigError(f"{main} refused this host: {why}")
            case say.End(why):  # for a reason of its own: --restart is for that
                raise PeerDiedError(f"{main} ended before it began: {why}")
            case answer:
                return answer

    clocks = []
    for _ in range(CLOCK_QUESTIONS):
        asked = time.time_ns()
        theirs, answered = ask(say.Clock()).nanoseconds, time.time_ns()
        clocks.append((answered - asked, theirs - (asked + answered) // 2))
    _, clock_offset_ns = min(clocks)  # the quickest answer says most
    return ask(hello), clock_offset_ns


class Agent:
    """What :func:`run_agent` runs; ``Events`` of its host."""

    def __init__(
        self, setup: Setup, plan: say.Plan, clock_offset_ns: int, connection: Connection
    ) -> None:
        self._connection = connection
        self._figures = Figures(setup, plan.samplers, plan.run, clock_offset_ns)
        self._host = LocalHost(setup, self._figures.watched, self)
        # The main thread may wait for a reader that hangs.
        connection.lost = lambda _: self._host.say_end("")
        self._calls: queue.SimpleQueue[Request[Any]] = queue.SimpleQueue()
        self._forwarding: dict[int, threading.Thread] = {}
        self._admitted: dict[int, threading.Event] = {}
        self._ended = threading.Event()
        # Figures arrive in the order in which they were read: counters never go back.
        self._telling = threading.Lock()  # wait: held for moments; nobody waits under it

    def run(self) -> int:
        """Follow the main host; returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        for target in (self._make_calls, self._send_figures):
            threading.Thread(target=target, name="SiPipeAgent", daemon=True).start()
        status, reason = 1, "its agent failed"
        try:
            while (parts := self._connection.receive(None)) is not None:
                message = whole(parts)
                if isinstance(message, say.End):
                    reason = message.why
                    tell(f"the engine ended{': ' + reason if reason else ''}")
                    status = 1 if reason else 0
                    break
                self._take(message)
        except PeerDiedError as error:
            tell(f"{error}; this host's stages end")
        except SystemExit:
            reason = "it was told to (SIGTERM, SIGINT, or the end of its Ray actor)"
            status = 143
        except Exception as error:
            reason = str(error)
            tell(f"this host's stages end: {reason}")
        finally:
            self._ended.set()
            self._host.expect_end()
            self._send(say.End(reason))
            self._host.fail(RuntimeError("the engine ended"))
            self._host.close()
            self._connection.close()
            self._figures.close()
        return status

    def _take(self, message: object) -> None:
        match message:
            case say.Publish(parts):
                with suppress(ChannelClosed):  # what comes next says why
                    self._host.publish(parts)
            case Request():
                self._calls.put(message)
            case say.Admit(index, snapshot):
                self._host.admit(index, snapshot)
                self._admitted[index].set()
            case say.AskWorkers():
                self._host.ask()

    def _on_signal(self, _number: int, _frame: Any) -> None:
        if not self._ended.is_set():
            raise SystemExit(143)

    def _send(self, message: object) -> None:
        with suppress(PeerDiedError):  # the main thread hears of it
            self._connection.send(*out_of_band(message))

    # ---- what the host tells the engine ---------------------------------------------------------

    def heard(self, name: str, message: Any) -> None:
        self._send(say.Heard(name, message))

    def failed(self, error: BaseException) -> None:
        self._send(say.Failed(_sendable(error)))

    def started_again(self, index: int, tokens: socket.socket, poison: Poison | None) -> None:
        # What the predecessor sent is on its way. The thread reads to the end of its socket, which
        # was the predecessor's alone and closed with it, and never waits for the network.
        # wait: none: its socket's only writer is dead; the end of that socket
        self._forwarding[index].join()
        admitted = self._admitted[index] = threading.Event()
        self._send(say.Successor(index, poison))
        self._forward(index, tokens)
        # The next one shall not have what this one is told.
        # wait: 1 s, again and again; the main host, which admits every one, or the engine's end
        while not (admitted.wait(1.0) or self._ended.is_set()):
            pass

    def turn(self) -> float:
        return LONGEST_SLEEP

    # ---- threads --------------------------------------------------------------------------------

    def _make_calls(self) -> None:
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
        thread = threading.Thread(target=self._send_tokens, args=(index, tokens), daemon=True)
        self._forwarding[index] = thread
        thread.start()

    def _send_tokens(self, index: int, tokens: socket.socket) -> None:
        data = b"all"
        while data:
            try:
                # wait: none, while nothing is drawn; the sampler's death, which closes its end
                data = tokens.recv(CHUNK)
            except OSError:
                data = b""
            with self._telling:
                if (figures := self._figures_here()) is None:
                    break
                self._send(say.Tokens(index, data, figures))
        tokens.close()

    def _send_figures(self) -> None:
        sent = b""
        while not self._ended.wait(FIGURES_SECONDS):
            with self._telling:
                if (figures := self._figures_here()) is not None and figures != sent:
                    sent = figures
                    self._send(say.HostFigures(figures))

    def _figures_here(self) -> bytes | None:
        """None: their page is closed, for the engine has ended."""
        with suppress(ValueError):
            return self._figures.figures_here()
        return None


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.dumps(error)
        return error
    except Exception:  # an error of somebody else's
        return RuntimeError(str(error))
