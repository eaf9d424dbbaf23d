"""What stands in for two parts of vLLM's second runner that know of other stages or of sampling.

``PPHandler`` broadcasts sampled tokens from the last stage to the others, by a collective across
stages. SiPipe's stages share no process group, and the scheduler brings the tokens with the
scheduling output: :class:`TokenFeedback` takes them from there. ``Sampler`` keeps state for the
parameters of each request, a count of every token of the vocabulary among it; where samplers draw
on CPUs, :class:`StandInSampler` keeps nothing.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.sequence import IntermediateTensors
from vllm.utils import torch_utils
from vllm.v1.core.sched.output import SchedulerOutput


class TokenFeedback:
    """In place of vLLM's ``PPHandler``, in a worker of any stage. The first stage embeds the last
    token of each decoding request, and some models look at tokens on others too. vLLM's own
    ``postprocess_sampled`` writes them into the request states. Asked only where vLLM prepares its
    inputs itself (:class:`sipipe.worker.preparation.VllmPrepares`)."""

    def __init__(
        self, max_num_reqs: int, num_speculative_steps: int = 0, device: Any = "cpu", **_: Any
    ) -> None:
        assert not num_speculative_steps, "speculative decoding is refused at start-up"
        self.output: SchedulerOutput | None = None
        """The scheduling output that is about to run; its worker sets it."""
        self.states: Any = None
        """vLLM's request states; None where tokens are not needed or are known already."""
        self._device = device
        self._ones = torch.ones(max_num_reqs, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

    def get_prev_sampled_outputs(self, *_: Any, **__: Any) -> dict[str, torch.Tensor] | None:
        """The input token of each request that decodes in this scheduling output."""
        if self.output is None or self.states is None:
            return None
        cached = self.output.scheduled_cached_reqs
        index, prefill = self.states.req_id_to_index, self.states.prefill_len.np
        found = [
            (index[req_id], token_ids[0])
            # A warm-up brings no tokens: what it runs on is not looked at.
            for req_id, computed, token_ids in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=False
            )
            if computed >= prefill[index[req_id]]
        ]
        if not found:
            return None
        table = np.array(found, np.int64).T.copy()
        rows, tokens = torch_utils.async_tensor_h2d(table, device=self._device)
        return {
            "idx_mapping": rows,
            "sampled_tokens": tokens.unsqueeze(1),
            "num_sampled": self._ones[: len(found)],
            "num_rejected": self._zeros[: len(found)],
        }

    def receive(self, *_: Any, **__: Any) -> bool:
        """Nothing to wait for, on any stage but the last; False: no request has its token yet."""
        return False

    def broadcast(self, *_: Any, **__: Any) -> None:
        """Nothing to send: tokens return by way of the scheduler."""

    def on_req_idx_freed(self, req_idx: int) -> None:
        """Nothing is kept of a request."""

    def relay_aux_hidden_states(self, _: Any, result: IntermediateTensors) -> IntermediateTensors:
        """No auxiliary hidden states without speculative decoding."""
        return result


class StandInSampler:
    """In place of vLLM's ``Sampler`` where CPU samplers draw: nothing is kept of a request."""

    compute_nans = False

    def __init__(self, **_: Any) -> None:
        self.penalties_state = SimpleNamespace(output_bin_counts=None)

    def add_request(self, *_: Any) -> None:
        """The samplers are told by the engine."""

    def apply_staged_writes(self) -> None:
        """Nothing is staged."""

    def __call__(self, logits: torch.Tensor, _: Any) -> None:
        """Called while memory is profiled: logits being copied to the host are there twice."""
        torch.empty_like(logits)
