"""A draft model of its own on the last stage: vLLM's speculator for one, told of a pipeline of one stage.

vLLM's models ask the pipeline's group which layers are theirs, whether they embed tokens and whether they
end in a norm. On the last stage the answers are the target's. The draft model is whole here, so while it
is made and while it runs, the group is one of a single stage.

It reads no hidden states. Of each request it reads the tokens that the target has, and the one that was
drawn behind them: one token a request more than the target's pass had.

Who runs here: whoever follows BIC-I, while the stage is loaded; the device thread.
Relies on: nobody else asks for the pipeline's group while a draft model runs, since all threads of the
    process see the group of one stage then. vLLM's worker asks in each pass, by the device thread, too. What
    prepares inputs and publishes tokens reads what the runner noted when it was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed import parallel_state
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

ONE_STAGE = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True)
"""Answers to what vLLM's models ask of the pipeline's group, of one that has a single stage."""


@contextmanager
def one_stage() -> Iterator[None]:
    """While active, vLLM's models are told of a pipeline of one stage."""
    with patch.object(parallel_state, "_PP", ONE_STAGE):
        yield


class HostedDraftModel(StandaloneARSpeculator):
    """vLLM's speculator of a draft model, beside a stage; it makes as many drafts as it is asked for."""

    def load_draft_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        with one_stage():
            return super().load_draft_model(*args, **kwargs)

    def _run_model(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with one_stage():
            hidden: torch.Tensor = super()._run_model(*args, **kwargs)
        return hidden

    def propose(
        self, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Propose drafts as vLLM's, which makes all that it may whatever it is asked for.

        With ``num_speculative_tokens`` 0 the model only reads: what it returns is no draft.
        """
        most = self.num_speculative_steps
        steps = most if num_speculative_tokens is None else max(1, num_speculative_tokens)
        with patch.object(self, "num_speculative_steps", steps):
            drafts: torch.Tensor = super().propose(*args, **kwargs)
        return drafts
