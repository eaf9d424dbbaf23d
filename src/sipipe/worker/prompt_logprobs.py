"""Log-probabilities of prompt tokens, for the rare request that asks for them.

The preparing thread finds the rows of a batch that predict prompt tokens (:func:`find_prompt_chunks`).
The device thread of the last stage scores them with vLLM's own sampler, chunk after chunk, into
one result for each request (:class:`PromptLogprobs`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsTensors

from sipipe.worker.inputs.model_input import ModelInput, PromptChunk


def find_prompt_chunks(
    asked: dict[str, int],
    inputs: ModelInput,
    prompts: Sequence[Sequence[int]],
    num_computed_tokens: NDArray[np.int32],
    query_start_loc: NDArray[np.int32],
) -> None:
    """Add to ``inputs.prompt_chunks`` what this iteration computes of the prompts to be scored.

    Args:
        asked: by request, how many alternatives it wants for each prompt token; requests whose
            prompt is complete are removed.
        inputs: the iteration, its ``req_ids`` set.
        prompts: [B], prompt token ids in batch order.
        num_computed_tokens: [B], before this iteration.
        query_start_loc: [B + 1], the first token of each request in the batch.
    """
    for row, req_id in enumerate(inputs.req_ids):
        num_logprobs = asked.get(req_id)
        if num_logprobs is None:
            continue
        prompt = prompts[row]
        start = int(num_computed_tokens[row])
        left = len(prompt) - (start + 1)
        amount = int(query_start_loc[row + 1] - query_start_loc[row])
        # As in vLLM, a chunk that ends one token before the prompt does is not the last:
        # the result goes out with the first sampled token.
        done = amount > left
        count = max(min(amount, left), 0)
        inputs.prompt_chunks.append(
            PromptChunk(
                req_id=req_id,
                first_row=int(query_start_loc[row]),
                start=start,
                targets=np.array(prompt[start + 1 : start + 1 + count], np.int32),
                num_logprobs=num_logprobs,
                prompt_len=len(prompt),
                done=done,
            )
        )
        if done:
            del asked[req_id]


class PromptLogprobs:
    """Results under way of requests that asked for ``prompt_logprobs``."""

    def __init__(self, vllm_runner: Any) -> None:
        self._vllm_runner = vllm_runner
        self._under_way: dict[str, LogprobsTensors] = {}

    def remove(self, req_ids: set[str]) -> None:
        """Drop what finished or aborted requests had gathered."""
        for req_id in req_ids:
            self._under_way.pop(req_id, None)

    def gather(self, inputs: ModelInput, hidden: torch.Tensor) -> dict[str, LogprobsTensors]:
        """Score this iteration's chunks; returns the results of prompts that are complete.

        All tensor-parallel ranks of the stage must call it, since scoring gathers logits.
        """
        complete: dict[str, LogprobsTensors] = {}
        for chunk in inputs.prompt_chunks:
            result = self._score(chunk, hidden)
            if chunk.done:
                complete[chunk.req_id] = result
                del self._under_way[chunk.req_id]
        return complete

    def _score(self, chunk: PromptChunk, hidden: torch.Tensor) -> LogprobsTensors:
        runner = self._vllm_runner
        count = len(chunk.targets)
        wanted = runner.input_batch.vocab_size if chunk.num_logprobs == -1 else chunk.num_logprobs
        result = self._under_way.get(chunk.req_id)
        if result is None:
            result = LogprobsTensors.empty_cpu(chunk.prompt_len - 1, wanted + 1)
            self._under_way[chunk.req_id] = result
        if not count:
            return result
        logits = runner.model.compute_logits(hidden[chunk.first_row : chunk.first_row + count])
        if logits is None:  # a platform that gathers logits on rank 0 only
            return result
        if runner.model_config.logprobs_mode in ("raw_logits", "processed_logits"):
            scores = logits.to(torch.float32)
        else:
            scores = runner.sampler.compute_logprobs(logits)
        targets = torch.from_numpy(chunk.targets).to(torch.int64)
        # Not compiled: the first such request would hold everybody up for up to a minute, to save
        # one byte a logit.
        with torch.compiler.set_stance("force_eager"):
            ids, values, ranks, *_ = runner.sampler.gather_logprobs(scores, wanted, targets)
        rows = slice(chunk.start, chunk.start + count)
        result.logprob_token_ids[rows].copy_(ids)
        result.logprobs[rows].copy_(values)
        result.selected_token_ranks[rows].copy_(ranks)
        return result
