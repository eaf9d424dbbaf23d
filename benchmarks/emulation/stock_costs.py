"""What a stage without one of SiPipe's techniques pays, on an emulated device.

The order of things is code: rows that the last stage draws, one set of input buffers, hidden states
that are described (:mod:`benchmarks.ablation`). What that costs a GPU is time that the profile
gives (:class:`benchmarks.emulation.profile.StockCosts`).

Who runs here: the device thread; the preparing thread in what :meth:`Costs.open` puts around
SiPipe's preparation.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks.ablation import AWAY
from benchmarks.emulation.profile import Profile, StageProfile
from sipipe.messages.params import is_plain
from sipipe.worker.hooks import draws
from sipipe.worker.hooks.preparation import SiPipePrepares, StandInSampler
from sipipe.worker.inputs.model_input import ModelInput


class Costs:
    """Of one stage.

    Args:
        device: what takes the time.
    """

    def __init__(self, profile: Profile, stage: StageProfile, device: Any) -> None:
        self._stock, self._stage, self._device = profile.stock, stage, device

    def open(self) -> None:
        """From now on preparation takes its time, and a last stage that draws, too."""
        draws.DeviceSampler = lambda runner: EmulatedSampler(runner, self)  # type: ignore[misc, assignment]
        prepare, share, layers = SiPipePrepares.prepare, self._stock.preparation, self._stage.layers

        if not share:
            return

        def prepared(self: SiPipePrepares, inputs: ModelInput) -> None:
            prepare(self, inputs)
            time.sleep(share * layers(inputs.num_tokens))  # wait: the emulated host's time; nobody

        SiPipePrepares.prepare = prepared  # type: ignore[method-assign]

    def before_pass(self) -> None:
        """Hidden states have been asked for."""
        if "Posting" in AWAY:
            self._device.launch(self._stock.stall)

    def after_pass(self) -> None:
        """Everything of the iteration is launched: the next one is prepared when it has run."""
        if "Overlap" in AWAY:
            self._device.wait(self._device.mark())

    def sample(self, rows: int) -> None:
        longer = self._stock.last_stage * self._stage.layers(rows)
        self._device.launch(max(0.0, longer - self._stage.projection(rows)))


class EmulatedSampler(StandInSampler):
    """In place of :class:`sipipe.worker.hooks.device_sampler.DeviceSampler`: token 0 for everybody."""

    def __init__(self, runner: Any, costs: Costs) -> None:
        super().__init__()
        self.plain = np.zeros(runner.max_num_reqs, np.bool_)
        self._costs = costs

    def add_request(self, row: int, params: Any) -> None:
        self.plain[row] = is_plain(params)

    def draw(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        self._costs.sample(len(logits))
        return torch.zeros(len(logits), dtype=torch.int64)
