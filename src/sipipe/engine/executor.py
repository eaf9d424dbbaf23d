"""``sipipe.Executor``: vLLM's engine on one side, stage workers and samplers on the other.

The executor runs in vLLM's EngineCore process. It publishes each scheduling output once, on
BIC-I, and resolves the future that EngineCore holds when the samplers' tokens are in on BIC-O.
Control calls (``collective_rpc``) travel on BIC-I too, so that they are in order with the
iterations, and workers answer them through their pipes.

Who runs here
    vLLM's engine thread: ``execute_model``, ``sample_tokens``, ``collective_rpc``, ``shutdown``.
    The gather thread (SiPipe's path only): sleeps on BIC-O.
    The events thread: sleeps on worker pipes and process sentinels; bounds every iteration.
Guarantees
    Every future handed out is resolved: with its result or with the failure that stopped the
    engine. A dead worker stops the engine at once; a dead sampler is replaced.
Relies on
    vLLM's batch queue: iteration i + m is not published before iteration i has been resolved,
    m being the number of microbatches in flight. So a slot's logits stay readable until all of
    its tokens are in, also for a restarted sampler.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.network_utils import get_file_store_init_method
from vllm.utils.torch_utils import set_torch_threads_for_runtime
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor as VllmExecutor
from vllm.v1.outputs import ModelRunnerOutput

import sipipe
from sipipe.config import SiPipeConfig
from sipipe.engine.compatibility import (
    STOCK_WORKERS,
    Choice,
    check_features,
    check_version,
    choose_path,
)
from sipipe.engine.layers.choose import choose_layers, log_layers
from sipipe.engine.links import make_links
from sipipe.engine.placement import apply_core_plan, bind_scheduler
from sipipe.engine.processes import start_workers, stop_workers
from sipipe.engine.scheduling.observed_scheduler import observed
from sipipe.engine.telemetry import Telemetry
from sipipe.errors import ConfigError, StallError, WorkerDiedError
from sipipe.ipc.rendezvous import remove_rendezvous
from sipipe.observe.live import Word

if TYPE_CHECKING:
    from sipipe.engine.control import ControlPlane
    from sipipe.engine.data import DataPlane

logger = init_logger(f"vllm.{__name__}")

PIPELINE_SCHEDULER = "sipipe.engine.scheduling.scheduler.PipelineScheduler"


class PipelineVllmConfig(VllmConfig):
    """A VllmConfig whose engine keeps ``inflight`` microbatches in flight.

    vLLM derives that number from the parallel configuration and reads it once, after it has made
    the executor; the executor gives the instance this class.
    """

    @property
    def max_concurrent_batches(self) -> int:
        config = SiPipeConfig.from_additional_config(self.additional_config)
        return config.resolved_inflight(self.parallel_config.pipeline_parallel_size)


class Executor(VllmExecutor):
    """Runs a model in pipeline stages, with sampling on CPU processes beside them."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """False: SiPipe overlaps by keeping more microbatches in flight, with known tokens."""
        return False

    def _init_executor(self) -> None:
        # Imported here because a worker unpickles this class, and must not have Numba loaded
        # when vLLM's CPU platform sets itself up (see worker_main).
        from sipipe.engine.control import ControlPlane
        from sipipe.engine.data import DataPlane

        check_version()
        check_features(self.vllm_config)
        self.config = SiPipeConfig.from_additional_config(self.vllm_config.additional_config)
        self.choice = choose_path(self.vllm_config, self.config)
        self._adopt(self.choice)
        layers = choose_layers(self.vllm_config, self.config, self.choice)
        log_layers(layers)
        plan = apply_core_plan(self.vllm_config, self.config)
        self._plan = plan
        self._telemetry = Telemetry(
            self.vllm_config,
            self.config,
            samplers=len(plan.samplers) if self.choice.path == "sipipe" else 0,
            slots=self.slots,
        )
        self._failure: BaseException | None = None
        self._failure_callback: Callable[[], None] | None = None
        self._closed = False
        self._data: DataPlane | None = None
        self._control: ControlPlane | None = None
        stages = self.parallel_config.pipeline_parallel_size
        self._init_methods = [get_file_store_init_method() for _ in range(stages)]
        workers = start_workers(
            self.vllm_config,
            self.config,
            self.choice.path,
            slots=self.slots,
            run=self._telemetry.run,
            live=self._telemetry.path,
            times=self._telemetry.times,
            layers=layers,
            init_methods=self._init_methods,
        )
        self._finalizer = weakref.finalize(self, stop_workers, workers)
        try:
            if self.choice.path == "sipipe":
                self._data = DataPlane(
                    self.vllm_config, self.config, plan, self._telemetry, slots=self.slots
                )
            self._control = ControlPlane(
                workers,
                self.config,
                samplers=self._data.sampler_names if self._data else (),
                slots=self.slots,
                fail=self._fail,
            )
            self._control.wait_ready(time.monotonic() + self.config.start_timeout)
            remove_rendezvous(self._init_methods)
            if self._data is not None:
                self._data.attach(self._control, self._fail)
            self._control.start()
        except BaseException:
            self.shutdown()
            raise
        set_torch_threads_for_runtime()

    @property
    def slots(self) -> int:
        """Microbatches in flight (m); slots of every channel and of the batch metadata."""
        return self.vllm_config.max_concurrent_batches

    # ---- vLLM's interface: calls ------------------------------------------------------------

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call ``method`` on every worker, after the iterations already published.

        Returns the results by rank, or the one of ``unique_reply_rank``; a future of it with
        ``non_block``.
        """
        control = self._usable()
        future = control.call(method, args, kwargs or {}, unique_reply_rank)
        if non_block:
            return future
        try:
            return future.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"RPC call to {method} timed out.") from None

    def compile_or_warm_up_model(self) -> None:
        """Warm the workers up, then open the data plane: the model is ready to run."""
        super().compile_or_warm_up_model()
        control = self._usable()
        timeout = self.config.start_timeout
        ranks = control.call("sipipe:describe", (), {}).result(timeout)
        reasons = sorted({rank.unsupported for rank in ranks if rank.unsupported})
        if reasons and self._data is not None:
            self._fall_back(reasons[0])
        links = make_links(self.vllm_config, self.config, ranks, slots=self.slots)
        logits = self._data.make_logits(ranks) if self._data is not None else None
        control.call("sipipe:open", (), {"links": links, "logits": logits}).result(timeout)
        if self._data is not None:
            self._data.start()
            self.scheduler_config.scheduler_cls = observed(
                self.scheduler_config.get_scheduler_cls(), self._telemetry
            )
        bind_scheduler(self._plan)
        stages = self.parallel_config.pipeline_parallel_size
        logger.info(
            "SiPipe %s: %d stage%s x %d rank%s, %s, %d microbatch%s in flight, links: %s",
            sipipe.__version__,
            *_counted(stages),
            *_counted(self.parallel_config.tensor_parallel_size),
            self._data.describe() if self._data else "vLLM's runner and sampler",
            *_counted(self.slots, "es"),
            links[0].transport if links else "none",
        )

    def execute_model(  # type: ignore[override]
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> Any:
        """Publish one iteration. Its tokens come from :meth:`sample_tokens`."""
        if self._data is None:
            if scheduler_output.total_num_scheduled_tokens:
                self._telemetry.live.add(Word.FALLBACKS)
            return self.collective_rpc(
                "execute_model",
                args=(scheduler_output,),
                non_block=non_block,
                unique_reply_rank=self._output_rank,
            )
        self._usable()
        output = self._data.publish(scheduler_output)
        return _resolved(output) if non_block else output

    def sample_tokens(  # type: ignore[override]
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> Any:
        """The tokens of the iteration published last, or a future of them."""
        if self._data is None:
            return self.collective_rpc(
                "sample_tokens",
                args=(grammar_output,),
                non_block=non_block,
                unique_reply_rank=self._output_rank,
            )
        self._usable()
        future = self._data.sample(grammar_output)
        return future if non_block else future.result()

    def check_health(self) -> None:
        """Raise what stopped the engine, if anything did. Workers are watched all the time."""
        self._usable()

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        if self._failure is not None and not self._closed:
            callback()
        else:
            self._failure_callback = callback

    def shutdown(self) -> None:
        """End samplers and workers, and remove every channel; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._data is not None:
            self._data.stop_watching()
        if self._control is not None:
            self._control.close()
        if self._data is not None:
            self._data.close()
        self._finalizer()
        remove_rendezvous(self._init_methods)
        self._telemetry.close()

    # ---- inside -----------------------------------------------------------------------------

    @property
    def _output_rank(self) -> int:
        """The first rank of the last stage: it has the output on vLLM's own path."""
        return self.parallel_config.world_size - self.parallel_config.tensor_parallel_size

    def _adopt(self, choice: Choice) -> None:
        """Set what the flag alone does not: worker class, scheduler class, microbatches in flight."""
        parallel, scheduler = self.vllm_config.parallel_config, self.vllm_config.scheduler_config
        ours = STOCK_WORKERS.get(parallel.worker_cls)
        if ours is None and parallel.worker_cls not in STOCK_WORKERS.values():
            raise ConfigError(
                f"--worker-cls {parallel.worker_cls}: SiPipe brings its own worker class; leave the "
                "option out (this platform may not be supported)"
            )
        parallel.worker_cls = ours or parallel.worker_cls
        if choice.path == "vllm":
            logger.warning("SiPipe leaves this engine on vLLM's own path: %s", choice.reason)
            self.config = self.config.from_dict(
                {**self.config.to_dict(), "inflight": parallel.pipeline_parallel_size}
            )
            self._keep_config()
        elif scheduler.scheduler_cls is None and self.config.scheduler == "pipeline":
            scheduler.scheduler_cls = PIPELINE_SCHEDULER
        self.vllm_config.__class__ = PipelineVllmConfig

    def _keep_config(self) -> None:
        additional = self.vllm_config.additional_config
        self.vllm_config.additional_config = {
            **(additional if isinstance(additional, dict) else {}),
            "sipipe": self.config.to_dict(),
        }

    def _fall_back(self, reason: str) -> None:
        """The loaded model turned out to be one that the stage runner cannot take."""
        if self.config.stage_runner == "sipipe":
            raise ConfigError(
                f'sipipe config: "stage_runner" is "sipipe", but it does not take {reason}; '
                'set it to "auto"'
            )
        assert self._data is not None
        self._data.close()
        self._data = None
        if self.scheduler_config.scheduler_cls == PIPELINE_SCHEDULER:
            self.scheduler_config.scheduler_cls = None
        self.choice = Choice(path="vllm", reason=f"the stage runner does not take {reason}")
        self._adopt(self.choice)

    def _usable(self) -> ControlPlane:
        if self._failure is not None:
            raise RuntimeError(f"SiPipe's executor has failed: {self._failure}") from self._failure
        if self._closed or self._control is None:
            raise RuntimeError("SiPipe's executor is shut down")
        return self._control

    def _fail(self, error: BaseException) -> None:
        """Stop the engine with ``error``; called from any thread, the first call counts."""
        if self._failure is not None or self._closed:
            return
        self._failure = error
        if isinstance(error, StallError | WorkerDiedError):
            logger.error("%s", error)
        else:
            logger.error("SiPipe's executor failed", exc_info=error)
        if self._control is not None:
            self._control.fail(error)
        if self._data is not None:
            self._data.fail(error)
        callback, self._failure_callback = self._failure_callback, None
        if callback is not None:
            threading.Thread(target=callback, name="SiPipeFailure", daemon=True).start()


def _counted(number: int, plural: str = "s") -> tuple[int, str]:
    return number, "" if number == 1 else plural


def _resolved(output: ModelRunnerOutput | None) -> Future[ModelRunnerOutput | None]:
    future: Future[ModelRunnerOutput | None] = Future()
    future.set_result(output)
    return future
