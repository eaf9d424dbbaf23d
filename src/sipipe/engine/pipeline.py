"""The pipeline of one engine: its hosts, its calls and iterations, and their end.

Who runs here
    vLLM's engine thread: everything that is called from :class:`sipipe.engine.executor.Executor`.
    The events thread (:mod:`sipipe.engine.children.children`): messages and deaths of children, the stall
    bound; for each other host a thread that does the same (:mod:`sipipe.engine.hosts.remote`). The
    gather thread (:mod:`sipipe.engine.iteration.resolve`).
Guarantees
    Every future handed out is resolved: with its result or with the failure that stopped the
    engine. A dead worker or a lost host stops the engine at once; a dead sampler is replaced.
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from sipipe.engine.children.events import Poison
from sipipe.engine.hosts.local import LocalHost
from sipipe.engine.hosts.remote import RemoteHost
from sipipe.engine.iteration.balance import Balancer
from sipipe.engine.iteration.bus import Bus, Host
from sipipe.engine.iteration.calls import Calls
from sipipe.engine.iteration.dispatch import Dispatcher
from sipipe.engine.iteration.head_drafts import HeadDrafts
from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.observed_scheduler import observed
from sipipe.engine.iteration.requests import RequestTracker
from sipipe.engine.iteration.resolve import Resolver
from sipipe.engine.iteration.stall import StallClock, StallWatch
from sipipe.engine.iteration.telemetry import Telemetry
from sipipe.engine.pipeline_opener import PipelineOpener, Running
from sipipe.engine.setup.draft_head import head_of
from sipipe.engine.setup.record import Setup
from sipipe.ipc.gather import GatherReceiver
from sipipe.messages.drafts import Drafted
from sipipe.messages.hosts import WaitLoaded
from sipipe.messages.params import derive_seed
from sipipe.messages.replies import IterationReport, KVReport, Replacing, Reply, Status, Trying
from sipipe.messages.stage_place import StagePlace
from sipipe.messages.step import Snapshot
from sipipe.observe.live import Word


class Pipeline:
    """The pipeline of one engine, as the module's text describes. It also takes the events of its
    hosts (:class:`sipipe.engine.children.events.Events`).

    Args:
        setup: what was decided for the engine.
        remotes: the other hosts, which have met this one.
        fail: called with what stops the engine, from any thread.

    The constructor has no effect that :meth:`close` does not undo. Call that whatever happens.
    """

    def __init__(
        self, setup: Setup, remotes: Sequence[RemoteHost], fail: Callable[[BaseException], None]
    ) -> None:
        self._setup = setup
        self.failed = fail
        self._closing = ExitStack()
        for remote in remotes:
            self._closing.callback(remote.close)
        self._samplers = len(setup.cores.samplers) + sum(remote.samplers for remote in remotes)
        self.telemetry = Telemetry(setup, self._samplers)
        self._closing.callback(self.telemetry.close)
        self._clock = StallClock()
        self.iterations = Iterations(
            setup.slots, setup.logits_rows, self._clock.now, setup.kv_movers
        )
        self._remotes = remotes
        self._host = LocalHost(setup, self.telemetry.watched, self)
        # Far hosts come first, since a message takes longer to reach them.
        self._hosts: list[Host] = [*remotes, self._host]
        self._last: Host = remotes[-1] if remotes else self._host
        """The last stage's host, which has the samplers."""
        workers = _worker_names(setup)
        self._bus = Bus(self._hosts)
        self.calls = Calls(self._bus, workers, self._clock.now)
        self._resolving = [
            self.iterations.fail,
            *(host.fail for host in self._hosts),
            self.calls.fail,
        ]
        """Functions that resolve everything that is out with an error."""
        self._stall = StallWatch(
            iterations=self.iterations,
            calls=self.calls,
            workers=workers,
            ask=self._ask,
            clock=self._clock,
            timeout=setup.config.stall_timeout,
            fail=self.failed,
            show=partial(self.telemetry.live.set, Word.STALLED),
        )
        self._tracker = RequestTracker(
            engine_seed=_engine_seed(setup),
            balancer=Balancer(max(1, self._samplers), vocab_size=setup.vocab_size),
        )
        self._head_drafts: HeadDrafts | None = None
        if head_of(setup.vllm_config) is not None:
            self._head_drafts = HeadDrafts(self._tracker, self._last.draft)
            self._resolving.append(self._head_drafts.fail)
        self._loaded = False

    def load(self) -> None:
        """Start all processes; return when every worker has loaded its layers, within the start
        timeout. Raises what :meth:`.Workers.wait_loaded` does."""
        for remote in self._remotes:
            remote.begin(self, self.telemetry, self._samplers)
        self._closing.callback(self._host.close)
        tokens = [end for host in self._hosts for end in host.start()]
        self._gather = GatherReceiver(tokens)
        self._closing.callback(self._gather.close)
        for host in self._hosts:
            host.do(WaitLoaded())
        self._loaded = True

    def open(self) -> Running:
        """Make the channels between the processes; iterations can be published from now on. Raises
        StallError: not within the start timeout."""
        addresses = {remote.host_stages[0]: remote.address for remote in self._remotes}
        opener = PipelineOpener(
            setup=self._setup,
            samplers=self._samplers,
            calls=self.calls,
            last=self._last,
            addresses=addresses,
        )
        running = opener.open()
        self._tracker.draws = running.draws
        self.dispatcher = Dispatcher(
            bus=self._bus,
            iterations=self.iterations,
            tracker=self._tracker,
            gather=self._gather,
            telemetry=self.telemetry,
            empty=bool(self._setup.kv_movers),
            head_drafts=self._head_drafts,
        )
        self.resolver = Resolver(
            iterations=self.iterations,
            tracker=self._tracker,
            gather=self._gather,
            telemetry=self.telemetry,
            publish_due=partial(self.dispatcher.publish_due, wait=False),
            fail=self.failed,
            head_drafts=self._head_drafts,
        )
        self._closing.callback(self.resolver.close)
        self.telemetry.ready(running.setup)
        return running

    def _ask(self) -> None:
        """Ask all workers what they do."""
        for host in self._hosts:
            host.ask()

    def observed(self, scheduler: type) -> type:
        """A subclass of the engine's ``scheduler`` that shares its records with this pipeline."""
        return observed(
            scheduler,
            iterations=self.iterations,
            telemetry=self.telemetry,
            tracker=self._tracker,
            publish_due=self.dispatcher.publish_due,
            rows=self._setup.rows if self._setup.drafts else 0,
            head_drafts=self._head_drafts,
        )

    def fail(self, error: BaseException) -> None:
        """Resolve everything that is out with ``error``, and end all processes."""
        for resolve in self._resolving:
            resolve(error)
        for host in self._hosts:
            host.expect_end()
        # Not only in `close`: a thread that publishes may wait for a reader that hangs, and this ends
        # its wait.
        for host in self._hosts:
            host.say_end(str(error))

    def close(self) -> None:
        """End all processes and remove every channel."""
        for host in self._hosts:
            host.say_end("")
        self.fail(RuntimeError("shut down"))
        self._closing.close()

    # ---- events of hosts: the events thread, and a thread for each other host --------------------

    def heard(self, name: str, message: Any) -> None:
        """Hand a message of the child ``name`` to whoever waits for it."""
        match message:
            case Reply():
                self.calls.reply(name, message)
            case IterationReport():
                self.resolver.report(message)
            case Drafted() if self._head_drafts is not None:
                self._head_drafts.came(message)
            case KVReport():
                self.resolver.moved(message)
            case Status():
                self._stall.heard(name, message)
            case Replacing() | Trying(handle=int()):
                # It has a bound of its own: a dead sampler is replaced, and one that hangs at a request
                # is killed.
                self._clock.stop(name, self._setup.config.start_timeout)
            case Trying():
                self._clock.go_on(name)
            case Exception() if not self._loaded:
                self.failed(message)
            case Exception():
                kind = type(message).__name__
                self.failed(RuntimeError(f"worker {name} failed: {kind}: {message}"))
            case _:
                raise AssertionError(f"{name} sent {message!r}")

    def started_again(self, index: int, tokens: socket.socket, poison: Poison | None) -> None:
        """Admit the successor of sampler ``index``, whose tokens come by ``tokens``. It gets the
        requests and the iterations that are not drawn yet, and does not draw for the request of
        ``poison``, if there is one."""
        self._gather.replace(index, tokens)
        # Nothing is published meanwhile: the snapshot is of one place in BIC-I's order.
        with self._bus.order:
            if poison is not None:
                self._tracker.condemn(*poison)
            undrawn = self.iterations.undrawn(index)
            steps = [iteration.work.step for iteration in undrawn]
            grammars = [
                iteration.on_bus.grammar
                for iteration in undrawn
                if iteration.on_bus.grammar is not None
            ]
            self._last.admit(index, Snapshot(self._tracker.added_of(index), steps, grammars))
        self.telemetry.live.add(Word.RESTARTS)

    def turn(self) -> float:
        return self._stall.turn()


def _worker_names(setup: Setup) -> list[str]:
    """Names of all workers of the engine, by stage and rank."""
    return [
        StagePlace(stage=stage, stages=setup.stages, tp_rank=rank, tp_size=setup.ranks).name
        for stage in range(setup.stages)
        for rank in range(setup.ranks)
    ]


def _engine_seed(setup: Setup) -> int:
    """The seed of requests that have none. Each replica has its own, or two would draw the same for the
    same arrival."""
    seed = setup.vllm_config.model_config.seed or 0
    replica = setup.vllm_config.parallel_config.data_parallel_index
    return derive_seed(seed, f"replica {replica}") if replica else seed
