"""What one engine drives: its hosts, its calls and iterations, and their end.

Who runs here
    vLLM's engine thread: everything that is called from :class:`sipipe.engine.executor.Executor`.
    The events thread (:mod:`sipipe.engine.children`): messages and deaths of children, the stall
    bound; for each other host a thread that does the same (:mod:`sipipe.engine.remote`). The
    gather thread (:mod:`sipipe.engine.resolve`), on SiPipe's path.
Guarantees
    Every future handed out is resolved: with its result or with the failure that stopped the
    engine. A dead worker or a lost host stops the engine at once; a dead sampler is replaced.
"""

import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import msgspec
from vllm.logger import init_logger
from vllm.platforms import current_platform

from sipipe.engine.balance import Balancer
from sipipe.engine.bus import Bus
from sipipe.engine.cpu_sampling import Choice, Costs, choose
from sipipe.engine.dispatch import Dispatcher
from sipipe.engine.host import Host
from sipipe.engine.hosts import link_port
from sipipe.engine.iterations import Iterations
from sipipe.engine.layers.choose import is_free
from sipipe.engine.layers.cut import COST_TOKENS
from sipipe.engine.layers.vocabulary import Vocabulary, columns, settle
from sipipe.engine.remote import RemoteHost
from sipipe.engine.requests import RequestTracker
from sipipe.engine.resolve import Resolver
from sipipe.engine.rpc import Calls, result_of
from sipipe.engine.samplers import Poison
from sipipe.engine.scheduling.observed_scheduler import observed
from sipipe.engine.setup import Setup
from sipipe.engine.stall import ANSWER_SECONDS, LONGEST_SLEEP, StallClock, StallWatch
from sipipe.engine.telemetry import Telemetry
from sipipe.ipc.gather import GatherReceiver
from sipipe.messages.boots import HeadOffer, StageDescription
from sipipe.messages.link import LinkEndpoint, TransportKind
from sipipe.messages.measured import MIXES, Measured
from sipipe.messages.places import StagePlace
from sipipe.messages.replies import IterationReport, Replacing, Reply, Status, Trying
from sipipe.messages.step import Snapshot
from sipipe.observe.live import Word

logger = init_logger(f"vllm.{__name__}")


