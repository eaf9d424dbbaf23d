"""vLLM's second runner, as far as it prepares inputs: its own code and objects, without a model.

The oracle of SiPipe's preparation: the same scheduling outputs go through vLLM's
``finish_requests`` to ``prepare_attn``, in the order of its ``execute_model``.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.states import RequestState

from sipipe.worker.cpu_kernels.launch import install
from sipipe.worker.hooks.preparation import TokenFeedback

BLOCK_SIZES = (4, 8)
MAX_LEN = 64
REQUESTS, TOKENS = 64, 512


@contextmanager
def on_host():
    """While active, vLLM's buffers that a GPU would read are plain memory, as on its CPU workers."""
    with (
        patch.object(buffer_utils, "UvaBuffer", UvaBuffer),
        patch.object(buffer_utils, "is_uva_available", lambda: True),
    ):
        yield


class ModelState:
    """Of a model that keeps nothing of a request."""

    num_new_sampled_tokens_per_step = 1

    def __getattr__(self, name):
        return lambda *_, **__: None


class Zeroer:
    def __init__(self):
        self.zeroed = []

    def zero_block_ids(self, ids):
        self.zeroed.append(list(ids))


class PreparingRunner(GPUModelRunner):
    """A stage in the middle of a pipeline, or the first one."""

    def __init__(self, *, first=True, block_sizes=BLOCK_SIZES, requests=REQUESTS, tokens=TOKENS):
        install()
        self.device = cpu = torch.device("cpu")
        self.max_num_reqs, self.max_num_tokens = requests, tokens
        self.model_state, self.kv_block_zeroer = ModelState(), Zeroer()
        self.pooling_runner = self.encoder_cache = self.prompt_logprobs_worker = self.sampler = None
        self.pcp_manager = self.fast_prefill = self.adaptive_verification = None
        self.aux_output_connector = self.lora_config = None
        self.model_config = SimpleNamespace(rswa_window=None, enable_prompt_embeds=False)
        self.cache_config = SimpleNamespace(mamba_cache_mode="none")
        self.lora_state = ModelState()
        self.is_last_pp_rank, self.use_pp = False, True
        self.num_speculative_steps, self.decode_query_len, self.dcp_size = 0, 1, 1
        with on_host():
            self.req_states = RequestState(requests, MAX_LEN, tokens, 0, 1000, cpu)
            self.block_tables = BlockTables(
                block_sizes=list(block_sizes),
                max_num_reqs=requests,
                max_num_batched_tokens=tokens,
                max_num_blocks_per_group=[MAX_LEN // size for size in block_sizes],
                device=cpu,
            )
        self.input_buffers = InputBuffers(requests, tokens, cpu)
        self.pp_handler = TokenFeedback(requests)
        self.pp_handler.states = self.req_states if first else None
        self.tokens = {}
        """Of a batch that was prepared without."""

    def step(self, output, padded_reqs=None, padded_tokens=0):
        """What ``execute_model`` does before and behind the model: the batch, its state, how many
        tokens each request decodes, block tables and slot mappings; None without tokens."""
        self.pp_handler.output = output
        self.update_pp_decode_requests()
        self.finish_requests(output)
        self.free_states(output)
        self.add_requests(output)
        self.update_requests(output)
        self.block_tables.apply_staged_writes()
        if not output.total_num_scheduled_tokens:
            return None
        state, uniform = self.gather_batch_req_state(output, False)
        padded = SimpleNamespace(num_reqs=padded_reqs, num_tokens=padded_tokens)
        batch = self.prepare_inputs(output, state, padded, 0)
        tables, slots = self.prepare_attn(batch)
        self.model_state.prepare_attn(batch)
        return batch, state, uniform, tables, slots

    def finish(self, batch):
        """Behind the model."""
        self.postprocess_num_computed_tokens(batch)
