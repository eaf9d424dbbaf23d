"""Attention metadata of a prepared batch, from vLLM's own builders, one per set of input buffers.

Who runs here: the device thread, just before the forward pass. Not the preparing thread, although
the paper has it there: vLLM's builders share scratch memory with running attention kernels (on the
CPU engine a scratch pad that a longer batch reallocates, which corrupted the heap).
"""

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from sipipe.worker.inputs.buffers import InputBuffers
from sipipe.worker.inputs.model_input import ModelInput


class AttentionMetadata:
    """Builds what vLLM's forward context wants to know of a batch.

    Args:
        vllm_runner: the runner that set up the attention groups.
        buffers: the sets of input buffers; metadata refer to their tensors.
    """

    def __init__(self, vllm_runner: Any, buffers: list[InputBuffers]) -> None:
        self._attn_groups = vllm_runner.attn_groups
        self._cache_groups = vllm_runner.kv_cache_config.kv_cache_groups
        self._buffers = buffers
        kernel_sizes = vllm_runner._kernel_block_sizes
        for gid, groups in enumerate(self._attn_groups):
            for group in groups:
                if len(group.metadata_builders) < len(buffers):
                    group.create_metadata_builders(
                        vllm_runner.vllm_config,
                        vllm_runner.device,
                        kernel_sizes[gid] if gid < len(kernel_sizes) else None,
                        num_metadata_builders=len(buffers),
                    )

    def build(self, inputs: ModelInput) -> None:
        """Fill ``inputs.attn_metadata`` and ``inputs.slot_mapping``, by layer."""
        source = self._buffers[inputs.buffer_set]
        requests, tokens = inputs.num_reqs, inputs.num_tokens
        common = CommonAttentionMetadata(
            query_start_loc=source.query_start_loc.tensor[: requests + 1],
            query_start_loc_cpu=source.query_start_loc.tensor[: requests + 1],
            seq_lens=source.seq_lens.tensor[:requests],
            seq_lens_cpu_upper_bound=source.seq_lens.tensor[:requests],
            num_reqs=requests,
            num_actual_tokens=tokens,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            block_table_tensor=source.block_tables[0].tensor[:requests],
            slot_mapping=source.slot_mappings[0].tensor[:tokens],
            is_prefilling=source.is_prefilling.tensor[:requests],
            positions=source.positions.tensor[:tokens],
        )
        for gid, groups in enumerate(self._attn_groups):
            slot_mapping: torch.Tensor = source.slot_mappings[gid].tensor[:tokens]
            of_group = common
            if gid:
                of_group = common.replace(
                    block_table_tensor=source.block_tables[gid].tensor[:requests],
                    slot_mapping=slot_mapping,
                )
            for group in groups:
                metadata = group.build_metadata(of_group, inputs.buffer_set)
                inputs.attn_metadata.update(dict.fromkeys(group.layer_names, metadata))
            for layer in self._cache_groups[gid].layer_names:
                inputs.slot_mapping[layer] = slot_mapping