class Pipeline:
    """See the module's text. ``fail`` is told what stops the engine, from any thread.

    Made without side effects that :meth:`close` does not undo; call it whatever happens.
    """

    def __init__(
        self, setup: Setup, remotes: Sequence[RemoteHost], fail: Callable[[BaseException], None]
    ) -> None:
        self._setup = setup
        self.failed = fail
        self._closing = ExitStack()
        for remote in remotes:
            self._closing.callback(remote.close)
        self.telemetry = Telemetry(setup)
        self._closing.callback(self.telemetry.close)
        self._clock = StallClock()
        self.iterations = Iterations(setup.slots, setup.logits_rows, self._clock.now)
        self._remotes = remotes
        self._host = Host(setup, self.telemetry.watched, self)
        self._hosts: list[Host | RemoteHost] = [*remotes, self._host]  # far ones hear first
        self._last = remotes[-1] if remotes else self._host
        """The last stage's host, which has the samplers."""
        self._resolving = [self.iterations.fail, *(host.fail for host in self._hosts)]
        self._stall: StallWatch | None = None
        self._model = setup.vllm_config.model_config
        self._tracker: RequestTracker | None = None
        self._draws: dict[str, float] = {}
        """What the samplers have measured, if they were asked to."""
        self._loaded = False

    def load(self) -> None:
        """Start all processes; return when every worker has loaded its layers.

        Raises:
            Exception: what the first worker raised that failed.
            WorkerDiedError: a process ended. StallError: not within the start timeout.
        """
        setup = self._setup
        workers = [
            StagePlace(stage=stage, stages=setup.stages, tp_rank=rank, tp_size=setup.ranks).name
            for stage in range(setup.stages)
            for rank in range(setup.ranks)
        ]
        self._bus = Bus(self._hosts)
        self.calls = Calls(self._bus, workers, self._clock.now)
        self._resolving.append(self.calls.fail)
        for remote in self._remotes:
            remote.begin(self, self.telemetry)
        self._closing.callback(self._host.close)
        tokens = [end for host in self._hosts for end in host.start()]
        self._gather = GatherReceiver(tokens)
        self._closing.callback(self._gather.close)
        timeout = setup.config.stall_timeout
        self._stall = StallWatch(
            self.iterations,
            self.calls,
            workers,
            self._ask,
            self._clock,
            timeout,
            self.failed,
            lambda stalled: self.telemetry.live.set(Word.STALLED, stalled),
        )
        for host in self._hosts:
            host.wait_loaded()
        self._loaded = True

    def describe(self) -> list[StageDescription]:
        """What the ranks say of themselves; the KV cache is set up by now."""
        ranks: list[StageDescription] = self._answer("sipipe:describe")
        return ranks

    def fall_back(self) -> None:
        """Go on without samplers: the loaded model is vLLM's runner's to run."""
        self._last.end_samplers()

    def open(self, ranks: list[StageDescription]) -> str:
        """Make the channels between the processes.

        Returns what the links are, for the log.
        """
        setup = self._setup
        links = _make_links(setup, {r.here[0]: r.address for r in self._remotes})
        if setup.reason:
            self._answer("sipipe:open", links=links, logits=None)
        else:
            logits = ranks[-setup.ranks].logits
            assert logits is not None, "the first rank of the last stage writes logits"
            heads = []
            if bounds := self._share_head([rank.head for rank in ranks[-setup.ranks :]]):
                logits = msgspec.structs.replace(logits, bounds=bounds)
                heads = _make_head_links(setup)
            entries = self._last.make_logits(logits)
            self._answer("sipipe:open", links=links, heads=heads, logits=entries)
            self._tracker = RequestTracker(
                engine_seed=self._model.seed or 0,
                balancer=Balancer(setup.samplers, vocab_size=self._model.get_vocab_size()),
            )
            self._tracker.per_row = setup.config.cpu_sampling == "per_row"
            self._draws = self._last.open_samplers()
        return ", ".join(dict.fromkeys(link.transport for link in links)) or "none"

    def _share_head(self, offers: list[HeadOffer | str]) -> tuple[int, ...]:
        """Have every stage take its rows of what the last stage's ranks offer.

        Returns the columns of all writers of logits; empty where the last stage keeps them.
        """
        setup = self._setup
        if not setup.vocabulary.parts:
            return ()
        rows = [offer.columns for offer in offers if isinstance(offer, HeadOffer)]
        if len(rows) < len(offers):
            why = next(offer for offer in offers if isinstance(offer, str))
            setup.vocabulary = Vocabulary(why=why)
            logger.warning("%s", setup.vocabulary)
            return ()
        sequences = min(setup.microbatch, COST_TOKENS)
        times: list[Measured] = self._answer("sipipe:time_parts", sequences=sequences)
        stages = range(0, len(times), setup.ranks)
        setup.vocabulary = settle(
            setup.vocabulary,
            setup.config,
            [max(rank.layers for rank in times[at : at + setup.ranks]) for at in stages],
            max(rank.head for rank in times),
            reserved=setup.vllm_config.device_config.device_type != "cpu",
        )
        logger.info("%s", setup.vocabulary)
        if not setup.vocabulary.parts:
            return ()
        bounds = columns(rows, setup.vocabulary.parts)
        self._answer("sipipe:take_head", offers=offers, bounds=bounds)
        return bounds

    def measure(self) -> Choice:
        """Measure who should draw, and tell the workers."""
        setup = self._setup
        ranks: list[Measured] = self._answer("sipipe:measure", sequences=setup.microbatch)
        stages = [ranks[at : at + setup.ranks] for at in range(0, len(ranks), setup.ranks)]
        last = stages[-1]
        copied = max(last, key=lambda rank: rank.copy)
        costs = Costs(
            sequences=setup.microbatch,
            inflight=setup.slots,
            layers=setup.layers,
            stages=tuple(max(rank.layers for rank in stage) for stage in stages),
            head=max(rank.head for rank in last),
            device={mix: max(rank.device[mix] for rank in last) for mix in MIXES},
            plain={mix: max(rank.plain[mix] for rank in last) for mix in last[0].plain},
            copy=copied.copy,
            copied=copied.copied,
            draws=self._draws,
        )
        choice = choose(costs, recut=is_free(setup.config))
        self._answer("sipipe:settle", draws=choice.draws)
        assert self._tracker is not None
        self._tracker.per_row = choice.draws == "per_row"
        return choice

    def serve(self) -> None:
        """Iterations can be published from now on."""
        assert self._tracker is not None
        shared = (self.iterations, self._tracker, self._gather, self.telemetry)
        self._resolver = Resolver(*shared, self.failed)
        self._closing.callback(self._resolver.close)
        self.dispatcher = Dispatcher(self._bus, *shared)

    def _answer(self, method: str, **kwargs: Any) -> Any:
        called = self.calls.call(method, kwargs=kwargs)
        return result_of(called, self.calls.oldest, self._setup.config.start_timeout)

    def _ask(self) -> None:
        for host in self._hosts:
            host.ask()

    def observed(self, scheduler: type) -> type:
        """The engine's scheduler class, with what makes it and the executor share their records."""
        assert self._tracker is not None
        return observed(scheduler, self.iterations, self.telemetry, self._tracker)

    def fail(self, error: BaseException) -> None:
        """Resolve everything that is out with ``error``."""
        for resolve in self._resolving:
            resolve(error)
        for remote in self._remotes:
            remote.say_end(str(error))

    def close(self) -> None:
        """End all processes and remove every channel."""
        for host in self._hosts:
            host.expect_end()
        for host in self._hosts:
            host.say_end("")
        self.fail(RuntimeError("shut down"))
        self._closing.close()

    # ---- what hosts tell: the events thread, and a thread for each other host --------------------

    def heard(self, name: str, message: Any) -> None:
        match message:
            case Reply():
                self.calls.reply(name, message)
            case IterationReport():
                self._resolver.report(message)
            case Status():
                assert self._stall is not None
                self._stall.heard(name, message)
            case Replacing() | Trying(handle=int()):
                # Its own bound: a dead one is replaced, and who hangs at a request is killed.
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
        assert self._tracker is not None
        self._gather.replace(index, tokens)
        with self._bus.order:
            if poison is not None:
                self._tracker.condemn(*poison)
            undrawn = self.iterations.undrawn(index)
            steps = [iteration.work.step for iteration in undrawn]
            grammars = [one.grammar for one in undrawn if one.grammar is not None]
            self._last.admit(index, Snapshot(self._tracker.added_of(index), steps, grammars))
        self.telemetry.live.add(Word.RESTARTS)

    def turn(self) -> float:
        return LONGEST_SLEEP if self._stall is None else self._stall.turn()


