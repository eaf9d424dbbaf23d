"""vLLM's configuration, as an engine of SiPipe's has it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any
from unittest.mock import patch

from vllm.config import VllmConfig
from vllm.config.utils import config as config_class

from sipipe.engine.setup import compatibility
from sipipe.engine.setup.derived import settings_of
from sipipe.engine.setup.speculative_config import without_speculation


@config_class(config={"arbitrary_types_allowed": True})
class PipelineVllmConfig(VllmConfig):
    """A ``VllmConfig`` for SiPipe's executor. The plugin has ``EngineArgs`` make this class.

    Its engine keeps ``inflight`` microbatches in flight, where vLLM derives that number from the
    parallel configuration. It runs on vLLM's second runner, which vLLM does not take on CPUs without
    Triton; SiPipe has the kernels."""

    replicas: int = 1
    """Number of engines of this host. The process of each one knows its own number only, which is
    ``data_parallel_index``."""

    ahead: int = 0
    """Microbatches that are scheduled before there is room for them in the pipeline."""

    announced: bool = False
    """True if a command of SiPipe's has said in the foreground how the engine is set up."""

    derived: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Results that follow from this configuration (:mod:`sipipe.engine.setup.derived`), by their class,
    each with the part of the configuration that it follows from."""

    @property
    def use_v2_model_runner(self) -> bool:
        return True

    def _validate_v2_model_runner(self) -> None:
        compatibility.check_kernels(self)
        # Kernels are all that the second runner wants Triton for.
        with patch.object(sys.modules[VllmConfig.__module__], "HAS_TRITON", True):
            super()._validate_v2_model_runner()

    def _get_v2_model_runner_unsupported_features(self) -> list[str]:
        # Samplers verify drafts, and the runner takes them for other tokens.
        get_unsupported = VllmConfig._get_v2_model_runner_unsupported_features
        features: list[str] = get_unsupported(without_speculation(self))
        return features

    @property
    def max_concurrent_batches(self) -> int:
        """Microbatches that EngineCore's batch queue holds: those in flight, and those that are
        scheduled ahead."""
        stages = self.parallel_config.pipeline_parallel_size
        return settings_of(self).resolved_inflight(stages) + self.ahead
