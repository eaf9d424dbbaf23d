"""SiPipe's worker classes: vLLM's own, in a world of their stage.

They differ from vLLM's in one thing, how torch.distributed and the model-parallel groups are set
up, and in one repair: the CPU worker skips its warm-up in eager mode, and with it the allocation
of the buffer that receives hidden states, which makes stock ``--enforce-eager`` with pipeline
stages fail at the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from sipipe.messages.places import StagePlace
from sipipe.worker.world import stage_world


class _StageWorker:
    """Mixed into a vLLM worker class, before it in the method resolution order."""

    place: StagePlace | None = None
    """Set by the process before ``init_device``; None only in a worker nobody placed."""

    def init_device(self) -> None:
        assert self.place is not None, "the process places its worker before init_device"
        with stage_world(self.place):
            super().init_device()  # type: ignore[misc]


class CPUStageWorker(_StageWorker, CPUWorker):
    """One tensor-parallel rank of a stage on CPU cores."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if self.place is not None and not self.place.is_first:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=self.scheduler_config.max_num_batched_tokens,
                dtype=self.model_config.dtype,
                device=torch.device("cpu"),
            )


class GPUStageWorker(_StageWorker, GPUWorker):
    """One tensor-parallel rank of a stage on a CUDA device."""