def _make_head_links(setup: Setup) -> list[LinkEndpoint]:
    """One link from each rank of the last stage to the same rank of every other, by its receiver."""
    kind, device = _transport(setup)
    return [
        LinkEndpoint(
            kind=kind,
            device=device,
            buffer_tokens=setup.vllm_config.scheduler_config.max_num_seqs,
            depth=max(2, setup.slots),
            name=f"head{setup.stages - 1}-{stage}.r{rank}",
            stall_timeout=setup.config.stall_timeout + 2 * ANSWER_SECONDS,
        )
        for stage in range(setup.stages - 1)
        for rank in range(setup.ranks)
    ]


def _make_links(setup: Setup, addresses: dict[int, str]) -> list[LinkEndpoint]:
    """One link from every rank but the last stage's to the same rank of the next stage.

    Returned in rank order, so that rank r sends on link r and receives on link r - t.

    Args:
        addresses: of the hosts, by their first stage; the head, which no link leads to, is not
            among them.
    """
    links = []
    kind, device = _transport(setup)
    encrypts = setup.config.hosts.encrypt_links
    for rank in range((setup.stages - 1) * setup.ranks):
        stage, tp_rank = divmod(rank, setup.ranks)
        address = addresses.get(stage + 1, "")
        links.append(
            LinkEndpoint(
                kind="zeromq" if address else kind,
                buffer_tokens=setup.link_tokens,
                depth=max(2, setup.slots),
                name=f"stage{stage}-{stage + 1}.r{tp_rank}",
                device=device,
                # The engine, which asks all stages, speaks before a stage that waits for another.
                stall_timeout=setup.config.stall_timeout + 2 * ANSWER_SECONDS,
                address=address,
                port=link_port(setup, rank) if address else 0,
                token=secrets.token_hex(16) if address and not encrypts else "",
            )
        )
    return links


def _transport(setup: Setup) -> tuple[TransportKind, Literal["cpu", "cuda"]]:
    """Of links within a host, and where what they carry is needed."""
    device: Literal["cpu", "cuda"] = "cpu" if current_platform.is_cpu() else "cuda"
    kind: TransportKind = "shm" if device == "cpu" else "cuda_ipc"
    return kind if setup.config.transport == "auto" else setup.config.transport, device
