"""Iterations in flight: what each still waits for, and the future that vLLM's engine holds.

Who runs here
    vLLM's engine thread opens iterations; the gather thread delivers tokens; the events thread
    delivers what workers say and failures. All under the executor's lock.
Guarantees
    A future is resolved once: with the output when tokens and worker extras are both in, or with
    the failure. After :meth:`fail` nothing new can be opened.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from sipipe.engine.requests import Iteration
from sipipe.messages.step import Grammar, Sampled, int32_view


@dataclass(slots=True)
class InFlight:
    """One iteration between its publication and its result."""

    number: int
    slot: int
    iteration: Iteration
    future: Future[ModelRunnerOutput] = field(default_factory=Future)
    began: float = field(default_factory=time.monotonic)
    published: int = field(default_factory=time.monotonic_ns)
    """When it was on BIC-I, in monotonic nanoseconds; the wait for its tokens begins then."""
    grammar: Grammar | None = None
    sampled: dict[int, Sampled] | None = None
    """Tokens by sampler; None while they are out."""
    extras: Mapping[str, Any] | None = None
    """Prompt log-probabilities by request id, from the last stage; None while they are out."""

    @property
    def needs_samplers(self) -> bool:
        return bool(self.iteration.samplers)

    @property
    def needs_worker(self) -> bool:
        """Whether the last stage reports: it has extras, or no sampler will."""
        return bool(self.iteration.prompt_logprobs) or not self.needs_samplers

    @property
    def complete(self) -> bool:
        return not (self.needs_samplers and self.sampled is None) and not (
            self.needs_worker and self.extras is None
        )

    def waits_for(self) -> str:
        """For an error message: what is still out."""
        missing = []
        if self.needs_worker and self.extras is None:
            missing.append("the last stage")
        if self.needs_samplers and self.sampled is None:
            missing.append("samplers " + ", ".join(map(str, self.iteration.samplers)))
        return " and ".join(missing) or "nothing"


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


def build_output(
    inflight: InFlight,
) -> tuple[ModelRunnerOutput, list[tuple[str, int]], list[tuple[str, str]]]:
    """The output vLLM's scheduler expects, the tokens by request id, and the failed requests.

    A request whose logits have no distribution gets no token; it comes back in the third value
    with the sampler's reason.
    """
    iteration = inflight.iteration
    index = {request_id: i for i, request_id in enumerate(iteration.request_ids)}
    tokens: list[list[int]] = [[] for _ in iteration.request_ids]
    drawn: list[tuple[str, int]] = []
    errors = list(iteration.errors.items())
    logprobs: dict[int, LogprobsLists] = {}
    for part in (inflight.sampled or {}).values():
        rows = int32_view(part.rows).tolist()
        for row, token in zip(rows, int32_view(part.tokens).tolist(), strict=True):
            request_id = iteration.sampled[row]
            if token < 0 or request_id in iteration.errors:
                continue
            tokens[index[request_id]].append(token)
            drawn.append((request_id, token))
        for lp in part.logprobs:
            logprobs[index[iteration.sampled[lp.row]]] = _logprobs_lists(
                int32_view(lp.token_ids), np.frombuffer(lp.values, dtype="<f4"), lp.rank
            )
        errors += [(iteration.sampled[row], reason) for row, reason in part.errors]
    output = ModelRunnerOutput(
        req_ids=iteration.request_ids,
        req_id_to_index=index,
        sampled_token_ids=tokens,
        logprobs=SampledLogprobs(logprobs) if logprobs else None,  # type: ignore[arg-type]
        prompt_logprobs_dict=dict(inflight.extras or {}),
    )
    return output, drawn, errors


_NO_LOGPROBS = LogprobsLists(
    np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32), np.zeros(0, np.int32)
)


def _logprobs_lists(
    token_ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32], rank: int
) -> LogprobsLists:
    return LogprobsLists(token_ids[None, :], values[None, :], np.asarray([rank]), None)
