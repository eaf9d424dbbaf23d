"""The sampler processes of an engine, and the replacement of one that dies.

Who runs here
    The thread that starts their host. The events thread, which says that a sampler died and gives its
    place to the spare (:mod:`sipipe.engine.children.spare_sampler`). One thread for each death, which
    starts a successor where there is no spare, and has the engine admit it in the order of BIC-I.
Guarantees
    A successor draws again what its predecessor had not delivered: draws depend on (seed,
    position) and logits only, so the tokens are the same. A sampler that dies ``DEATHS`` times
    within ``DEATHS_WINDOW`` seconds is not replaced any more.
    A sampler that does nothing for ``STUCK_SECONDS`` while logits wait for it is killed; one that
    computes, after ``PATIENCE`` times its usual time (:meth:`_why_stuck`).
    A successor adds and draws what its predecessor left request by request, so that a request whose
    parameters end samplers is known by name. A request that ends ``STRIKES`` such samplers fails, and
    no other request with it. Meanwhile the stall clock stands still.
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
"""Deaths of one sampler within ``DEATHS_WINDOW`` that end the engine."""
DEATHS_WINDOW = 60.0
"""Seconds."""
STUCK_SECONDS = 5.0
"""Seconds for which a sampler may use no core while logits wait for it. They double with each time
that the same sampler was killed for it within ``STUCK_WINDOW``, at most ``STUCK_KILLS`` times."""
STUCK_WINDOW = 600.0
"""Seconds after which a kill for doing nothing is forgotten."""
STUCK_KILLS = 4
"""Kills for doing nothing that are remembered. After them a sampler has 80 s, more than
``DEATHS_WINDOW``, so these kills alone, as on an overloaded machine, never reach ``DEATHS``."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at samplers while one of them is behind."""
STRIKES = 2
"""Samplers that a request has to end before it fails: a sampler that ends by chance, just as it draws
for a request, is not that request's fault."""
BUSY_SECONDS = 15.0
"""Seconds of a core that a sampler may use for one iteration in any case."""
TRY_SECONDS = 4.0
"""Seconds of a core that a successor may use for one request in any case."""
PATIENCE = 1000.0
"""Multiple of the mean time that a sampler may use for an iteration, or a successor for a request. The
dearest honest row, with all its log-probabilities, takes 30 times the time of a greedy one."""
BUSY_PART = 0.25
"""Part of the stall timeout for which a sampler may be at one iteration, with a core or without: the
iteration is drawn by a successor before the engine takes it for a stall."""


@dataclass(slots=True)
class _Look:
    """Progress of a sampler that is behind, as it was last seen. Times are monotonic seconds."""

    place: tuple[int, int, int | None]
    """Process id, the use of BIC-L that the sampler is at, and the request that it tries alone."""
    moved: float
    """Time at which the sampler was first seen at ``place``."""
    moved_cpu: float
    """CPU seconds that the sampler had used at ``moved``."""
    cpu: float
    """CPU seconds that the sampler had used at the last look."""
    worked: float
    """Time of the last look at which ``cpu`` had grown."""


