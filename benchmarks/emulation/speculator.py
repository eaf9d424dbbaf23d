"""A draft head that only takes time, in the place of vLLM's speculator.

SiPipe's part is as on a GPU: which rows wait for their tokens, the request for drafts, and when the
device thread takes it (:mod:`sipipe.worker.drafter`).

Who runs here: the device thread.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.emulation.profile import StageProfile

if TYPE_CHECKING:
    from benchmarks.emulation.worker import EmulatedDevice
    from sipipe.worker.hooks.head import HeadBatch


class EmulatedSpeculator:
    """What SiPipe uses of vLLM's speculators, by their names. Every draft is token 0.

    Args:
        config: vLLM's, of the stage.
        speculative: vLLM's ``SpeculativeConfig``.
        profile: times of the head's layer and of the output projection.
        device: the last stage's.
    """

    kv_cache_config = SimpleNamespace(kv_cache_groups=())
    """There is no cache."""
    block_tables: Any = None
    draft_max_seq_len = 0

    def __init__(
        self, config: Any, speculative: Any, profile: StageProfile, device: EmulatedDevice
    ) -> None:
        self.vllm_config = config
        self.num_speculative_steps = int(speculative.num_speculative_tokens)
        self.max_model_len = int(config.model_config.max_model_len)
        requests = config.scheduler_config.max_num_seqs
        tokens = config.scheduler_config.max_num_batched_tokens
        self.input_buffers = SimpleNamespace(
            query_start_loc=torch.zeros(requests + 1, dtype=torch.int32),
            seq_lens=torch.zeros(requests, dtype=torch.int32),
            positions=torch.zeros(tokens, dtype=torch.int64),
        )
        self._profile = profile
        self._device = device

    def _build_attn_metadata(self, *_: Any, **__: Any) -> None:
        """Make nothing: nothing attends."""

    def propose(self, batch: HeadBatch, *_: Any, num_speculative_tokens: int) -> torch.Tensor:
        """Take the time of a pass over ``batch``, and of one more for each draft but the first, and wait
        for it where there are drafts: they are to go to the engine. Returns drafts [B, k]."""
        lengths = batch.seq_lens_cpu_upper_bound.numpy()
        scheduled = batch.num_scheduled_tokens
        count = batch.num_reqs
        self._device.launch(self._profile.seconds(lengths - scheduled, scheduled))
        if num_speculative_tokens:
            self._device.launch(self._profile.projection(count))
            single = self._profile.seconds(lengths, np.ones(count, np.int32))
            single += self._profile.projection(count)
            self._device.launch((num_speculative_tokens - 1) * single)
            self._device.wait(self._device.mark())
        return torch.zeros(count, num_speculative_tokens, dtype=torch.int64)
