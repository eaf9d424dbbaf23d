"""SiPipe's worker classes: vLLM's own, in a world of their stage.

They differ from vLLM's in one thing, how torch.distributed and the model-parallel groups are set
up, and in one repair: the CPU worker skips its warm-up in eager mode, and with it the allocation
of the buffer that receives hidden states, which makes stock ``--enforce-eager`` with pipeline
stages fail at the first step.
"""

from types import ModuleType
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker

from sipipe.messages.places import StagePlace
from sipipe.worker.world import stage_world


class _StageWorker:
    """Mixed into a vLLM worker class, before it in the method resolution order."""

    vllm_module: ModuleType
    """Where vLLM's class is defined."""
    place: StagePlace | None = None
    """Set by the process before ``init_device``; None only in a worker nobody placed."""

    def init_device(self) -> None:
        assert self.place is not None, "the process places its worker before init_device"
        with stage_world(self.place, self.vllm_module):
            super().init_device()  # type: ignore[misc]


class GPUStageWorker(_StageWorker, gpu_worker.Worker):
    """One tensor-parallel rank of a stage on a CUDA device."""

    vllm_module = gpu_worker


# Not elsewhere: to import vLLM's CPU worker replaces torch's CUDA streams, events and memory
# figures by stand-ins, in the whole process.
if current_platform.is_cpu():
    from vllm.v1.worker import cpu_worker

    class CPUStageWorker(_StageWorker, cpu_worker.CPUWorker):
        """One tensor-parallel rank of a stage on CPU cores."""

        vllm_module = cpu_worker

        def load_model(self, *args: Any, **kwargs: Any) -> None:
            super().load_model(*args, **kwargs)
            runner = self.model_runner
            if self.place is not None and not self.place.is_first:
                runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                    batch_size=self.scheduler_config.max_num_batched_tokens,
                    dtype=self.model_config.dtype,
                    device=torch.device("cpu"),
                )
