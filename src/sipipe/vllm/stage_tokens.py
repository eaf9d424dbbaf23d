"""Fill in the sampled tokens that vLLM's scheduler leaves out of its outputs.

SiPipe's stage runner reads every cached request's input tokens from
``scheduled_cached_reqs.new_token_ids``. vLLM's scheduler fills that field under pipeline
parallelism without asynchronous scheduling; with one stage it expects the worker to remember what
it sampled. :class:`TokenHistory` does the remembering, beside the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TokenHistory:
    """Tokens sampled so far for each running request."""

    def __init__(self) -> None:
        self._prompts: dict[str, Sequence[int]] = {}
        self._outputs: dict[str, list[int]] = {}

    def record(self, req_ids: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        """Append what an iteration sampled; ``tokens[i]`` may be empty."""
        for req_id, sampled in zip(req_ids, tokens, strict=True):
            if req_id in self._outputs:
                self._outputs[req_id].extend(sampled)

    def fill(self, output: Any) -> None:
        """Set ``new_token_ids`` of a scheduling output where the scheduler left it empty."""
        for req_id in output.finished_req_ids:
            self._prompts.pop(req_id, None)
            self._outputs.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            self._prompts[new.req_id] = new.prompt_token_ids or ()
            self._outputs[new.req_id] = []
        cached = output.scheduled_cached_reqs
        if cached.new_token_ids or not cached.req_ids:
            return
        cached.new_token_ids = [
            self._slice(req_id, first, output.num_scheduled_tokens[req_id])
            for req_id, first in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ]

    def _slice(self, req_id: str, first: int, count: int) -> list[int]:
        prompt, sampled = self._prompts[req_id], self._outputs[req_id]
        if first >= len(prompt):
            return sampled[first - len(prompt) : first - len(prompt) + count]
        return [*prompt, *sampled][first : first + count]
