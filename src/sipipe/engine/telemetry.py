"""The executor's side of observation: its recorder, the page of live figures, the stage times.

The page is what ``sipipe top`` and the Prometheus metrics read; every process of the engine writes
its own block. The recorder writes a trace file only where the settings name a directory. The stage
times are what the scheduler chooses the number of microbatches by.
"""

from __future__ import annotations

import uuid

from sipipe.engine.iterations import Iteration
from sipipe.engine.scheduling.concurrency import ConcurrencyController, MeasuredTimes
from sipipe.engine.setup import Setup
from sipipe.ipc.stage_times import LINE_WORDS, PhaseCounter, StageTimes
from sipipe.observe.format import Header
from sipipe.observe.live import LivePage
from sipipe.observe.metrics import Publisher
from sipipe.observe.phases import COUNTED_PHASES, MAIN_PHASE, Phase
from sipipe.observe.recorder import open_recorder


class Telemetry:
    """Made before the workers start, closed when they have ended."""

    def __init__(self, setup: Setup) -> None:
        model = str(setup.vllm_config.model_config.model)
        self.run = uuid.uuid4().hex
        """The same in all processes of an engine, different between engines."""
        self._page = LivePage.create(
            stages=setup.stages,
            ranks=setup.ranks,
            samplers=setup.samplers,
            inflight=setup.slots,
            model=model,
            engine=str(setup.vllm_config.parallel_config.data_parallel_rank),
        )
        self.path = self._page.path
        """Where the other processes find the page."""
        self.live = self._page.writer("executor")
        self._stage_times = StageTimes.create(
            stages=setup.stages, samplers=setup.samplers, directory=setup.config.shm_dir
        )
        self.times = self._stage_times.endpoint
        """Where the other processes find the stage times."""
        self._executor = [0] * LINE_WORDS  # written and read by this process alone
        counter = PhaseCounter(self._executor, COUNTED_PHASES["executor"], MAIN_PHASE["executor"])
        self._publisher = Publisher(self._page)
        self._publisher.start()
        self._recorder = open_recorder(
            setup.config.trace,
            Header(
                role="executor",
                stages=setup.stages,
                inflight=setup.slots,
                run=self.run,
                model=model,
            ),
            (self.live, counter),
        )

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
        header = self._page.header
        return MeasuredTimes(
            ConcurrencyController(stages=header.stages, slots=header.inflight),
            stages=[self._stage_times.stage(i) for i in range(header.stages)],
            samplers=[self._stage_times.sampler(i) for i in range(header.samplers)],
            executor=self._executor,
        )

    def close(self) -> None:
        """Write what is left of the trace, and let the page go."""
        self._recorder.close()
        self._publisher.close()
        self._stage_times.close()
        self._page.close()
