"""The host agent: the foreground of ``sipipe serve ... --node-rank N --headless``, or of a child of
a Ray actor.

Who runs here
    The main thread follows the head: what it publishes goes to this host's ring at once, in order.
    A thread makes the calls, which wait for children; one for each sampler sends on what it drew;
    one sends the figures; and there is the events thread of the children.
Guarantees
    When the head ends, is lost, or says so, this process ends with all of its children, and says
    why. When this process ends, the head is told; when it is killed, its connection says so, and
    its children end with it (:mod:`sipipe.ipc.parent`).
"""

from __future__ import annotations

import dataclasses
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from sipipe.config import SiPipeConfig
from sipipe.engine.host import Host
from sipipe.engine.hosts import (
    OWN_SETTINGS,
    agreed,
    control_port,
    link_port,
    own_address,
)
from sipipe.engine.samplers import Poison
from sipipe.engine.setup import Setup, assign_devices
from sipipe.engine.stall import LONGEST_SLEEP
from sipipe.engine.telemetry import Figures
from sipipe.errors import ConfigError, StallError
from sipipe.ipc.connection import Connection
from sipipe.ipc.link.errors import PeerDiedError
from sipipe.ipc.tcp import OTHER_PORT, check_port, resolve
from sipipe.messages import hosts as say

FIGURES_SECONDS = 0.5
CHUNK = 1 << 18
CLOCK_QUESTIONS = 5


def run_agent(
    setup: Setup, kv_cache_memory_bytes: int | None, ready: Callable[[], object] = lambda: None
) -> int:
    """Serve this host's stages until the engine ends; returns the exit status.

    Args:
        setup: decided here, from this host's own command line.
        kv_cache_memory_bytes: what the KV caches of this host's workers get; None: vLLM decides.
        ready: called when only the head is missing.

    Raises:
        ConfigError: no head can be reached, or it refuses this host. StallError: it never came.
    """
    hosts = setup.config.hosts
    address = own_address(hosts)
    port = control_port(hosts, setup.node)
    ranks = [(setup.here[0] - 1) * setup.ranks + rank for rank in range(setup.ranks)]
    ports = [link_port(setup, rank) for rank in ranks]
    for listens in ports:
        check_port(address, listens, OTHER_PORT)
    head = f"the head ({hosts.address}:{port})"
    _print(f"{setup.has()}; connects to {head}; links on {address}: {_listed(ports)}")
    ready()
    connection = Connection(resolve(hosts.address, "--master-addr"), port, listens=False, who=head)
    try:
        plan, clock_offset_ns = _introduce(setup, connection, address, head)
    except BaseException:
        connection.close()
        raise
    agreed_setup = dataclasses.replace(
        plan.setup,
        cores=setup.cores,
        node=setup.node,
        here=setup.here,
        config=_own_settings(plan.setup, setup),
    )
    if kv_cache_memory_bytes is not None:
        agreed_setup.vllm_config.cache_config.kv_cache_memory_bytes = kv_cache_memory_bytes
    devices = setup.config.devices
    if (devices, plan.setup.config.devices) != (None, None):
        assign_devices(agreed_setup.vllm_config, devices)
    return Agent(agreed_setup, plan.run, clock_offset_ns, connection).run()


