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

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from benchmarks.emulation.stand_in_runner import StandInRunner, plain_model_state
from sipipe.worker.hooks.preparation import StandInSampler
from sipipe.worker.inputs.buffers import PackedInputBuffers


class EmulatedRunner(StandInRunner):
    """One stage's.

    Args:
        config: vLLM's.
        last: whether the stage is the last one.
        model: its ``compute_logits`` is called there.
        received: buffers of hidden states [tokens, hidden] that come from the stage before.
    """

    sampler = StandInSampler()

    def __init__(
        self,
        config: VllmConfig,
        model: torch.nn.Module,
        received: dict[str, torch.Tensor],
        *,
        last: bool,
    ) -> None:
        requests = config.scheduler_config.max_num_seqs
        tokens = config.scheduler_config.max_num_batched_tokens
        super().__init__(
            first=True,  # it has tokens, and nobody looks at them
            last=last,
            requests=requests,
            tokens=tokens,
            model=model,
            model_config=config.model_config,
            received=received,
        )
        self.cache_config = config.cache_config
        self.model_state = plain_model_state()
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

    def remove_request(self, req_id: str) -> None:
        self.req_states.remove_request(req_id)

    def add_request(self, new: Any) -> int:
        self.req_states.add_request(new.req_id, 0, [], new.num_computed_tokens, 0)
        row: int = self.req_states.req_id_to_index[new.req_id]
        return row

    def apply_staged_writes(self) -> None:
        """Drop them: there is no device."""
        states = self.req_states
        tables = self.block_tables.block_tables
        for staged in (states.total_len, states.num_computed_tokens, *tables):
            staged.clear_staged_writes()

    def batch_descriptor(self, output: SchedulerOutput) -> BatchExecutionDescriptor:
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, output.total_num_scheduled_tokens, None)

    def attend(self, batch: InputBatch) -> None:
        """Take the tokens, which are there behind the model state's call; nothing attends."""
        self.model_state.prepare_attn(batch)

    def prepare_attn(self, batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Block tables [B, 1] and slots [1, T] of a cache that is not there, for a draft head."""
        tables = torch.zeros(batch.num_reqs_after_padding, 1, dtype=torch.int32)
        return (tables,), torch.zeros(1, batch.num_tokens_after_padding, dtype=torch.int64)

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

    update_requests = gather_batch_req_state = prepare_inputs = _prepared
    sample: Any = _prepared
