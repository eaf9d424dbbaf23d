"""The sampler processes of an engine, and the replacement of one that dies.

Who runs here
    Whoever starts their host. The events thread says that one died, and gives its place to the
    spare (:mod:`sipipe.engine.children.spare_sampler`); a thread per death starts a successor where there is none,
    and has the engine admit it, in the order of BIC-I.
Guarantees
    A successor draws again what its predecessor had not delivered: draws depend on (seed,
    position) and logits only, so the tokens are the same. A sampler that dies ``DEATHS`` times
    within ``DEATHS_WINDOW`` seconds is not replaced any more.
    A sampler that does nothing for ``STUCK_SECONDS`` while logits wait for it is killed; one that
    computes, after ``PATIENCE`` times its usual time (:meth:`_why_stuck`).
    A successor adds and draws alone, one request after the other, what its predecessor left. A
    request that ends ``STRIKES`` of them, which have warmed up, fails alone, as all such do.
    Meanwhile the stall clock stands still.
    Publishing never waits for a dead sampler: both rings forget it before a successor, which needs
    the order that a publish holds, asks to be admitted.
Relies on
    The logits of an iteration stay in BIC-L until all who have rows in it have drawn:
    :meth:`Iterations.begin` publishes no iteration i + m before iteration i has left. Logits in which a
    sampler has no rows are not kept for its successor, which skips them.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from sipipe.engine.children.children import Child, Children
from sipipe.engine.children.events import Events, Poison
from sipipe.engine.children.spare_sampler import SpareSampler, Started
from sipipe.errors import WorkerDiedError
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.replies import Trying, Warm
from sipipe.messages.start_records import SPARE, SamplerBoot, SamplerSettings, sampler_name
from sipipe.messages.step import Snapshot
from sipipe.observe.live import Word
from sipipe.observe.phases import COUNTED_PHASES

logger = logging.getLogger(f"vllm.{__name__}")

DEATHS = 5
DEATHS_WINDOW = 60.0
STUCK_SECONDS = 5.0
"""Doubled for each such death of the same sampler in ``STUCK_WINDOW``, four of which are kept: five
are more than ``DEATHS_WINDOW``."""
STUCK_WINDOW = 600.0
LOOK_SECONDS = 1.0
STRIKES = 2
"""One that ends by chance, just as it tries a request, is not that request's fault."""
BUSY_SECONDS, TRY_SECONDS = 15.0, 4.0
"""Of a core: what a sampler may use for one iteration, and a successor for one request."""
PATIENCE = 1000.0
"""What all log-probabilities of a row cost, as a multiple of a greedy row, is 30."""
BUSY_PART = 0.25
"""Of the stall timeout: how long a sampler may compute for one iteration, with a core or without."""


@dataclass(slots=True)
class _Look:
    """How a sampler that is behind was found."""

    place: tuple[int, int, int | None]
    """Its process, the use of BIC-L that it is at, and the request that it tries alone."""
    moved: float
    """Since when it has been at that place, in monotonic seconds,"""
    used: float
    """and what CPU seconds it had used then."""
    cpu: float
    """What it has used now,"""
    worked: float
    """and since when no more."""