def _introduce(
    setup: Setup, connection: Connection, address: str, head: str
) -> tuple[say.Plan, int]:
    """What the head wants, and what to add to this host's wall clock to have the head's."""
    deadline, refusals = time.monotonic() + setup.config.start_timeout, 0
    while not connection.wait_for_peer(max(0.0, deadline - time.monotonic())):
        if not connection.refused:
            raise StallError(
                f"{head} cannot be reached within {setup.config.start_timeout:g} s: is it started, "
                "and --master-addr one of its addresses that this host can reach?"
            )
        refusals += 1
        if refusals > 1:  # once may be a head that was just ending
            raise ConfigError(
                f"{head} refused this host: the secret (SIPIPE_SECRET) is not the same on both, or "
                "something else listens there"
            )
        connection.refused = False
    hello = say.Hello(
        node=setup.node,
        address=address,
        agreed=agreed(setup),
        samplers=setup.samplers,
    )

    def ask(*parts: bytes) -> bytes:
        connection.send(*parts)
        answer = connection.receive(max(1.0, deadline - time.monotonic()))
        if answer is None:
            raise StallError(f"{head} is there and waits for other hosts, which did not come")
        if answer[0] == say.REFUSED:
            raise ConfigError(f"{head} refused this host: {answer[1].decode()}")
        if answer[0] == say.END:  # for a reason of its own: --restart is for that
            raise PeerDiedError(f"{head} ended before it began: {answer[1].decode()}")
        return answer[1]

    clocks = []
    for _ in range(CLOCK_QUESTIONS):
        asked = time.time_ns()
        theirs, answered = int(ask(say.CLOCK)), time.time_ns()
        clocks.append((answered - asked, theirs - (asked + answered) // 2))
    _, clock_offset_ns = min(clocks)  # the quickest answer says most
    return pickle.loads(ask(say.HELLO, pickle.dumps(hello))), clock_offset_ns


class Agent:
    """What :func:`run_agent` runs; ``Events`` of its host."""

    def __init__(
        self, setup: Setup, run: str, clock_offset_ns: int, connection: Connection
    ) -> None:
        self._connection = connection
        self._figures = Figures(setup, run, clock_offset_ns)
        self._host = Host(setup, self._figures.watched, self)
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._forwarding: dict[int, threading.Thread] = {}
        self._ended = threading.Event()

    def run(self) -> int:
        """Follow the head; returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        for target in (self._make_calls, self._send_figures):
            threading.Thread(target=target, name="SiPipeAgent", daemon=True).start()
        status, reason = 1, "its agent failed"
        try:
            while (message := self._connection.receive(None)) is not None:
                if message[0] == say.END:
                    reason = message[1].decode()
                    _print(f"the engine ended{': ' + reason if reason else ''}")
                    status = 1 if reason else 0
                    break
                self._take(*message)
        except PeerDiedError as error:
            _print(f"{error}; this host's stages end")
        except SystemExit:
            reason = "it was told to (SIGTERM, SIGINT, or the end of its Ray actor)"
            status = 143
        except Exception as error:
            reason = str(error)
            _print(f"this host's stages end: {reason}")
        finally:
            self._ended.set()
            self._host.expect_end()
            self._send(say.END, reason.encode())
            self._host.fail(RuntimeError("the engine ended"))
            self._host.close()
            self._connection.close()
            self._figures.close()
        return status

    def _take(self, kind: bytes, *parts: bytes) -> None:
        if kind == say.PUBLISH:
            self._host.publish(parts)
        elif kind == say.CALL:
            self._calls.put(pickle.loads(parts[0]))
        elif kind == say.ADMIT:
            self._host.admit(int(parts[0]), pickle.loads(parts[1]))
        elif kind == say.ASK:
            self._host.ask()

    def _on_signal(self, _number: int, _frame: Any) -> None:
        if not self._ended.is_set():
            raise SystemExit(143)

    def _send(self, *parts: bytes) -> None:
        with suppress(PeerDiedError):  # the main thread hears of it
            self._connection.send(*parts)

    # ---- what the host tells the engine ---------------------------------------------------------

    def heard(self, name: str, message: Any) -> None:
        self._send(say.HEARD, name.encode(), pickle.dumps(message))

    def failed(self, error: BaseException) -> None:
        self._send(say.FAILED, _pickled(error))

    def started_again(self, index: int, tokens: socket.socket, poison: Poison | None) -> None:
        # What the predecessor sent is on its way. The thread reads to the end of its socket, which
        # was the predecessor's alone and closed with it, and never waits for the network.
        # wait: none: its socket's only writer is dead; the end of that socket
        self._forwarding[index].join()
        self._send(say.SUCCESSOR, str(index).encode(), pickle.dumps(poison))
        self._forward(index, tokens)

    def turn(self) -> float:
        return LONGEST_SLEEP

    # ---- threads --------------------------------------------------------------------------------

    def _make_calls(self) -> None:
        while True:
            # wait: none, for the head's next call; a daemon, it ends with the process
            method, arguments = self._calls.get()
            try:
                result = getattr(self._host, method)(*arguments)
                if method == "start":
                    for index, tokens in enumerate(result):
                        self._forward(index, tokens)
                    result = None
            except BaseException as error:
                result = error
            self._send(say.DONE, _pickled(result))

    def _forward(self, index: int, tokens: socket.socket) -> None:
        thread = threading.Thread(target=self._send_tokens, args=(index, tokens), daemon=True)
        self._forwarding[index] = thread
        thread.start()

    def _send_tokens(self, index: int, tokens: socket.socket) -> None:
        name = str(index).encode()
        data = b"all"
        while data:
            try:
                # wait: none, while nothing is drawn; the sampler's death, which closes its end
                data = tokens.recv(CHUNK)
            except OSError:
                data = b""
            self._send(say.TOKENS, name, data, self._figures.figures_here())
        tokens.close()

    def _send_figures(self) -> None:
        sent = b""
        while not self._ended.wait(FIGURES_SECONDS):
            figures = self._figures.figures_here()
            if figures != sent:
                sent = figures
                self._send(say.FIGURES, figures)


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # an error of somebody else's
        return pickle.dumps(RuntimeError(str(value)))


def _own_settings(head: Setup, here: Setup) -> SiPipeConfig:
    """The head's settings, but for those that are each host's own."""
    own = {key: getattr(here.config, key) for key in OWN_SETTINGS}
    return msgspec.structs.replace(head.config, **own)


def _listed(ports: list[int]) -> str:
    return f"port{'s' * (len(ports) > 1)} {', '.join(map(str, ports))}"


def _print(line: str) -> None:
    print(f"sipipe: {line}", file=sys.stderr, flush=True)
