"""What SiPipe's stage asks of vLLM's second runner, where there is no model.

Requests, block tables and input buffers are vLLM's own classes, on the host. SiPipe's preparation
fills a set of input buffers ahead, and :meth:`EmulatedRunner.begin` takes the batch from it as
``execute_model`` does. What vLLM's kernels would write on a device is dropped.

Who runs here: the device thread, as in :mod:`sipipe.worker.hooks.preparation`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.sequence import IntermediateTensors
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState

from sipipe.worker.hooks.preparation import StandInSampler
from sipipe.worker.inputs.buffers import PackedInputBuffers


class EmulatedRunner:
    """One stage's.

    Args:
        config: vLLM's.
        last: whether the stage is the last one.
        model: its ``compute_logits`` is called there.
        received: buffers of hidden states [tokens, hidden] that come from the stage before.
    """

    device = torch.device("cpu")
    lora_config = pp_handler = pcp_manager = fast_prefill = kv_block_zeroer = None
    execute_model_state: Any = None
    """Of the last stage's iteration that samples next."""
    is_pooling_model = False
    kv_connector = NO_OP_KV_CONNECTOR
    sampler = StandInSampler()
    num_speculative_steps = 0
    dcp_size = 1

    def __init__(
        self,
        config: VllmConfig,
        model: torch.nn.Module,
        received: dict[str, torch.Tensor],
        *,
        last: bool,
    ) -> None:
        scheduler, self.model_config = config.scheduler_config, config.model_config
        self.cache_config = config.cache_config
        self.is_first_pp_rank = True  # it has tokens, and nobody looks at them
        self.is_last_pp_rank, self.model = last, model
        requests = self.max_num_reqs = scheduler.max_num_seqs
        tokens = self.max_num_tokens = scheduler.max_num_batched_tokens
        self.intermediate_tensors = IntermediateTensors(received)
        self.model_state: Any = DefaultModelState.__new__(DefaultModelState)  # a plain decoder's
        self.model_state.prepare_attn = lambda: None
        self.prompt_logprobs_worker = SimpleNamespace(uses_prompt_logprobs=np.zeros(requests, bool))
        self.input_buffers = PackedInputBuffers(requests, tokens, requests, self.device)
        self.kv_caches: list[Any] = []
        self.kv_cache_config = SimpleNamespace(num_blocks=0)
        size = self.cache_config.block_size
        width = cdiv(self.model_config.max_model_len, size)
        # To vLLM, memory that the host and a device share is page-locked, which takes a GPU.
        with patch.object(buffer_utils, "is_uva_available", return_value=False):
            # For rows alone: no token is looked at.
            self.req_states = RequestState(requests, 1, tokens, 0, 1, self.device)
            self.block_tables = BlockTables([size], requests, tokens, [width], self.device)

    def begin(self, output: SchedulerOutput) -> InputBatch | None:
        """As ``execute_model``, up to the model's call; None: there is nothing to run."""
        states, tables = self.req_states, self.block_tables
        for req_id in sorted(output.finished_req_ids.union(output.preempted_req_ids or ())):
            states.remove_request(req_id)
        for new in output.scheduled_new_reqs:
            states.remove_request(new.req_id)
            states.add_request(new.req_id, 0, [], new.num_computed_tokens, 0)
            row = states.req_id_to_index[new.req_id]
            tables.append_block_ids(row, new.block_ids, overwrite=True)
            self.sampler.add_request(row, new.sampling_params)
        self.update_requests(output)
        for staged in (states.total_len, states.num_computed_tokens, *tables.block_tables):
            staged.clear_staged_writes()
        tokens = output.total_num_scheduled_tokens
        if not tokens:
            return None
        state, _ = self.gather_batch_req_state(output, False)
        desc = BatchExecutionDescriptor(CUDAGraphMode.NONE, tokens, None)
        batch: InputBatch = self.prepare_inputs(output, state, desc, 0)
        self.model_state.prepare_attn()  # tokens are there behind it
        return batch

    def sample_tokens(self, _: Any) -> Any:
        """As vLLM's, which nobody waits for."""
        state, self.execute_model_state = self.execute_model_state, None
        drawn = None
        if state is not None:
            drawn = self.sample(state.hidden_states, state.input_batch, None)[0].sampled_token_ids
        nothing = SimpleNamespace(prompt_logprobs_dict={}, prompt_token_id_logprobs_dict={})
        return SimpleNamespace(get_output=lambda: nothing, sampled_token_ids=drawn)

    def _prepared(self, *_: Any) -> Any:
        raise AssertionError("SiPipe prepares")

    update_requests = gather_batch_req_state = prepare_inputs = prepare_attn = _prepared
    sample: Any = _prepared
