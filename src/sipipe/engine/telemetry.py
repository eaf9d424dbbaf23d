"""The executor's side of observation: its recorder, the page of live figures, the stage times.

The page is what ``sipipe top`` and the Prometheus metrics read; every process of the engine writes
its own block. The recorder writes a trace file only where the settings name a directory. The stage
times are what the scheduler chooses the number of microbatches by.
"""

import uuid

from sipipe.engine.iterations import Iteration
from sipipe.engine.scheduling.concurrency import ConcurrencyController, MeasuredTimes
from sipipe.engine.setup import Setup
from sipipe.ipc.stage_times import StageTimes
from sipipe.messages.boots import Watched
from sipipe.observe.live import LivePage
from sipipe.observe.metrics import Publisher
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import record_process


class Telemetry:
    """Made before the workers start, closed when they have ended."""

    def __init__(self, setup: Setup) -> None:
        model = str(setup.vllm_config.model_config.model)
        self._setup = setup
        self._page = LivePage.create(
            stages=setup.stages,
            ranks=setup.ranks,
            samplers=setup.samplers,
            inflight=setup.slots,
            model=model,
            engine=str(setup.vllm_config.parallel_config.data_parallel_rank),
        )
        self.live = self._page.writer("executor")
        self._stage_times = StageTimes.create(
            stages=setup.stages, samplers=setup.samplers, directory=setup.config.shm_dir
        )
        self.watched = Watched(
            stages=setup.stages,
            inflight=setup.slots,
            model=model,
            run=uuid.uuid4().hex,
            trace=setup.config.trace,
            live=self._page.path,
            times=self._stage_times.endpoint,
        )
        self._publisher = Publisher(self._page)
        self._publisher.start()
        self._recorder = record_process(self.watched, "executor")

    def record(
        self, phase: Phase, iteration: Iteration, began: int, ended: int, tokens: int = 0
    ) -> None:
        """One phase of an iteration on the engine's side, in monotonic nanoseconds."""
        self._recorder.record(
            phase,
            iteration.number,
            iteration.slot or 0,
            began,
            ended,
            batch=len(iteration.work.request_ids),
            tokens=tokens,
        )

    def measured_times(self) -> MeasuredTimes:
        """The times of stages, samplers and this process, as a controller's input."""
        setup = self._setup
        controller = ConcurrencyController(stages=setup.stages, slots=setup.slots)
        return MeasuredTimes(controller, self._stage_times, samplers=setup.samplers)

    def close(self) -> None:
        """Write what is left of the trace, and let the page go."""
        self._recorder.close()
        self._publisher.close()
        self._stage_times.close()
        self._page.close()
