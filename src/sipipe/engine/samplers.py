"""The sampler processes of an engine, and the replacement of one that dies.

Who runs here
    Whoever starts their host. The events thread says that one died; a thread per death starts the
    successor, which the engine admits, in the order of BIC-I.
Guarantees
    A successor draws again what its predecessor had not delivered: draws depend on (seed,
    position) and logits only, so the tokens are the same. A sampler that dies ``DEATHS`` times
    within ``DEATHS_WINDOW`` seconds is not replaced any more.
    A sampler that does nothing for ``STUCK_SECONDS`` while logits wait for it, because it is
    stopped or hangs, is killed, and so replaced; one that computes, after a part of the stall
    timeout (:data:`BUSY_PART`) without getting on.
    A successor adds and draws alone, one request after the other, what its predecessor left. A
    request that ends ``STRIKES`` successors while they try it fails, and no other with it; such
    deaths are not counted among the ``DEATHS``.
    Publishing never waits for a dead sampler: both rings forget it before a successor asks to be
    admitted, for which it needs the order that a publish which waits for the same sampler holds.
Relies on
    The logits of an iteration stay in BIC-L until all who have rows in it have drawn: vLLM's batch
    queue does not publish iteration i + m before iteration i has been resolved. Logits in which a
    sampler has no rows are not kept for its successor, which skips them.
"""

import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from sipipe.engine.children import Child, Children
from sipipe.errors import WorkerDiedError
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.boots import SamplerBoot, SamplerSettings, sampler_name
from sipipe.messages.replies import Trying
from sipipe.messages.step import Snapshot

logger = logging.getLogger(f"vllm.{__name__}")

DEATHS = 5
DEATHS_WINDOW = 60.0
STUCK_SECONDS = 5.0
"""Doubled each time for the same sampler: five such deaths are more than ``DEATHS_WINDOW``."""
LOOK_SECONDS = 1.0
STRIKES = 2
"""One that ends by chance, just as it tries a request, is not that request's fault."""
BUSY_PART, TRY_PART = 0.25, 0.1
"""How long a sampler may compute for one iteration, and a successor for one request: parts of the
stall timeout, within which a request that hangs its samplers has failed."""

Poison = tuple[int, str]
"""Handle of a request that no sampler survives, and what the client is told."""


@dataclass(slots=True)
class _Look:
    """How a sampler that is behind was found."""

    place: tuple[int, int]
    """Its process, and the use of BIC-L that it is at."""
    cpu: float
    """CPU seconds that it has used."""
    moved: float
    """Since when it has been at that place, in monotonic seconds,"""
    worked: float
    """and since when it has used no CPU."""


class Succession(Protocol):
    """Who is told of a sampler that takes another's place."""

    def started_again(self, index: int, tokens: socket.socket, poison: Poison | None) -> None:
        """Sampler ``index`` has a successor, which sends on ``tokens`` and waits to be admitted;
        it must not be asked for ``poison``."""

    def failed(self, error: BaseException) -> None:
        """There is none; the engine cannot go on."""


