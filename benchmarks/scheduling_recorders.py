"""The two schedulers of ``benchmarks.scheduling``, each noting the size of its microbatches."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from sipipe.engine.scheduling.scheduler import PipelineScheduler

__all__ = ["PipelineRecorder", "VllmRecorder"]


class _Recorder:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sizes = open(os.environ["SIPIPE_BENCH_SIZES"], "a")  # noqa: SIM115

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._sizes.write(f"{len(output.num_scheduled_tokens)} ")
        self._sizes.flush()
        return output


class VllmRecorder(_Recorder, Scheduler):
    """vLLM's scheduler."""


class PipelineRecorder(_Recorder, PipelineScheduler):
    """SiPipe's scheduler."""
