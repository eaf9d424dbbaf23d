"""The data plane as the executor sees it: iterations out on BIC-I, tokens back on BIC-O.

Who runs here
    The engine thread publishes (``publish``, ``sample``); the gather thread sleeps on BIC-O and
    resolves iterations; the events thread delivers the last stage's reports; a restart thread,
    one per dead sampler, brings a new one in.
Guarantees
    Iterations are published in order, each with the state changes that its draws rely on. A
    sampler that dies is replaced and draws again what it had not delivered: draws depend on
    (seed, position) and logits only, so the tokens are the same.
Relies on
    A slot's logits stay in BIC-L until its iteration is resolved (see the executor).
    Invariant: ``_order`` is held from the moment the tracker follows a scheduling output until
    that output is on BIC-I, so that a snapshot never holds a change which is still to come.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from sipipe.config import SiPipeConfig
from sipipe.cores import CorePlan
from sipipe.engine.balance import Balancer
from sipipe.engine.control import ControlPlane, bic_i_shape
from sipipe.engine.iterations import InFlight, build_output
from sipipe.engine.requests import RequestTracker
from sipipe.engine.sampler_pool import SamplerPool
from sipipe.engine.telemetry import Telemetry
from sipipe.errors import WorkerDiedError
from sipipe.ipc.errors import ChannelClosed, ChannelError, ChannelPeerDied
from sipipe.ipc.gather_old.receiver import GatherReceiver
from sipipe.ipc.memory import check_room
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.boots import SamplerBoot, StageDescription
from sipipe.messages.header import Kind
from sipipe.messages.step import Snapshot, decode_sampled, encode
from sipipe.observe.live import Word
from sipipe.observe.phases import Phase

logger = init_logger(f"vllm.{__name__}")


class DataPlane:
    """See the module's text."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: SiPipeConfig,
        plan: CorePlan,
        telemetry: Telemetry,
        *,
        slots: int,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._slots = slots
        self._samplers = len(plan.samplers)
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        self._check_room(dtype)
        self._pool = SamplerPool(
            self._samplers, cores=plan.samplers, warm=(dtype, config.logits_layout)
        )
        self._telemetry = telemetry
        self._recorder = telemetry.recorder
        self._tracker = RequestTracker(
            engine_seed=vllm_config.model_config.seed or 0,
            balancer=Balancer(self._samplers, vocab_size=vllm_config.model_config.get_vocab_size()),
        )
        self._lock = threading.Lock()
        self._order = threading.RLock()
        self._inflight: dict[int, InFlight] = {}
        self._last: InFlight | None = None
        self._next = 0
        self._finished: set[str] = set()
        self._failure: BaseException | None = None
        self._closed = False
        self._logits: LogitsChannel | None = None
        self._gather: GatherReceiver | None = None
        self._thread: threading.Thread | None = None
        self._fail: Callable[[BaseException], None] = lambda _error: None
        self._control: ControlPlane | None = None

    def _check_room(self, dtype: str) -> None:
        """Refuse at start-up what would run out of shared memory later.

        Raises:
            ResourceError: how much is needed, and which option to lower.
        """
        logits = LogitsChannel.required_bytes(
            entries=self._logits_entries,
            vocab=self._vllm_config.model_config.get_vocab_size(),
            batch=self._vllm_config.scheduler_config.max_num_seqs,
            dtype=dtype,
        )
        size = logits + DispatchProducer.required_bytes(**bic_i_shape(self._slots))
        check_room(size, self._config.shm_dir, "bic-l (logits)")
        logger.info("SiPipe's channels take %.0f MiB of shared memory", size / 2**20)

    @property
    def _logits_entries(self) -> int:
        """Every undrawn iteration stays readable, for a sampler that is started again."""
        return max(3, self._slots + 2)

    @property
    def sampler_names(self) -> tuple[str, ...]:
        return tuple(f"sampler{i}" for i in range(self._samplers))

    def describe(self) -> str:
        return f"{self._samplers} sampler{'' if self._samplers == 1 else 's'}"

    def attach(self, control: ControlPlane, fail: Callable[[BaseException], None]) -> None:
        """Publish on ``control`` from now on, and hear its reports."""
        self._control, self._fail = control, fail
        control.listen_for(self)

    def make_logits(self, ranks: list[StageDescription]) -> Any:
        """Make BIC-L as wide as the last stage says; returns its endpoint.

        Every rank of the last stage writes its columns, or the first one whole rows where vLLM
        has to gather them.
        """
        tp_size = self._vllm_config.parallel_config.tensor_parallel_size
        writer = ranks[-tp_size]
        assert writer.logits is not None
        shard = writer.logits.shard
        self._logits = LogitsChannel.create(
            "bic-l",
            entries=self._logits_entries,
            vocab=writer.logits.width,
            batch=self._vllm_config.scheduler_config.max_num_seqs,
            dtype=writer.logits.dtype,
            layout=self._config.logits_layout,
            ranks=tp_size if shard else 1,
            shard=shard,
            readers=self.sampler_names,
            directory=self._config.shm_dir,
        )
        return self._logits.endpoint

    def start(self) -> None:
        """Make BIC-O, boot the samplers, and gather from now on."""
        self._gather = GatherReceiver.create(senders=self.sampler_names)
        deadline = time.monotonic() + self._config.start_timeout
        self._pool.boot([self._boot(i, 0) for i in range(self._samplers)], deadline)
        self._pool.watch(self._restart)
        self._thread = threading.Thread(target=self._gather_loop, name="SiPipeGather", daemon=True)
        self._thread.start()

    # ---- the engine thread ------------------------------------------------------------------

    def publish(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Publish one iteration; None, as vLLM expects of a step whose tokens are still to come.

        A scheduling output without tokens is not published: the requests that it ends leave with
        the next one.
        """
        assert self._control is not None
        if output.total_num_scheduled_tokens == 0:
            self._finished |= output.finished_req_ids
            self._last = None
            return EMPTY_MODEL_RUNNER_OUTPUT
        with self._order:
            output.finished_req_ids = output.finished_req_ids | self._finished
            self._finished = set()
            with self._lock:
                number, self._next = self._next, self._next + 1
                slot = getattr(output, "sipipe_slot", number % self._slots)
                iteration = self._tracker.advance(number, output)
                inflight = self._last = InFlight(number, slot, iteration)
                self._inflight[number] = inflight
            output.sipipe_iteration = number  # type: ignore[attr-defined]
            if scheduled := output.__dict__.pop("sipipe_scheduled", None):
                self._recorder.record(
                    Phase.SCHEDULE, number, slot, *scheduled, batch=len(iteration.request_ids)
                )
            if inflight.needs_samplers:
                assert self._gather is not None
                names = self.sampler_names
                self._gather.expect(number, [names[i] for i in iteration.samplers])
            began = time.monotonic_ns()
            buffers: list[pickle.PickleBuffer] = []
            body = pickle.dumps(output, 5, buffer_callback=buffers.append)
            self._control.publish(
                Kind.SCHEDULE,
                slot,
                number,
                [encode(iteration.step), body, *(buffer.raw() for buffer in buffers)],
            )
            inflight.published = self._record(Phase.DISPATCH, inflight, began)
            self._telemetry.live.set(Word.INFLIGHT, len(self._inflight))
            self._telemetry.live.set(Word.RUNNING, len(self._tracker))
        return None

    def sample(self, output: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """The future of the iteration published last; tells the samplers its bitmask first."""
        assert self._control is not None
        inflight = self._last
        assert inflight is not None, "sample_tokens without execute_model"
        if inflight.iteration.step.grammar:
            with self._order:
                inflight.grammar = self._tracker.grammar(inflight.number, output)
                self._control.publish(
                    Kind.GRAMMAR, inflight.slot, inflight.number, [encode(inflight.grammar)]
                )
        return inflight.future

    # ---- what comes back --------------------------------------------------------------------

    def report(self, iteration: int, extras: dict[str, Any]) -> None:
        """The last stage has run an iteration that needs its word (events thread)."""
        with self._lock:
            inflight = self._inflight.get(iteration)
            if inflight is not None:
                inflight.extras = extras
        if inflight is not None:
            self._settle(inflight)

    def oldest(self) -> tuple[float, str] | None:
        with self._lock:
            for number, inflight in self._inflight.items():
                return inflight.began, f"iteration {number} waits for {inflight.waits_for()}"
        return None

    def _gather_loop(self) -> None:
        assert self._gather is not None
        try:
            while True:
                try:
                    gathered = self._gather.collect()
                except ChannelPeerDied:
                    continue  # the pool has seen it too, and brings a new sampler in
                parts = {
                    int(name.removeprefix("sampler")): decode_sampled(payload)
                    for name, payload in gathered.payloads.items()
                }
                with self._lock:
                    inflight = self._inflight.get(gathered.iteration)
                    if inflight is None:
                        continue  # failed meanwhile
                    inflight.sampled = parts
                self._settle(inflight)
        except ChannelClosed:
            return
        except Exception as error:
            if not self._closed:
                self._fail(error)

    def _settle(self, inflight: InFlight) -> None:
        """Resolve an iteration if nothing is out any more."""
        with self._lock:
            if not inflight.complete or inflight.number not in self._inflight:
                return
            del self._inflight[inflight.number]
            output, drawn, errors = build_output(inflight)
            for request_id, token in drawn:
                self._tracker.record(inflight.number, request_id, token)
        self._record(Phase.GATHER, inflight, inflight.published, tokens=len(drawn))
        for request_id, reason in errors:
            logger.error("request %s fails: %s", request_id, reason)
        if errors:
            output.sipipe_errors = {request_id for request_id, _ in errors}  # type: ignore[attr-defined]
        with suppress(InvalidStateError):
            inflight.future.set_result(output)

    def _record(self, phase: Phase, inflight: InFlight, began: int, tokens: int = 0) -> int:
        ended = time.monotonic_ns()
        self._recorder.record(
            phase,
            inflight.number,
            inflight.slot,
            began,
            ended,
            batch=len(inflight.iteration.request_ids),
            tokens=tokens,
        )
        return ended

    # ---- samplers that die ------------------------------------------------------------------

    def _boot(self, index: int, incarnation: int) -> SamplerBoot:
        assert self._control is not None
        assert self._logits is not None
        assert self._gather is not None
        model = self._vllm_config.model_config
        return SamplerBoot(
            index=index,
            name=self.sampler_names[index],
            incarnation=incarnation,
            bic_i=self._control.producer.endpoint,
            bic_l=self._logits.endpoint,
            bic_o=self._gather.endpoint,
            vocab_size=model.get_vocab_size(),
            layout=self._config.logits_layout,
            logprobs_mode=model.logprobs_mode,
            reasoning=_reasoning_tokens(self._vllm_config),
            stages=self._vllm_config.parallel_config.pipeline_parallel_size,
            inflight=self._slots,
            run=self._telemetry.run,
            trace=self._config.trace,
            live=self._telemetry.path,
            times=self._telemetry.times,
        )

    def _restart(self, index: int, incarnation: int, reason: str) -> None:
        """Bring a new sampler in at a known point of BIC-I, with all that it needs (own thread)."""
        if self._closed or self._failure is not None:
            return
        if incarnation < 0:
            self._fail(WorkerDiedError(f"sampler{index} keeps dying ({reason}); the engine stops"))
            return
        logger.warning("sampler%d died (%s); starting it again", index, reason)
        self._telemetry.live.add(Word.RESTARTS)
        assert self._control is not None
        assert self._logits is not None
        name = self.sampler_names[index]
        try:
            with self._order, self._control.paused():
                for channel in (self._control.producer, self._logits):
                    with suppress(ChannelError):  # publish() may have removed it already
                        channel.remove_reader(name)
                    channel.add_reader(name)
                with self._lock:
                    waiting = [
                        f
                        for f in self._inflight.values()
                        if index in f.iteration.samplers and f.sampled is None
                    ]
                    snapshot = Snapshot(
                        index,
                        self._tracker.joins_of(index),
                        [f.iteration.step for f in waiting],
                        [f.grammar for f in waiting if f.grammar is not None],
                    )
            self._pool.replace(self._boot(index, incarnation), snapshot)
        except Exception as error:
            if not self._closed:
                self._fail(error)

    # ---- the end ----------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Resolve every iteration in flight with ``error``."""
        with self._lock:
            self._failure = error
            inflight, self._inflight = list(self._inflight.values()), {}
        for item in inflight:
            with suppress(InvalidStateError):
                item.future.set_exception(RuntimeError(f"iteration {item.number} failed: {error}"))

    def stop_watching(self) -> None:
        """From now on a sampler that ends is not replaced."""
        self._pool.stop_watching()

    def close(self) -> None:
        """Stop samplers and remove BIC-L, BIC-O and links; futures still out are failed."""
        if self._closed:
            return
        self._closed = True
        self.fail(RuntimeError("shut down"))
        if self._gather is not None:
            self._gather.close()
        if self._logits is not None:
            self._logits.close()
        self._pool.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)


def _reasoning_tokens(vllm_config: VllmConfig) -> tuple[list[int], list[int]]:
    """The token ids that begin and end thinking, for thinking budgets; empty without them."""
    reasoning = vllm_config.reasoning_config
    if reasoning is None or not reasoning.enabled:
        return [], []
    return reasoning.reasoning_start_token_ids or [], reasoning.reasoning_end_token_ids or []
