"""The executor's side of :mod:`sipipe.trace`: its recorder, and the page of live figures.

The page is what ``sipipe top`` and the Prometheus metrics read; every process of the engine writes
its own block. The recorder writes a trace file only where the settings name a directory.
"""

from __future__ import annotations

import uuid

from vllm.config import VllmConfig

from sipipe.config import SiPipeConfig
from sipipe.engine.scheduling.live_pace import LivePace
from sipipe.observe.live import LivePage
from sipipe.observe.metrics import Publisher
from sipipe.observe.recorder import open_recorder


class Telemetry:
    """Made before the workers start, closed when they have ended."""

    def __init__(
        self, vllm_config: VllmConfig, config: SiPipeConfig, *, samplers: int, slots: int
    ) -> None:
        parallel = vllm_config.parallel_config
        model = str(vllm_config.model_config.model)
        self.run = uuid.uuid4().hex
        """The same in all processes of an engine, different between engines."""
        self._page = LivePage.create(
            stages=parallel.pipeline_parallel_size,
            ranks=parallel.tensor_parallel_size,
            samplers=samplers,
            inflight=slots,
            model=model,
            engine=str(parallel.data_parallel_rank),
        )
        self.path = self._page.path
        """Where the other processes find the page."""
        self.live = self._page.writer("executor")
        self._publisher = Publisher(self._page)
        self._publisher.start()
        self.recorder = open_recorder(
            config.trace,
            "executor",
            stages=parallel.pipeline_parallel_size,
            inflight=slots,
            run=self.run,
            model=model,
            live=self.live,
        )

    def pace(self) -> LivePace:
        """The stage times on the page, for the scheduler."""
        return LivePace(self._page, slots=self._page.header.inflight)

    def close(self) -> None:
        """Write what is left of the trace, and let the page go."""
        self.recorder.close()
        self._publisher.close()
        self._page.close()
