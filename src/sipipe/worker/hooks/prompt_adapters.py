"""Scores of prompts where adapters may change the output projection (``--enable-lora``).

vLLM tells its LoRA layers the adapter of each row of logits that samples. It computes the scores of
prompts (``prompt_logprobs``) with the same layers and more rows, for which it tells them nothing: with
several requests in a pass the numbers of rows differ, which ends a CPU's worker, or a row gets another
request's adapter.

Who runs here: the device thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Compute = Callable[..., dict[str, Any]]
"""A function of vLLM's ``PromptLogprobsWorker``: logits function, hidden states, batch, and more."""


def score_prompts_by_adapters(runner: Any) -> None:
    """Have ``runner``, which draws tokens and has a LoRA configuration, look up the adapter of each row
    of a prompt that is scored."""
    worker = runner.prompt_logprobs_worker
    worker.compute_prompt_logprobs = _by_adapters(runner, worker.compute_prompt_logprobs)
    worker.compute_prompt_token_id_logprobs = _by_adapters(
        runner, worker.compute_prompt_token_id_logprobs
    )


def _by_adapters(runner: Any, compute: Compute) -> Compute:
    """``compute`` of vLLM's, with a logits function that tells the layers the adapters of its rows."""

    def compute_by_adapters(
        logits_fn: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        batch: Any,
        *args: Any,
    ) -> dict[str, Any]:
        lora_state = runner.lora_state

        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            of_requests = lora_state.lora_ids[batch.idx_mapping_np]
            of_tokens = tuple(of_requests.repeat(batch.num_scheduled_tokens))
            # vLLM hands slices of the hidden states over, with a row for each token of the batch.
            first = (rows.storage_offset() - hidden.storage_offset()) // hidden.stride(0)
            of_rows = of_tokens[first : first + len(rows)]
            # The next pass tells the layers its own: what it has is compared with what they were told.
            runner._set_active_loras(
                of_rows, of_tokens, lora_state.get_activate_loras(batch.req_ids)
            )
            return logits_fn(rows)

        return compute(logits_of, hidden, batch, *args)

    return compute_by_adapters