@dataclass
class Samplers:
    """The sampler processes of one host. They start at once and compile their kernels while the model
    loads."""

    _children: Children
    _settings: SamplerSettings
    dtype: str
    """Name of the logits' dtype, for which the kernels are compiled."""
    cores: Sequence[Sequence[int]]
    """CPUs that each process is bound to; an empty sequence leaves it unbound."""
    figures: Sequence[memoryview]
    """Blocks of the statistics page, one for each process."""
    events: Events
    stall_timeout: float
    """Seconds after which the engine takes an iteration for stalled."""

    def __post_init__(self) -> None:
        cores = self.cores
        self._deaths: list[deque[float]] = [deque(maxlen=DEATHS) for _ in cores]
        self._looks: dict[int, _Look] = {}
        """Last looks at the samplers that are behind, by index."""
        self._replacing: dict[int, threading.Thread] = {}
        """Threads that start, or have started, the last successor of a sampler, by index."""
        self._tries: dict[int, int] = {}
        """Handles of the requests that successors add or draw alone now, by index."""
        self._strikes: Counter[int | None] = Counter()
        """Samplers that have died of each such request, by its handle."""
        self._stuck: list[deque[float]] = [deque(maxlen=STUCK_KILLS) for _ in cores]
        """Times at which each sampler was killed because it did nothing."""
        self._killed: dict[int, subprocess.Popen[bytes]] = {}
        """Processes that were killed, whose end the events thread has yet to see."""
        self._channels: tuple[DispatchProducer, LogitsChannel] | None = None
        """BIC-I and BIC-L, from :meth:`open` to :meth:`let_go`."""
        self._looking = threading.Lock()  # wait: held for moments; nobody waits under it
        """Held while the events thread reads BIC-L, while a successor becomes a reader, and while
        :meth:`let_go` forgets the channels: whoever calls that removes their readers and closes BIC-L
        behind it."""
        self._over = False
        """True once samplers were let go. Invariant: set before they are asked to end, so a successor
        that this request has missed is started by a thread that sees the word."""
        self.names = [sampler_name(index) for index in range(len(cores))]
        self.spare = SpareSampler(self._children, self._start)
        started = [self._start(name) for name in self.names]
        self._started = [child for child, _ in started]
        self.sockets = [sock for _, sock in started]
        """Receiving ends of BIC-O, by index. Their receiver closes them."""

    def open(
        self, ring: DispatchProducer, logits: LogitsChannel, deadline: float, measure: int = 0
    ) -> dict[str, float]:
        """Tell the samplers where BIC-I and BIC-L are, and wait until all have opened them.

        With ``measure``, the rows of a microbatch, they also draw one of each mix of sampling
        parameters, all samplers at once. Returns the seconds that each mix took the slowest of them;
        without ``measure``, an empty dict.

        Raises WorkerDiedError: a sampler ended instead. StallError: ``deadline``
        (``time.monotonic()``) passed first."""
        self._channels = (ring, logits)
        rows = -(-measure // len(self._started))
        for index, child in enumerate(self._started):
            child.say(self._boot(index, measure=rows))
        ready = self._children.wait_ready(self.names, deadline)
        self.spare.want()
        # A successor of one that died meanwhile has measured nothing.
        costs = [reply.measured for reply in ready if reply.measured]
        if measure and not costs:
            raise WorkerDiedError("all samplers ended while they measured: see above")
        mixes = costs[0] if costs else ()
        return {mix: max(seconds[mix] for seconds in costs) for mix in mixes}

    def replace(self, name: str, reason: str) -> None:
        """Have a successor take the place of sampler ``name``, which died for ``reason``. It starts in a
        thread of its own; the events thread calls. Raises WorkerDiedError: the sampler died before it
        could draw, or keeps dying."""
        if self._over:
            return  # it died just before it was to end, and has nothing to draw
        if self._channels is None:
            raise WorkerDiedError(f"{name} ended while starting ({reason}): see its message above")
        self._forget(name)
        index = self.names.index(name)
        poison = self._count_death(index, reason)
        deaths = self._deaths[index]
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

    def _count_death(self, index: int, reason: str) -> Poison | None:
        """Put a death down to the request that sampler ``index`` tried alone, or else to the sampler.
        Returns the request if it has now ended ``STRIKES`` samplers."""
        deaths = self._deaths[index]
        handle = self._tries.pop(index, None)
        self._strikes[handle] += 1
        if handle is None or self._strikes[handle] > STRIKES:
            deaths.append(time.monotonic())
        elif self._strikes[handle] == STRIKES:
            if deaths:
                # The death before these was this request's doing, too: it was drawn among others
                # then, so nobody knew.
                deaths.pop()
            return handle, f"it ended every sampler that drew for it ({reason})"
        return None

    def heard(self, name: str, message: object) -> None:
        """Take a message of sampler ``name``; from the events thread."""
        match message:
            case Warm():
                self.spare.warm = True
            case Trying(handle=None):
                self._tries.pop(self.names.index(name), None)
            case Trying(handle=int(handle)):
                self._tries[self.names.index(name)] = handle

    def turn(self) -> float:
        """Kill the samplers that are stuck, and keep a spare; from the events thread. Returns the
        seconds to the next turn."""
        if self._channels is None:
            return STUCK_SECONDS
        return min(self.end_stuck(), self.spare.keep())

    def end_stuck(self) -> float:
        """Kill the samplers that are stuck. Returns the seconds to the next look."""
        with self._looking:
            uses = self._channels[1].behind() if self._channels is not None else {}
        now = time.monotonic()
        for index, name in enumerate(self.names):
            process = self._started[index].process
            if name not in uses or process.returncode is not None:
                self._looks.pop(index, None)
            elif self._killed.get(index) is process:
                continue  # the events thread has yet to see its end
            else:
                reason = self._why_stuck(index, process.pid, uses[name], now)
                if reason:
                    logger.warning("%s %s; it is killed", self._started[index], reason)
                    self._killed[index] = process
                    process.kill()
        return LOOK_SECONDS if uses else STUCK_SECONDS

    def _why_stuck(self, index: int, pid: int, use: int, now: float) -> str:
        """The reason to kill a sampler that is behind, as a predicate; empty: not now.

        Args:
            index: the sampler's.
            pid: its process.
            use: the use of BIC-L that it is at; negative while it has not opened the channel.
            now: ``time.monotonic()``.
        """
        try:
            cpu = sum(psutil.Process(pid).cpu_times())
        except psutil.NoSuchProcess:
            return ""
        place = (pid, use, self._tries.get(index))
        look = self._looks.get(index)
        if look is None or look.place != place:
            look = _Look(place=place, moved=now, moved_cpu=cpu, cpu=cpu, worked=now)
            self._looks[index] = look
        if look.cpu != cpu:
            look.cpu = cpu
            look.worked = now
        idle = now - look.worked
        recent = sum(now - killed < STUCK_WINDOW for killed in self._stuck[index])
        if idle > STUCK_SECONDS * 2**recent:
            self._stuck[index].append(now)
            return f"has done nothing for {idle:.3g} s with logits before it"
        # A sampler that has not opened the channel may still compile, for as long as that takes.
        if use < 0:
            return ""
        return self._why_late(index, seconds=now - look.moved, cpu=cpu - look.moved_cpu)

    def _why_late(self, index: int, *, seconds: float, cpu: float) -> str:
        """The reason to kill a sampler that has been at one place for ``seconds``, and used ``cpu``
        seconds of a core there; empty: not now."""
        tries = index in self._tries
        if tries:
            work = "request"
            late = cpu > max(TRY_SECONDS, PATIENCE * self._mean_seconds(Word.SEQUENCES))
        else:
            work = "iteration"
            late = seconds > BUSY_PART * self.stall_timeout
            late |= cpu > max(BUSY_SECONDS, PATIENCE * self._mean_seconds(Word.BATCHES))
        return f"has been at one {work} for {seconds:.3g} s ({cpu:.3g} s of a core)" if late else ""

    def _mean_seconds(self, word: Word) -> float:
        """Mean seconds that all samplers have taken so far for one unit of what ``word`` counts."""
        phases = [Word.PHASE_NS + phase for phase in COUNTED_PHASES["sampler"]]
        seconds: float = sum(block[phase] for block in self.figures for phase in phases) * 1e-9
        return seconds / max(1, sum(block[word] for block in self.figures))

    def let_go(self) -> None:
        """Forget the channels, and end the spare; nobody who dies from now on is replaced. The caller
        asks the samplers to end, and closes the channels."""
        with self._looking:
            self._over = True
            self._channels = None
        self.spare.close()

    def admit(self, index: int, snapshot: Snapshot) -> None:
        """Let the successor of sampler ``index`` begin with ``snapshot``, behind the message of BIC-I
        that was published last. The caller holds ``bus.order``, so nothing is published meanwhile."""
        with self._looking:
            if self._channels is None:
                return  # the samplers were let go meanwhile
            self._forget(self.names[index])
            for channel in self._channels:
                channel.add_reader(self.names[index])
            boot = self._boot(index, snapshot=snapshot)
        self._started[index].say(boot)

    def _forget(self, name: str) -> None:
        """Have no channel wait for the reader ``name`` any more."""
        for channel in self._channels or ():
            channel.remove_reader(name)

    def _start(self, name: str) -> Started:
        """Start a sampler process; returns it and the receiving end of its BIC-O."""
        receiver, sender = socket.socketpair()
        try:
            child = self._children.start(
                name,
                "sipipe.sampler",
                (self.dtype, name),
                ends=(sender,),
                environment={"NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        except BaseException:
            receiver.close()
            raise
        self._bind(child)
        return child, receiver

    def _bind(self, child: Child) -> None:
        """Bind a sampler to the cores of its place, and a spare to those of all samplers."""
        places = [
            cpus
            for cpus, name in zip(self.cores, self.names, strict=True)
            if child.name in (name, SPARE)
        ]
        if all(places):
            with suppress(OSError):  # it has ended, or the container has other CPUs by now
                os.sched_setaffinity(child.process.pid, {cpu for cpus in places for cpu in cpus})

    def _boot(
        self, index: int, *, measure: int = 0, snapshot: Snapshot | None = None
    ) -> SamplerBoot:
        """The record with which sampler ``index`` begins: first to draw ``measure`` rows, or in its
        predecessor's place with ``snapshot``."""
        assert self._channels is not None
        ring, logits = self._channels
        return SamplerBoot(
            index=index,
            settings=self._settings,
            bic_i=ring.endpoint,
            bic_l=logits.endpoint,
            measure=measure,
            snapshot=snapshot,
        )

    def _replace(
        self,
        index: int,
        poison: Poison | None,
        spare: Started | None,
        predecessor: threading.Thread | None,
    ) -> None:
        """Put ``spare`` or a new process in the place of sampler ``index``, and have the engine admit
        it. Each such thread runs it once, behind its ``predecessor`` for the same place."""
        try:
            if predecessor is not None:
                # In turn: a successor may die at once, and its thread would otherwise put the dead
                # process and its socket in this one's place.
                # wait: as long as that start and its `order` of BIC-I; its end
                predecessor.join()
                self._forget(self.names[index])
            if spare is None:
                child, tokens = self._start(self.names[index])
            else:
                child, tokens = spare
                self._bind(child)
            self._started[index] = child
            if self._over:
                tokens.close()
                self._children.end([child.name])
                return
            self.events.started_again(index, tokens, poison)
        except Exception as error:
            self.events.failed(error)
