"""What one engine drives: its processes, its channels, its calls and iterations, and their end.

Who runs here
    vLLM's engine thread: everything that is called from :class:`sipipe.engine.executor.Executor`.
    The events thread (:mod:`sipipe.engine.children`): messages and deaths of children, the stall
    bound. The gather thread (:mod:`sipipe.engine.resolve`), on SiPipe's path.
Guarantees
    Every future handed out is resolved: with its result or with the failure that stopped the
    engine. A dead worker stops the engine at once; a dead sampler is replaced.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from vllm.platforms import current_platform

from sipipe.engine.balance import Balancer
from sipipe.engine.bus import Bus
from sipipe.engine.children import Child, Children
from sipipe.engine.dispatch import Dispatcher
from sipipe.engine.iterations import Iterations
from sipipe.engine.memory_budget import logits_entries
from sipipe.engine.requests import RequestTracker
from sipipe.engine.resolve import Resolver
from sipipe.engine.rpc import Calls
from sipipe.engine.samplers import Samplers
from sipipe.engine.scheduling.observed_scheduler import observed
from sipipe.engine.setup import Setup
from sipipe.engine.stall import StallWatch
from sipipe.engine.telemetry import Telemetry
from sipipe.engine.workers import Workers
from sipipe.errors import WorkerDiedError
from sipipe.ipc.link.endpoint import create_link
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.boots import SamplerSettings, StageDescription, Watched
from sipipe.messages.link import LinkEndpoint
from sipipe.messages.replies import IterationReport, Reply, Status
from sipipe.messages.step import Snapshot
from sipipe.observe.live import Word


class Pipeline:
    """See the module's text. ``fail`` is told what stops the engine, from any thread.

    Made without side effects that :meth:`close` does not undo; call it whatever happens.
    """

    def __init__(self, setup: Setup, fail: Callable[[BaseException], None]) -> None:
        self._setup = setup
        self._fail = fail
        self._closing = ExitStack()
        self.telemetry = Telemetry(setup)
        self._closing.callback(self.telemetry.close)
        self.iterations = Iterations(setup.slots)
        self._children = Children()
        self._resolving = [self._children.fail, self.iterations.fail]
        self._samplers: Samplers | None = None
        self._loaded = False

    def load(self) -> None:
        """Start all processes; return when every worker has loaded its layers.

        Raises:
            Exception: what the first worker raised that failed.
            WorkerDiedError: a process ended. StallError: not within the start timeout.
        """
        setup = self._setup
        deadline = time.monotonic() + setup.config.start_timeout
        self._closing.callback(self._children.close)
        self._workers = Workers(self._children, setup, self.telemetry.watched)
        self._closing.callback(self._workers.remove_rendezvous)
        if setup.samplers:
            self._samplers = Samplers(
                self._children,
                _sampler_settings(setup, self.telemetry.watched),
                dtype=setup.dtype,
                cores=setup.cores.samplers,
                fail=self._fail,
            )
            self._closing.callback(self._samplers.close)
        self._bus = Bus(
            self._workers.names + (self._samplers.names if self._samplers is not None else []),
            slots=setup.slots,
            stall_timeout=setup.config.stall_timeout,
            directory=setup.config.shm_dir,
        )
        self._closing.callback(self._bus.close)
        self.calls = Calls(self._bus, self._workers.names)
        self._resolving.append(self.calls.fail)
        self._stall = StallWatch(
            self.iterations, self._workers.all, setup.config.stall_timeout, self._fail
        )
        self._children.watch(
            heard=self._heard, died=self._died, turn=self._stall.turn, failed=self._fail
        )
        self._workers.wait_loaded(self._bus.endpoint, deadline)
        self._loaded = True

    def describe(self) -> list[StageDescription]:
        """What the ranks say of themselves; the KV cache is set up by now."""
        ranks: list[StageDescription] = self._answer("sipipe:describe")
        return ranks

    def fall_back(self) -> None:
        """Go on without samplers: the loaded model is vLLM's runner's to run."""
        assert self._samplers is not None
        self._children.end(self._samplers.names)
        for name in self._samplers.names:
            self._bus.drop(name)
        self._samplers = None

    def open(self, ranks: list[StageDescription]) -> str:
        """Make the channels between the processes; iterations can be published from now on.

        Returns what the links are, for the log.
        """
        links = _make_links(self._setup)
        if self._samplers is None:
            self._answer("sipipe:open", links=links, logits=None)
        else:
            logits = _make_logits(self._setup, ranks, self._samplers.names)
            self._closing.callback(logits.close)
            self._answer("sipipe:open", links=links, logits=logits.endpoint)
            self._serve(self._samplers, logits)
        return links[0].transport if links else "none"

    def _serve(self, samplers: Samplers, logits: LogitsChannel) -> None:
        model = self._setup.vllm_config.model_config
        tracker = RequestTracker(
            engine_seed=model.seed or 0,
            balancer=Balancer(len(samplers.names), vocab_size=model.get_vocab_size()),
        )
        samplers.open(
            self._bus,
            logits,
            partial(_snapshot, self.iterations, tracker),
            time.monotonic() + self._setup.config.start_timeout,
        )
        shared = (self.iterations, tracker, samplers.gather, self.telemetry)
        self._resolver = Resolver(*shared, self._fail)
        self._closing.callback(self._resolver.close)
        self.dispatcher = Dispatcher(self._bus, *shared)
        # Closed before all others: children that wait for nothing else end in good order.
        self._closing.callback(self._bus.close)

    def _answer(self, method: str, **kwargs: Any) -> Any:
        return self.calls.call(method, kwargs=kwargs).result(self._setup.config.start_timeout)

    def observed(self, scheduler: type) -> type:
        """The engine's scheduler class, with what makes it and the executor share their records."""
        return observed(scheduler, self.iterations, self.telemetry)

    def fail(self, error: BaseException) -> None:
        """Resolve everything that is out with ``error``."""
        for resolve in self._resolving:
            resolve(error)

    def close(self) -> None:
        """End all processes and remove every channel."""
        self._children.expect_end()
        self.fail(RuntimeError("shut down"))
        self._closing.close()

    # ---- the events thread --------------------------------------------------------------------

    def _heard(self, child: Child, message: Any) -> None:
        match message:
            case Reply():
                self.calls.reply(child.name, message)
            case IterationReport():
                self._resolver.report(message)
            case Status():
                self._stall.heard(child.name, message)
            case Exception() if not self._loaded:
                self._fail(message)
            case Exception():
                kind = type(message).__name__
                self._fail(RuntimeError(f"worker {child.name} failed: {kind}: {message}"))
            case _:
                raise AssertionError(f"{child.name} sent {message!r}")

    def _died(self, child: Child, how: str) -> None:
        if self._samplers is None or child.name not in self._samplers.names:
            what = "died" if self._loaded else "ended while starting (see its log lines above)"
            self._fail(WorkerDiedError(f"stage worker {child} {what}, {how}; the engine stops"))
            return
        try:
            self._samplers.replace(child.name, how)
            self.telemetry.live.add(Word.RESTARTS)
        except WorkerDiedError as error:
            self._fail(error)


