"""Draws the rows of a second runner that ask for no more than a temperature, on the device.

Such a row needs vLLM's one kernel that draws and two numbers of its request. It needs nothing else that
vLLM's ``Sampler`` keeps, such as a count of every token of the vocabulary for each request. Its token
depends on (seed, position, logits) and nothing else, like a CPU sampler's; the random numbers are
others.

Who runs here: the worker's main thread, alone. Nothing waits for the device.
"""

from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample import gumbel

from sipipe.messages.params import is_plain
from sipipe.worker.hooks.preparation import StandInSampler


class DeviceSampler(StandInSampler):
    """Sampler in the place of vLLM's on the last stage, with a place for each of the runner's requests."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.plain = np.zeros(runner.max_num_reqs, np.bool_)
        """Requests, [max_num_reqs] by the runner's rows, that are drawn here."""
        self._fp64: bool = runner.model_config.use_fp64_gumbel
        # Buffers of vLLM's, as they are written for iteration i + 1 while the device may read those of i.
        self._temperatures = UvaBackedTensor(runner.max_num_reqs, dtype=torch.float32)
        self._seeds = UvaBackedTensor(runner.max_num_reqs, dtype=torch.int64)
        self._staged = False

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Note the parameters of a request that the runner has put into ``row``."""
        self.plain[row] = is_plain(params)
        seed = params.seed or 0  # the engine has given a seed to each request that brought none
        self._temperatures.np[row] = params.temperature
        self._seeds.np[row] = np.array(seed % 2**64, np.uint64).view(np.int64)
        self._staged = True

    def apply_staged_writes(self) -> None:
        """Copy new requests' parameters to the device; the runner calls this once a pass."""
        if self._staged:
            self._temperatures.copy_to_uva()
            self._seeds.copy_to_uva()
            self._staged = False

    def draw(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Tokens [n] int64 on the device, one of each row of ``logits`` [n, V].

        Args:
            rows: [n], the runner's row of each request.
            positions: [n], the position of the last token before the one to draw.
        """
        return gumbel.gumbel_sample(
            logits,
            rows,
            self._temperatures.gpu,
            self._seeds.gpu,
            positions,
            apply_temperature=True,
            is_drafting=False,
            use_fp64=self._fp64,
        )

    def __call__(self, logits: torch.Tensor, batch: Any) -> None:
        """Draw all rows while vLLM profiles memory, so that the kernel is compiled then too."""
        super().__call__(logits, batch)
        self.draw(logits, batch.idx_mapping, batch.positions[batch.logits_indices])
