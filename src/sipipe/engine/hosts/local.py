"""One host's part of an engine: its workers and samplers, its ring of BIC-I, its BIC-L.

Who runs here
    In the executor's process on the main host, in a host agent elsewhere: the thread that starts and
    ends it, the publisher of BIC-I, and the events thread of
    :mod:`sipipe.engine.children.children`.
Guarantees
    ``events`` are told what happens to a child, on whatever host they are. Logits and shared memory
    stay on this host: between hosts there are only the messages of :mod:`sipipe.messages.hosts` and
    links.
"""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from sipipe.core_binding import running_on
from sipipe.engine.children.children import Child, Children
from sipipe.engine.children.events import Events
from sipipe.engine.children.samplers import Samplers
from sipipe.engine.children.workers import Workers
from sipipe.engine.iteration.bus import ENTRY_BYTES, ring_entries
from sipipe.engine.setup.memory_budget import logits_entries
from sipipe.engine.setup.record import Setup
from sipipe.engine.setup.speculative_config import proposing
from sipipe.errors import WorkerDiedError
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel, LogitsEndpoint
from sipipe.messages.calls import Request
from sipipe.messages.hosts import EndSamplers, MakeLogits, OpenSamplers, WaitLoaded
from sipipe.messages.logits import LogitsShape
from sipipe.messages.replies import ASK_STATUS, Replacing, Warm
from sipipe.messages.start_records import SPARE, SamplerSettings, Watched
from sipipe.messages.step import Snapshot
from sipipe.observe.live import LivePage


class LocalHost:
    """The part of an engine on this machine: a :class:`.Host` whose methods act at once."""

    def __init__(self, setup: Setup, watched: Watched, events: Events) -> None:
        self._setup = setup
        self._watched = watched
        self._events = events
        self._closing = ExitStack()
        self._children = Children()
        self._end_speaking: Callable[[], None] = lambda: None
        """Closes the ring of BIC-I, once there is one."""
        self._loaded = False
        """True once all workers have loaded the model."""

    def start(self) -> list[socket.socket]:
        setup = self._setup
        self._closing.callback(self._children.close)
        self._workers = Workers(self._children, setup, self._watched)
        self._closing.callback(self._workers.remove_rendezvous)
        assert self._watched.live is not None
        page = LivePage.attach(self._watched.live)
        self._closing.callback(page.close)
        self._samplers = Samplers(
            self._children,
            _sampler_settings(setup, self._watched),
            dtype=setup.dtype,
            cores=setup.cores.samplers,
            figures=[page.block(("sampler", i, 0)) for i in range(len(setup.cores.samplers))],
            events=self._events,
            stall_timeout=setup.config.stall_timeout,
        )
        self._closing.callback(self._samplers.spare.close)
        self._ring = DispatchProducer(
            "bic-i",
            entries=ring_entries(setup.slots),
            entry_bytes=ENTRY_BYTES,
            readers=self._workers.names + self._samplers.names,
        )
        self._end_speaking = self._ring.close
        self._closing.callback(self._ring.close)
        self._children.watch(
            heard=self._heard, died=self._died, turn=self._turn, failed=self._events.failed
        )
        return self._samplers.sockets

    def do(self, request: Request[Any]) -> Any:
        deadline = time.monotonic() + self._setup.config.start_timeout
        match request:
            case WaitLoaded():
                self._workers.wait_loaded(self._ring.endpoint, deadline)
                self._loaded = True
                return None
            case MakeLogits(shape):
                return self._make_logits(shape)
            case OpenSamplers():
                measure = self._setup.measured_rows if self._setup.measures else 0
                return self._samplers.open(self._ring, self._logits, deadline, measure)
            case EndSamplers():
                self._end_samplers()
                return None
        raise AssertionError(f"no host does {request}")

    def _make_logits(self, shape: LogitsShape) -> LogitsEndpoint:
        """Make BIC-L and return its endpoint."""
        setup = self._setup
        # On the last stage's cores, whose NUMA node the memory of the channel is then on.
        with running_on([cpu for cpus in setup.cores.workers[-1] for cpu in cpus]):
            self._logits = LogitsChannel(
                "bic-l",
                shape,
                rows=setup.logits_rows,
                entries=logits_entries(setup.slots),
                readers=self._samplers.names,
            )
        self._closing.callback(self._logits.close)
        return self._logits.endpoint

    def _end_samplers(self) -> None:
        """End all samplers and BIC-L, since the last stage draws on its device."""
        names = self._samplers.names
        self._samplers.let_go()  # first: the successor of one that has just died is none of `names`
        self._children.end(names)
        for name in names:
            self._ring.remove_reader(name)
        self._logits.close()

    def publish(self, message: Sequence[Any]) -> None:
        self._ring.publish(message, self._setup.config.stall_timeout)

    def draft(self, message: bytes) -> None:
        for worker in self._workers.all[-self._setup.ranks :]:
            worker.say(message)

    def admit(self, index: int, snapshot: Snapshot) -> None:
        self._samplers.admit(index, snapshot)

    def ask(self) -> None:
        for worker in self._workers.all:
            worker.say(ASK_STATUS)

    def fail(self, error: BaseException) -> None:
        self._children.fail(error)

    def expect_end(self) -> None:
        self._children.expect_end()

    def say_end(self, reason: str) -> None:  # noqa: ARG002 - for hosts with a log of their own
        # Children that wait for nothing but BIC-I end in good order.
        self._end_speaking()

    def close(self) -> None:
        self.expect_end()
        self._closing.close()

    # ---- the events thread --------------------------------------------------------------------

    def _heard(self, child: Child, message: Any) -> None:
        self._samplers.heard(child.name, message)
        if not isinstance(message, Warm):
            self._events.heard(child.name, message)

    def _turn(self) -> float:
        return min(self._events.turn(), self._samplers.turn())

    def _died(self, child: Child, how: str) -> None:
        if child.name == SPARE:
            self._samplers.spare.ended(how)
            return
        if child.name not in self._samplers.names:
            end = "died" if self._loaded else "ended while starting (see its log lines above)"
            worker = f"stage worker {child}{self._setup.host_suffix()}"
            self._events.failed(WorkerDiedError(f"{worker} {end}, {how}; the engine stops"))
            return
        try:
            self._events.heard(child.name, Replacing())
            self._samplers.replace(child.name, how)
        except WorkerDiedError as error:
            self._events.failed(error)


def _sampler_settings(setup: Setup, watched: Watched) -> SamplerSettings:
    """The settings that all samplers of this host have in common."""
    reasoning = setup.vllm_config.reasoning_config
    thinking: tuple[list[int], list[int], list[int]] = ([], [], [])
    if reasoning is not None and reasoning.enabled:
        thinking = (
            reasoning.reasoning_start_token_ids or [],
            reasoning.reasoning_end_token_ids or [],
            reasoning.natural_reasoning_end_token_ids or [],
        )
    return SamplerSettings(
        vocab_size=setup.vocab_size,
        logprobs_mode=setup.vllm_config.model_config.logprobs_mode,
        reasoning=thinking,
        speculation=proposing(setup.vllm_config),
        watched=watched,
    )
