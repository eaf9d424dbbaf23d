"""``sipipe.Executor``: vLLM's engine on one side, stage workers and samplers on the other.

The executor runs in vLLM's EngineCore process, on its thread. It is only the interface of
:class:`sipipe.engine.pipeline.Pipeline`. Each scheduling output is published on BIC-I; the future
that EngineCore holds is resolved when the tokens are in on BIC-O. Control calls (``collective_rpc``)
travel on BIC-I too, and workers answer them through their pipes.

Iteration i + m is published with its tokens when iteration i has left, m being the number of
microbatches in flight (:meth:`sipipe.engine.iteration.iterations.Iterations.begin`). So the logits of an
iteration stay readable until all of its tokens are in, also for a restarted sampler.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.torch_utils import set_torch_threads_for_runtime
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor as VllmExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from sipipe.best_effort import BestEffort
from sipipe.core_binding import claim
from sipipe.engine.engine_process import is_engine_process
from sipipe.engine.setup.decide import decide
from sipipe.engine.setup.describe import describe_setup
from sipipe.errors import ConfigError, StallError, WorkerDiedError, one_line
from sipipe.ipc.last_word import leave_last_word
from sipipe.kv_files import settings as kv_files
from sipipe.start_log import leave_out_what_is_wrong, shorten
from sipipe.versions import require_vllm

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from sipipe.engine.pipeline import Pipeline
    from sipipe.engine.pipeline_opener import Running

logger = init_logger(f"vllm.{__name__}")

CHANGE_WEIGHTS = ("reload_weights", "reset_weights", "start_weight_update", "update_weights")
"""Control calls that change the model's weights."""
WEIGHTS_STAY = (
    "every stage has rows of the output projection, which would not change: set "
    '"vocabulary": "last" in the sipipe config'
)
"""Reason for which no call may change them where the projection is shared out, with a remedy."""


@contextmanager
def one_cause() -> Iterator[None]:
    """End vLLM's engine process with one line, if an error in the body keeps the engine from starting.
    A worker's traceback is in its own log. In the user's own process the error is raised."""
    try:
        yield
    except Exception as error:
        if not is_engine_process():
            raise
        reason = one_line(error)
        leave_last_word(reason)
        logger.error("the engine cannot start: %s", reason)
        logger.debug("it failed here", exc_info=error)
        sys.exit(getattr(error, "status", 1))


