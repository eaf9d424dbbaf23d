"""A complete iteration as vLLM's scheduler wants to see it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from sipipe.engine.iterations import Iteration
from sipipe.messages.step import int32_view


class SampledLogprobs:
    """Log-probabilities by request, each as wide as it was asked for.

    Stands in for vLLM's ``LogprobsLists`` of a whole batch, of which the scheduler uses
    ``slice_request`` only; nothing is padded to the widest request.
    """

    def __init__(self, rows: dict[int, LogprobsLists]) -> None:
        self._rows = rows

    def slice_request(self, req_idx: int, num_positions: int) -> LogprobsLists:
        """Those of one request; empty while it is in the middle of its prompt."""
        return self._rows[req_idx] if num_positions else _NO_LOGPROBS


def build_output(iteration: Iteration) -> ModelRunnerOutput:
    """The output of a complete iteration, and with it what fails: ``iteration.errors``.

    A request whose logits have no distribution, or whose parameters no sampler takes, gets no
    token.
    """
    work = iteration.work
    index = {request_id: i for i, request_id in enumerate(work.request_ids)}
    tokens: list[list[int]] = [[] for _ in work.request_ids]
    logprobs: dict[int, LogprobsLists] = {}
    iteration.errors.update(work.errors)
    for part in (iteration.tokens or {}).values():
        rows = int32_view(part.rows).tolist()
        for row, token in zip(rows, int32_view(part.tokens).tolist(), strict=True):
            request_id = work.sampled[row]
            if token >= 0 and request_id not in work.errors:
                tokens[index[request_id]].append(token)
        for lp in part.logprobs:
            logprobs[index[work.sampled[lp.row]]] = _logprobs_lists(
                int32_view(lp.token_ids), np.frombuffer(lp.values, dtype="<f4"), lp.rank
            )
        for row, reason in part.errors:
            iteration.errors.setdefault(work.sampled[row], reason)
    return ModelRunnerOutput(
        req_ids=work.request_ids,
        req_id_to_index=index,
        sampled_token_ids=tokens,
        logprobs=SampledLogprobs(logprobs) if logprobs else None,
        prompt_logprobs_dict=dict(iteration.prompt_logprobs or {}),
    )


_NO_LOGPROBS = LogprobsLists(
    np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32), np.zeros(0, np.int32)
)


def _logprobs_lists(
    token_ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32], rank: int
) -> LogprobsLists:
    return LogprobsLists(token_ids[None, :], values[None, :], np.asarray([rank]), None)
