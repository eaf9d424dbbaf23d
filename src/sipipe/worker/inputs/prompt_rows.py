"""Which rows of a batch predict prompt tokens whose log-probabilities somebody asked for.

The CPU executor's half of prompt log-probabilities; :mod:`sipipe.worker.prompt_logprobs`
scores the rows on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sipipe.worker.inputs.model_input import ModelInput, PromptRows


class PromptRequests:
    """Requests whose prompt is still to be scored. Empty for most of an engine's life."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, req_id: str, num_logprobs: int) -> None:
        """A new request wants ``num_logprobs`` alternatives for each prompt token."""
        self._asked[req_id] = num_logprobs

    def forget(self, req_id: str) -> None:
        """The request has finished or was aborted."""
        self._asked.pop(req_id, None)

    def find(
        self,
        inputs: ModelInput,
        prompts: Sequence[Sequence[int]],
        computed: np.ndarray,
        query_start: np.ndarray,
    ) -> None:
        """Add to ``inputs.prompt_rows`` what this iteration computes of their prompts.

        Args:
            inputs: the iteration, its ``req_ids`` set.
            prompts: [B], prompt token ids in batch order.
            computed: [B], tokens computed before this iteration.
            query_start: [B + 1], the first token of each sequence in the batch.
        """
        for row, req_id in enumerate(inputs.req_ids):
            asked = self._asked.get(req_id)
            if asked is None:
                continue
            prompt = prompts[row]
            start = int(computed[row])
            left = len(prompt) - (start + 1)
            amount = int(query_start[row + 1] - query_start[row])
            # As in vLLM, a chunk that ends one token before the prompt does is not the last:
            # the result goes out with the first sampled token.
            done = amount > left
            count = max(min(amount, left), 0)
            inputs.prompt_rows.append(
                PromptRows(
                    req_id=req_id,
                    first_row=int(query_start[row]),
                    start=start,
                    targets=np.array(prompt[start + 1 : start + 1 + count], np.int32),
                    num_logprobs=asked,
                    prompt_len=len(prompt),
                    done=done,
                )
            )
            if done:
                del self._asked[req_id]