class Executor(VllmExecutor):
    """Runs a model in pipeline stages, with sampling on CPU processes beside them."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """False, because vLLM's async scheduling would change its workers too. SiPipe schedules ahead
        by itself (:func:`sipipe.engine.setup.compatibility.schedules_ahead`)."""
        return False

    @one_cause()
    def _init_executor(self) -> None:
        """Decide how the engine is set up, start its processes, and have every worker load its layers.

        vLLM calls it in ``Executor.__init__``. Raises in the user's own process, and ends vLLM's
        engine process otherwise: ConfigError, UnsupportedError, ResourceError as
        :func:`sipipe.engine.setup.decide.decide`, StallError and WorkerDiedError as
        :meth:`.Pipeline.load`."""
        # Imported here because a worker unpickles this class, and must not have Numba loaded
        # when vLLM's CPU platform sets itself up (see sipipe.worker.main).
        from sipipe.engine.children.forking import fork_of_engines
        from sipipe.engine.hosts.remote import meet
        from sipipe.engine.pipeline import Pipeline
        from sipipe.engine.self_test.self_test import SelfTest
        from sipipe.engine.start.aborts import abort_once
        from sipipe.engine.start.drain import drain_though_paused
        from sipipe.engine.start.new_adapters import load_adapters_first
        from sipipe.engine.start.socket_threads import guard_socket_threads

        require_vllm()
        leave_out_what_is_wrong(engine=True)
        drain_though_paused()
        abort_once()
        guard_socket_threads()
        load_adapters_first()
        self._placement = self._place_by_ray()
        """Ray's placement, whose actors live as long as it does; None without Ray."""
        self._setup = decide(self.vllm_config)
        fork_of_engines(self._setup.stages)
        if self._setup.vllm_config.announced:
            # Where vLLM has forked this process, it has the filters already.
            shorten()
        self._setup.apply()
        self._log_setup()
        self._cores = claim(self._setup.cores)
        self._self_test = SelfTest(self._setup)
        self._self_test.begin()
        self._kv_caches: Sequence[KVCacheConfig] = ()
        self._failing = threading.Lock()  # wait: held for moments; nobody waits under it
        self._failure: BaseException | None = None
        self._failure_callback: Callable[[], None] | None = None
        self._started = False
        """True once iterations can be published."""
        self._closed = False
        self._shares = False
        """True once the output projection is shared out over the stages."""
        self._shared_caches: KVConnectorBase | None = None
        """Scheduler's connector, if it keeps prompts' caches in files, whose names say which weights they
        are of."""
        self._pipeline: Pipeline = Pipeline(self._setup, meet(self._setup), self._fail)
        # A finalizer of multiprocessing's also runs where vLLM has forked this process, which ends
        # without Python's own end. Children that are stopped would otherwise stay when a later step of
        # the start fails.
        self._finalizer = Finalize(self, self._pipeline.close, exitpriority=10)
        try:
            self._pipeline.load()
        except BaseException:
            self.shutdown()
            raise
        set_torch_threads_for_runtime()

    def _place_by_ray(self) -> object:
        """Have Ray place the workers, where the engine was given a placement group. Returns the
        placement, or None. Raises as :func:`sipipe.engine.hosts.ray_placement.place`."""
        if self.parallel_config.placement_group is None:
            return None
        from sipipe.engine.hosts.ray_placement import place

        placement = place(self.vllm_config)
        placement.start(self.vllm_config)
        return placement

    def _log_setup(self) -> None:
        """Log how the engine is set up, unless SiPipe's command has printed it. That command runs for
        all replicas, and its lines are replica 0's."""
        announced = self._setup.vllm_config.announced
        describe = BestEffort("describing how the engine is set up", bounded=False)
        for line in describe([], describe_setup, self._setup):
            if not announced or self.parallel_config.data_parallel_index:
                logger.info("%s", line)

    # ---- vLLM's interface: calls ------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call ``method`` on every worker, after the iterations that are already scheduled.

        Returns the results by rank, or only that of ``unique_reply_rank``; with ``non_block`` a future
        of them. Raises ConfigError: the call would change weights of which every stage has rows.
        TimeoutError: it took more than ``timeout`` seconds. RuntimeError: a worker raised, or the
        engine has failed or is shut down."""
        if self._shares and method in CHANGE_WEIGHTS:
            raise ConfigError(f"{method}: {WEIGHTS_STAY}")
        changes_weights = self._may_change_weights(method)
        if self._shares and changes_weights:
            logger.warning_once(
                f"a function may change the model's weights; if it does: {WEIGHTS_STAY}"
            )
        pipeline = self._usable()
        if self._started:
            pipeline.dispatcher.publish_all()
        future = pipeline.calls.call(method, args, kwargs, unique_reply_rank)
        if changes_weights and self._shared_caches is not None:
            # Now, whatever comes of the call: what is scheduled from now on runs behind it.
            self._shared_caches.reset_cache()
        if non_block:
            return future
        try:
            # wait: the caller's, and `stall_timeout` while a worker does not answer; all replies,
            # or what fails the engine
            return future.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"RPC call to {method} timed out.") from None

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        super().initialize_from_config(kv_cache_configs)
        self._kv_caches = kv_cache_configs

    @one_cause()
    def compile_or_warm_up_model(self) -> None:
        """Warm the workers up, then open the channels: the model is ready to run."""
        try:
            super().compile_or_warm_up_model()
            running = self._open()
            self._self_test.compare(self._run, self._kv_caches)
            self._usable()  # a prompt may have ended a stage
        except BaseException:
            # In a user's own process nobody else ends what has been started.
            self.shutdown()
            raise
        logger.info("%s", running)

    def _open(self) -> Running:
        """Open the channels, with the scheduler watched that vLLM makes next."""
        pipeline = self._usable()
        running = pipeline.open()
        self._shares = bool(running.vocabulary.parts)
        self._setup = running.setup
        scheduler = self.scheduler_config.get_scheduler_cls()
        self.scheduler_config.scheduler_cls = pipeline.observed(scheduler)
        bind = BestEffort("binding the scheduler to its cores", bounded=False)
        bind(None, self._setup.bind_scheduler, pipeline.resolver.thread.native_id or 0)
        self._started = True
        return running

    def _run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """The result of one scheduling output."""
        output = self.execute_model(scheduler_output)
        return self.sample_tokens(None) if output is None else output

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Publish one iteration. Its result comes from :meth:`sample_tokens`, as vLLM expects where
        tokens are drawn. The results of a pooling model, and of an iteration without tokens, come from
        here."""
        dispatcher = self._usable().dispatcher
        published = dispatcher.publish(scheduler_output)
        pooling = self.model_config.runner_type == "pooling"
        if published and (pooling or not scheduler_output.total_num_scheduled_tokens):
            result = dispatcher.publish_grammar(None)
            # wait: `stall_timeout`; the stages' word, or what fails the engine
            return result if non_block else result.result()
        # vLLM takes None for a step whose tokens are still to come.
        output = None if published else EMPTY_MODEL_RUNNER_OUTPUT
        if not non_block:
            return output
        future: Future[ModelRunnerOutput | None] = Future()
        future.set_result(output)
        return future

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """The tokens of the iteration published last, or a future of them."""
        future = self._usable().dispatcher.publish_grammar(grammar_output)
        # wait: `stall_timeout`; the samplers' tokens, or what fails the engine
        return future if non_block else future.result()

    def take_draft_token_ids(self) -> None:
        """Return None: drafts reach the scheduler with the tokens before them."""

    def init_kv_output_aggregator(self, connector: KVConnectorBase) -> None:
        super().init_kv_output_aggregator(connector)
        if kv_files.is_used(self.vllm_config.kv_transfer_config):
            self._shared_caches = connector
        self._usable().resolver.aggregator = self.kv_output_aggregator

    def check_health(self) -> None:
        """Raise RuntimeError if something has stopped the engine. Workers are watched all the time."""
        self._usable()

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once the engine fails, or now if it has failed."""
        with self._failing:  # a failure that comes just now finds the callback, or is found here
            has_failed = self._failure is not None
            if not has_failed:
                self._failure_callback = callback
        if has_failed and not self._closed:
            callback()

    def shutdown(self) -> None:
        """End samplers and workers, and remove every channel; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._finalizer()
        self._cores.close()
        self._placement = None

    # ---- inside -----------------------------------------------------------------------------

    def _may_change_weights(self, method: str | Callable[..., Any]) -> bool:
        """Say if a control call can change the model's weights: also a function, or a method of the
        user's own."""
        if not isinstance(method, str):
            return True
        extension = self.parallel_config.worker_extension_cls
        users_own = bool(extension) and hasattr(resolve_obj_by_qualname(extension), method)
        return users_own or method == "apply_model" or method in CHANGE_WEIGHTS

    def _usable(self) -> Pipeline:
        """The pipeline. Raises RuntimeError: it has failed, or is shut down."""
        if self._failure is not None:
            raise RuntimeError(f"SiPipe's executor has failed: {self._failure}") from self._failure
        if self._closed:
            raise RuntimeError("SiPipe's executor is shut down")
        return self._pipeline

    def _fail(self, error: BaseException) -> None:
        """Stop the engine with ``error``. Any thread may call it; the first call counts."""
        with self._failing:
            if self._failure is not None or self._closed:
                return
            self._failure = error
        if isinstance(error, StallError | WorkerDiedError):
            logger.error("%s", error)
        elif self._started:  # before that the engine thread raises it
            logger.error("SiPipe's executor failed", exc_info=error)
        leave_last_word(str(error) or type(error).__name__)
        self._pipeline.fail(error)
        callback = self._failure_callback
        self._failure_callback = None
        if callback is not None:
            threading.Thread(target=callback, name="SiPipeFailure", daemon=True).start()
