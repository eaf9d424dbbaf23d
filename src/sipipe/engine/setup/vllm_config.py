"""vLLM's configuration as an engine of ours has it."""

from __future__ import annotations

import sys
from unittest.mock import patch

from vllm.config import VllmConfig
from vllm.config.utils import config as config_class

from sipipe.config import SiPipeConfig
from sipipe.engine.scheduling.speculation import without_speculation
from sipipe.engine.setup import compatibility


@config_class(config={"arbitrary_types_allowed": True})
class PipelineVllmConfig(VllmConfig):
    """A VllmConfig whose engine keeps ``inflight`` microbatches in flight, where vLLM derives that
    number from the parallel configuration, and on vLLM's second runner, which vLLM does not take on
    CPUs without Triton; SiPipe has the kernels. The plugin has ``EngineArgs`` make this class."""

    replicas: int = 1
    """Engines of this host. Each one's process knows its number only, ``data_parallel_index``."""

    ahead: int = 0
    """Microbatches that are scheduled before there is room for them in the pipeline."""

    announced: bool = False
    """Whether a command of ours has said in the foreground how the engine is set up."""

    @property
    def use_v2_model_runner(self) -> bool:
        return True

    def _validate_v2_model_runner(self) -> None:
        compatibility.check_kernels(self)
        # Kernels are all that the second runner wants Triton for.
        with patch.object(sys.modules[VllmConfig.__module__], "HAS_TRITON", True):
            super()._validate_v2_model_runner()

    def _get_v2_model_runner_unsupported_features(self) -> list[str]:
        # Drafts are not the runner's business.
        unsupported = VllmConfig._get_v2_model_runner_unsupported_features
        found: list[str] = unsupported(without_speculation(self))
        return found

    @property
    def max_concurrent_batches(self) -> int:
        config = SiPipeConfig.from_additional_config(self.additional_config)
        slots = config.resolved_inflight(self.parallel_config.pipeline_parallel_size)
        return slots + self.ahead