@dataclass
class Samplers:
    """The processes start at once and compile for logits of ``dtype`` while the model loads."""

    _children: Children
    _settings: SamplerSettings
    dtype: str
    cores: Sequence[Sequence[int]]
    """Of each process; empty: not bound."""
    figures: Sequence[memoryview]
    """Their blocks of the statistics page."""
    events: Events
    stall_timeout: float

    def __post_init__(self) -> None:
        cores = self.cores
        self._deaths: list[deque[float]] = [deque(maxlen=DEATHS) for _ in cores]
        self._looks: dict[int, _Look] = {}
        """Of samplers that are behind."""
        self._replacing: dict[int, threading.Thread] = {}
        """What starts, or has started, the successor of a sampler."""
        self._tries: dict[int, int] = {}
        """The request that a successor adds or draws alone now."""
        self._strikes: Counter[int | None] = Counter()
        """How many have died of each such request."""
        self._stuck: list[deque[float]] = [deque(maxlen=4) for _ in cores]
        """When one was killed that did nothing."""
        self._killed: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: tuple[DispatchProducer, LogitsChannel] | None = None
        self._looking = threading.Lock()  # wait: held for moments; nobody waits under it
        """Held while the events thread reads BIC-L, so that it is not closed just then."""
        self.names = [sampler_name(index) for index in range(len(cores))]
        self.spare = SpareSampler(self._children, self._start)
        started = [self._start(name) for name in self.names]
        self._started = [child for child, _ in started]
        self.sockets = [sock for _, sock in started]
        """The receiving ends of BIC-O, which are the receiver's to close."""

    def open(
        self, ring: DispatchProducer, logits: LogitsChannel, deadline: float, measure: int = 0
    ) -> dict[str, float]:
        """Tell all where their channels are, and wait until they have opened them. Returns, if
        ``measure`` is the size of a microbatch, the seconds in which all at once draw one, by mix.
        Raises WorkerDiedError: a sampler ended instead. StallError: ``deadline`` passed."""
        self._channels = ring, logits
        rows = -(-measure // len(self._started))
        for index, child in enumerate(self._started):
            child.say(self._boot(index, measure=rows))
        ready = self._children.wait_ready(self.names, deadline)
        self.spare.want()
        measured = [one.measured for one in ready if one.measured]  # a successor measures nothing
        if measure and not measured:
            raise WorkerDiedError("all samplers ended while they measured: see above")
        return {mix: max(one[mix] for one in measured) for mix in next(iter(measured), ())}

    def replace(self, name: str, reason: str) -> None:
        """Have a successor take the place, in a thread of its own; from the events thread. Raises
        WorkerDiedError: the sampler died before it could draw, or keeps dying."""
        if self._channels is None:
            raise WorkerDiedError(f"{name} ended while starting ({reason}): see its message above")
        self._forget(name)
        index = self.names.index(name)
        deaths, poison = self._deaths[index], None
        handle = self._tries.pop(index, None)
        self._strikes[handle] += 1
        if handle is None or self._strikes[handle] > STRIKES:
            deaths.append(time.monotonic())
        elif self._strikes[handle] == STRIKES:
            poison = handle, f"it ended every sampler that drew for it ({reason})"
            if deaths:
                deaths.pop()  # the first was its, too: among others it was not known
        if len(deaths) == DEATHS and deaths[-1] - deaths[0] < DEATHS_WINDOW:
            raise WorkerDiedError(
                f"{name} keeps dying ({reason}, the {DEATHS}th time within {DEATHS_WINDOW:g} s); "
                "the engine stops"
            )
        spare = self.spare.take(name)
        how = "starting it again" if spare is None else "the spare takes its place"
        logger.warning("%s died (%s); %s", name, reason, how)
        work = partial(self._replace, index, poison, spare, self._replacing.get(index))
        thread = threading.Thread(target=work, name=f"SiPipe-{name}", daemon=True)
        self._replacing[index] = thread
        thread.start()

    def heard(self, name: str, message: object) -> None:
        """A sampler said something; from the events thread."""
        match message:
            case Warm():
                self.spare.warm = True
            case Trying(handle=None):
                self._tries.pop(self.names.index(name), None)
            case Trying(handle=int(handle)):
                self._tries[self.names.index(name)] = handle

    def turn(self) -> float:
        """Kill who is stuck, keep a spare (events thread). Returns the seconds to the next turn."""
        if self._channels is None:
            return STUCK_SECONDS
        return min(self.end_stuck(), self.spare.keep())

    def end_stuck(self) -> float:
        """Kill who is stuck. Returns the seconds to the next look."""
        with self._looking:
            behind = self._channels[1].behind() if self._channels is not None else {}
        now = time.monotonic()
        for index, name in enumerate(self.names):
            process = self._started[index].process
            if name not in behind or process.returncode is not None:
                self._looks.pop(index, None)
            elif self._killed.get(index) is process:
                continue  # its end is not heard of yet
            elif why := self._why_stuck(index, process.pid, behind[name], now):
                logger.warning("%s %s; it is killed", self._started[index], why)
                self._killed[index] = process
                process.kill()
        return LOOK_SECONDS if behind else STUCK_SECONDS

    def _why_stuck(self, index: int, pid: int, use: int, now: float) -> str:
        """Why a sampler that is behind is to be killed; empty: not now."""
        try:
            cpu = sum(psutil.Process(pid).cpu_times())
        except psutil.NoSuchProcess:
            return ""
        place = pid, use, self._tries.get(index)
        look = self._looks.get(index)
        if look is None or look.place != place:
            look = self._looks[index] = _Look(place, now, cpu, cpu, now)
        if look.cpu != cpu:
            look.cpu, look.worked = cpu, now
        stuck = self._stuck[index]
        recent = sum(now - at < STUCK_WINDOW for at in stuck)
        if now - look.worked > STUCK_SECONDS * 2**recent:
            stuck.append(now)
            return f"has done nothing for {now - look.worked:.3g} s with logits before it"
        used, since, alone = cpu - look.used, now - look.moved, index in self._tries
        at, floor = ("request", TRY_SECONDS) if alone else ("iteration", BUSY_SECONDS)
        late = not alone and since > BUSY_PART * self.stall_timeout
        late = late or used > max(floor, PATIENCE * self._mean(alone))
        late = late and use >= 0  # attached, so compiled too
        return f"has been at one {at} for {since:.3g} s ({used:.3g} s of a core)" if late else ""

    def _mean(self, alone: bool) -> float:
        """Seconds that the samplers have taken so far for one sequence, or for an iteration."""
        spent = [Word.PHASE_NS + phase for phase in COUNTED_PHASES["sampler"]]
        seconds: float = sum(block[word] for block in self.figures for word in spent) * 1e-9
        word = Word.SEQUENCES if alone else Word.BATCHES
        return seconds / max(1, sum(block[word] for block in self.figures))

    def let_go(self) -> None:
        """Let go of the channels, which are closed now: all samplers end."""
        with self._looking:
            self._channels = None
        self.spare.close()

    def admit(self, index: int, snapshot: Snapshot) -> None:
        """Let the successor of sampler ``index`` begin, with all that it needs, behind the message
        of BIC-I that was published last; nothing is published meanwhile."""
        if self._channels is None:
            return  # the samplers were let go meanwhile
        ring, logits = self._channels
        self._forget(self.names[index])
        ring.add_reader(self.names[index])
        logits.add_reader(self.names[index])
        self._started[index].say(self._boot(index, snapshot=snapshot))

    def _forget(self, name: str) -> None:
        """Nobody waits for this reader any more."""
        for channel in self._channels or ():
            channel.remove_reader(name)

    def _start(self, name: str) -> Started:
        ours, theirs = socket.socketpair()
        threads = {"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        child = self._children.start(
            name, "sipipe.sampler", (self.dtype, name), ends=(theirs,), environment=threads
        )
        self._bind(child)
        return child, ours

    def _bind(self, child: Child) -> None:
        """To the cores of its place; a spare to those of all."""
        every = [self.cores[i] for i, name in enumerate(self.names) if child.name in (name, SPARE)]
        if all(every):
            with suppress(OSError):  # it has ended, or the container has other CPUs by now
                os.sched_setaffinity(child.process.pid, {cpu for cpus in every for cpu in cpus})

    def _boot(self, index: int, **more: Any) -> SamplerBoot:
        assert self._channels is not None
        ring, logits = self._channels
        return SamplerBoot(
            index=index, settings=self._settings, bic_i=ring.endpoint, bic_l=logits.endpoint, **more
        )

    def _replace(
        self,
        index: int,
        poison: Poison | None,
        spare: Started | None,
        earlier: threading.Thread | None,
    ) -> None:
        try:
            if earlier is not None:
                # One after the other: the place and the socket of one that died at once would
                # otherwise be taken up behind its successor's.
                # wait: as long as that start and its `order` of BIC-I; its end
                earlier.join()
                self._forget(self.names[index])
            if spare is not None:
                self._bind(spare[0])
            self._started[index], tokens = spare or self._start(self.names[index])
            self.events.started_again(index, tokens, poison)
        except Exception as error:
            self.events.failed(error)