def _snapshot(iterations: Iterations, tracker: RequestTracker, sampler: int) -> Snapshot:
    """What a new ``sampler`` has to know; called under the order of BIC-I."""
    undrawn = iterations.undrawn(sampler)
    return Snapshot(
        tracker.added_of(sampler),
        [iteration.work.step for iteration in undrawn],
        [iteration.grammar for iteration in undrawn if iteration.grammar is not None],
    )


def _sampler_settings(setup: Setup, watched: Watched) -> SamplerSettings:
    model, reasoning = setup.vllm_config.model_config, setup.vllm_config.reasoning_config
    thinking: tuple[list[int], list[int]] = [], []
    if reasoning is not None and reasoning.enabled:
        thinking = (
            reasoning.reasoning_start_token_ids or [],
            reasoning.reasoning_end_token_ids or [],
        )
    return SamplerSettings(
        vocab_size=model.get_vocab_size(),
        layout=setup.config.logits_layout,
        logprobs_mode=model.logprobs_mode,
        reasoning=thinking,
        watched=watched,
    )


def _make_links(setup: Setup) -> list[LinkEndpoint]:
    """One link from every rank but the last stage's to the same rank of the next stage.

    Returned in rank order, so that rank r sends on link r and receives on link r - t.
    """
    tp = setup.ranks
    return [
        create_link(
            kind=setup.config.transport,
            max_tokens=setup.vllm_config.scheduler_config.max_num_batched_tokens,
            depth=max(2, setup.slots),
            name=f"stage{rank // tp}-{rank // tp + 1}.r{rank % tp}",
            device="cpu" if current_platform.is_cpu() else "cuda",
            stall_timeout=setup.config.stall_timeout,
        )
        for rank in range((setup.stages - 1) * tp)
    ]


def _make_logits(
    setup: Setup, ranks: Sequence[StageDescription], readers: Sequence[str]
) -> LogitsChannel:
    """BIC-L, as wide as the last stage says.

    Every rank of the last stage writes its columns, or the first one whole rows where vLLM has to
    gather them.
    """
    logits = ranks[-setup.ranks].logits
    assert logits is not None, "the first rank of the last stage writes logits"
    return LogitsChannel.create(
        "bic-l",
        entries=logits_entries(setup.slots),
        vocab=logits.width,
        batch=setup.vllm_config.scheduler_config.max_num_seqs,
        dtype=logits.dtype,
        layout=setup.config.logits_layout,
        ranks=setup.ranks if logits.shard else 1,
        shard=logits.shard,
        readers=readers,
        directory=setup.config.shm_dir,
    )