class Samplers:
    """One process for each entry of ``cores``, bound to those cores (empty: not bound).

    The processes start at once and compile for logits of ``dtype`` while the model loads.
    """

    def __init__(
        self,
        children: Children,
        settings: SamplerSettings,
        *,
        dtype: str,
        cores: Sequence[Sequence[int]],
        succession: Succession,
        stall_timeout: float,
    ) -> None:
        self._children = children
        self._settings = settings
        self._dtype = dtype
        self._cores = cores
        self._succession = succession
        self._deaths: list[deque[float]] = [deque(maxlen=DEATHS) for _ in cores]
        self._stall_timeout = stall_timeout
        self._looks: dict[int, _Look] = {}
        """Of samplers that are behind."""
        self._replacing: dict[int, threading.Thread] = {}
        """What starts, or has started, the successor of a sampler."""
        self._tries: dict[int, tuple[int, float]] = {}
        """The request that a successor adds or draws alone now, and since when."""
        self._strikes: Counter[int] = Counter()
        """How many have died of each such request."""
        self._patience = [STUCK_SECONDS] * len(cores)
        self._channels: tuple[DispatchProducer, LogitsChannel] | None = None
        self._looking = threading.Lock()  # wait: held for moments; nobody waits under it
        """Held while the events thread reads BIC-L, so that it is not closed just then."""
        self.names = [sampler_name(index) for index in range(len(cores))]
        """As readers of BIC-I and BIC-L."""
        started = [self._start(index) for index in range(len(cores))]
        self._started = [child for child, _ in started]
        self.sockets = [sock for _, sock in started]
        """The receiving ends of BIC-O, which are the receiver's to close."""

    def open(
        self, ring: DispatchProducer, logits: LogitsChannel, deadline: float, measure: int = 0
    ) -> dict[str, float]:
        """Tell all where their channels are, and wait until they have opened them.

        Returns, if ``measure`` is the size of a microbatch, the seconds in which all of them at
        once draw one, by mix.

        Raises:
            WorkerDiedError: a sampler ended instead. StallError: ``deadline`` passed.
        """
        self._channels = ring, logits
        rows = -(-measure // len(self._started))
        for index, child in enumerate(self._started):
            child.say(self._boot(index, measure=rows))
        ready = self._children.wait_ready(self.names, deadline)
        return {mix: max(one.measured[mix] for one in ready) for mix in ready[0].measured}

    def replace(self, name: str, reason: str) -> None:
        """Start a successor, in a thread of its own; from the events thread.

        Raises:
            WorkerDiedError: the sampler died before it could draw, or keeps dying.
        """
        if self._channels is None:
            raise WorkerDiedError(f"{name} ended while starting ({reason}): see its message above")
        self._forget(name)
        index = self.names.index(name)
        deaths, poison = self._deaths[index], None
        if index in self._tries:
            handle, _ = self._tries.pop(index)
            self._strikes[handle] += 1
            if self._strikes[handle] == STRIKES:
                poison = handle, f"it ended every sampler that drew for it ({reason})"
        else:
            deaths.append(time.monotonic())
        if len(deaths) == DEATHS and deaths[-1] - deaths[0] < DEATHS_WINDOW:
            raise WorkerDiedError(
                f"{name} keeps dying ({reason}, the {DEATHS}th time within {DEATHS_WINDOW:g} s); "
                "the engine stops"
            )
        logger.warning("%s died (%s); starting it again", name, reason)
        earlier = self._replacing.get(index)
        self._replacing[index] = replacing = threading.Thread(
            target=self._replace, args=(index, poison, earlier), name=f"SiPipe-{name}", daemon=True
        )
        replacing.start()

    def tries(self, name: str, message: Trying) -> None:
        """A successor says what it does; from the events thread."""
        index = self.names.index(name)
        if message.handle is None:
            self._tries.pop(index, None)
        else:
            self._tries[index] = message.handle, time.monotonic()

    def end_stuck(self) -> float:
        """Kill who is stuck; from the events thread. Returns the seconds to the next look."""
        with self._looking:
            behind = self._channels[1].behind() if self._channels is not None else {}
        now = time.monotonic()
        for index, name in enumerate(self.names):
            process = self._started[index].process
            if name not in behind or process.returncode is not None:
                self._looks.pop(index, None)
            elif why := self._stuck(index, process.pid, behind[name], now):
                logger.warning("%s %s; it is killed", self._started[index], why)
                self._looks.pop(index, None)
                process.kill()
        return LOOK_SECONDS if behind else STUCK_SECONDS

    def _stuck(self, index: int, pid: int, use: int, now: float) -> str:
        """Why a sampler that is behind is to be killed; empty: not now."""
        try:
            cpu = sum(psutil.Process(pid).cpu_times())
        except psutil.NoSuchProcess:
            return ""
        look = self._looks.setdefault(index, _Look((pid, use), cpu, now, now))
        if look.place != (pid, use):
            look = self._looks[index] = _Look((pid, use), cpu, now, now)
        if look.cpu != cpu:
            look.cpu, look.worked = cpu, now
        if now - look.worked > self._patience[index]:
            self._patience[index] *= 2
            return f"has done nothing for {now - look.worked:.3g} s with logits before it"
        since, part, at = look.moved, BUSY_PART, "one iteration"
        if index in self._tries:
            since, part, at = self._tries[index][1], TRY_PART, "one request"
        late = use >= 0 and now - since > part * self._stall_timeout  # attached, so compiled too
        return f"has been at {at} for {now - since:.3g} s" if late else ""

    def let_go(self) -> None:
        """Let go of the channels, which are closed now: all samplers end."""
        with self._looking:
            self._channels = None

    def admit(self, index: int, snapshot: Snapshot) -> None:
        """Let the successor of sampler ``index`` begin, with all that it needs, behind the message
        of BIC-I that was published last; nothing is published meanwhile."""
        assert self._channels is not None
        ring, logits = self._channels
        self._forget(self.names[index])
        ring.add_reader(self.names[index])
        logits.add_reader(self.names[index])
        self._started[index].say(self._boot(index, snapshot=snapshot))

    def _forget(self, name: str) -> None:
        """Nobody waits for this reader any more."""
        for channel in self._channels or ():
            channel.remove_reader(name)

    def _start(self, index: int) -> tuple[Child, socket.socket]:
        ours, theirs = socket.socketpair()
        child = self._children.start(
            sampler_name(index),
            "sipipe.sampler",
            (self._dtype,),
            ends=(theirs,),
            environment={"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        if self._cores[index]:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(child.process.pid, self._cores[index])
        return child, ours

    def _boot(self, index: int, **more: Any) -> SamplerBoot:
        assert self._channels is not None
        ring, logits = self._channels
        return SamplerBoot(
            index=index,
            settings=self._settings,
            bic_i=ring.endpoint,
            bic_l=logits.endpoint,
            **more,
        )

    def _replace(self, index: int, poison: Poison | None, earlier: threading.Thread | None) -> None:
        try:
            if earlier is not None:
                # One after the other: the place and the socket of one that died at once would
                # otherwise be taken up behind its successor's.
                # wait: as long as that start and its `order` of BIC-I; its end
                earlier.join()
                self._forget(self.names[index])
            self._started[index], tokens = self._start(index)
            self._succession.started_again(index, tokens, poison)
        except Exception as error:
            self._succession.failed(error)
