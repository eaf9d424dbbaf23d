"""What SiPipe's stage sees of vLLM's second runner, for runners that have no vLLM model behind them.

:class:`StandInRunner` has the attributes that SiPipe reads, and makes vLLM's calls in vLLM's order.
A subclass says what is in them: :class:`benchmarks.emulation.runner.EmulatedRunner` takes time and
computes nothing, ``tests.worker.arithmetic.Runner`` computes with integers on the host,
``tests.worker.integer_runner.Runner`` on the emulated device.

When a new vLLM calls something else, or SiPipe reads more of the runner, this file changes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
from vllm.v1.worker.gpu.model_states.default import DefaultModelState


def plain_model_state() -> Any:
    """The model state of a plain decoder, which keeps nothing of a request.

    SiPipe asks for its class; only the call that ``execute_model`` makes has to work.
    """
    state = DefaultModelState.__new__(DefaultModelState)
    state.prepare_attn = lambda *_: None
    return state


class StandInRunner:
    """One stage's runner.

    Args:
        first: Whether this is the first stage, which has token ids.
        last: Whether this is the last stage, which draws tokens.
        requests: Requests that the stage knows at most.
        tokens: Tokens of a batch at most.
        model: Its ``compute_logits`` is called on the last stage.
        model_config: vLLM's, or what SiPipe reads of it.
        received: Buffers [tokens, hidden size] of hidden states that come from the stage before.

    A subclass sets ``model_state``, ``req_states`` and ``block_tables``.
    """

    device = torch.device("cpu")
    lora_config = pcp_manager = fast_prefill = kv_block_zeroer = pp_handler = None
    is_pooling_model = False
    num_speculative_steps = 0
    dcp_size = 1
    kv_connector: Any = NO_OP_KV_CONNECTOR
    execute_model_state: Any = None
    """The last stage's batch and hidden states between ``execute_model`` and ``sample_tokens``."""
    cache_config: Any = SimpleNamespace(mamba_cache_mode="none")

    model_state: Any
    req_states: Any
    block_tables: Any
    sampler: Any
    pp_handler: Any

    def __init__(
        self,
        *,
        first: bool,
        last: bool,
        requests: int,
        tokens: int,
        model: torch.nn.Module,
        model_config: Any,
        received: dict[str, torch.Tensor],
    ) -> None:
        self.is_first_pp_rank = first
        self.is_last_pp_rank = last
        self.max_num_reqs = requests
        self.max_num_tokens = tokens
        self.model = model
        self.model_config = model_config
        self.intermediate_tensors = IntermediateTensors(received)
        wants_scores = np.zeros(requests, bool)
        self.prompt_logprobs_worker = SimpleNamespace(uses_prompt_logprobs=wants_scores)

    def get_model(self) -> torch.nn.Module:
        return self.model

    def begin(self, output: SchedulerOutput) -> tuple[Any, Any] | None:
        """Do what ``execute_model`` does before it calls the model.

        Returns:
            The batch, and what :meth:`attend` made of it; None if there is nothing to run.
        """
        self.update_pp_decode_requests()
        for req_id in sorted(output.finished_req_ids.union(output.preempted_req_ids or ())):
            self.remove_request(req_id)
        for new in output.scheduled_new_reqs:
            self.remove_request(new.req_id)
            row = self.add_request(new)
            self.block_tables.append_block_ids(row, new.block_ids, overwrite=True)
            if self.is_last_pp_rank:
                self.sampler.add_request(row, new.sampling_params)
        self.update_requests(output)
        self.apply_staged_writes()
        if not output.total_num_scheduled_tokens:
            return None
        state, _ = self.gather_batch_req_state(output, False)
        batch = self.prepare_inputs(output, state, self.batch_descriptor(output), 0)
        return batch, self.attend(batch)

    # ---- a subclass's ---------------------------------------------------------------------------

    def remove_request(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        raise NotImplementedError

    def add_request(self, new: Any) -> int:
        """Give a request, which is not known, a row; returns it."""
        raise NotImplementedError

    def apply_staged_writes(self) -> None:
        """Write what has been staged for the device."""
        self.block_tables.apply_staged_writes()

    def batch_descriptor(self, output: SchedulerOutput) -> Any:
        """Decide the padding of a batch: ``num_tokens``, and ``num_reqs`` or None."""
        return SimpleNamespace(num_tokens=output.total_num_scheduled_tokens, num_reqs=None)

    def attend(self, batch: Any) -> Any:
        """Prepare attention: block tables and slot mappings of ``batch``."""
        attention = self.prepare_attn(batch)
        self.model_state.prepare_attn(batch)
        return attention

    # ---- calls that SiPipe's preparation and samplers put theirs in the place of ------------------

    def _replaced(self, *_: Any) -> Any:
        raise AssertionError("this call is SiPipe's once the stage is open")

    update_pp_decode_requests: Any = _replaced
    update_requests: Any = _replaced
    gather_batch_req_state: Any = _replaced
    prepare_inputs: Any = _replaced
    prepare_attn: Any = _replaced
    postprocess_num_computed_tokens: Any = _replaced
    postprocess_sampled: Any = _replaced
    sample: Any = _replaced
