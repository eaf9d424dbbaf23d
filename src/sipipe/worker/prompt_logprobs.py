"""Log-probabilities of prompt tokens, from a stage's hidden states.

A rare request, done with vLLM's own scoring on the last stage's device: the rows of the hidden
states that predict prompt tokens go through ``compute_logits`` and vLLM's sampler gathers the
values, chunk after chunk, into one result for each request.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors

from sipipe.worker.inputs.model_input import ModelInput, PromptRows


class PromptLogprobs:
    """Results under way of requests that asked for ``prompt_logprobs``."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self._under_way: dict[str, LogprobsTensors] = {}

    def forget(self, req_ids: set[str]) -> None:
        """Drop what finished or aborted requests had gathered."""
        for req_id in req_ids:
            self._under_way.pop(req_id, None)

    def gather(self, inputs: ModelInput, hidden: torch.Tensor) -> dict[str, LogprobsTensors]:
        """Score this iteration's chunks; returns the results of prompts that are complete.

        All tensor-parallel ranks of the stage must call it, since scoring gathers logits.
        """
        complete: dict[str, LogprobsTensors] = {}
        for chunk in inputs.prompt_rows:
            result = self._score(chunk, hidden)
            if chunk.done:
                complete[chunk.req_id] = result
                del self._under_way[chunk.req_id]
        return complete

    def _score(self, chunk: PromptRows, hidden: torch.Tensor) -> LogprobsTensors:
        stock = self._stock
        count = len(chunk.targets)
        wanted = stock.input_batch.vocab_size if chunk.num_logprobs == -1 else chunk.num_logprobs
        result = self._under_way.get(chunk.req_id)
        if result is None:
            result = LogprobsTensors.empty_cpu(chunk.prompt_len - 1, wanted + 1)
            self._under_way[chunk.req_id] = result
        if not count:
            return result
        logits = stock.model.compute_logits(hidden[chunk.first_row : chunk.first_row + count])
        if logits is None:  # a platform that gathers logits on rank 0 only
            return result
        if stock.model_config.logprobs_mode in ("raw_logits", "processed_logits"):
            scores = logits.to(torch.float32)
        else:
            scores = stock.sampler.compute_logprobs(logits)
        targets = torch.from_numpy(chunk.targets).to(device=scores.device, dtype=torch.int64)
        ids, values, ranks, *_ = stock.sampler.gather_logprobs(scores, wanted, targets)
        rows = slice(chunk.start, chunk.start + count)
        result.logprob_token_ids[rows].copy_(ids)
        result.logprobs[rows].copy_(values)
        result.selected_token_ranks[rows].copy_(ranks)
        return result
