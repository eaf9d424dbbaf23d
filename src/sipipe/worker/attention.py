"""Attention metadata of a prepared batch, from vLLM's own builders, one per input version.

Who runs here: the device executor's thread, on the device's current stream, just before the
forward pass. Not the CPU executor's, although the paper has it there: vLLM's builders share
scratch memory with running attention kernels (on the CPU engine a scratch pad that a longer batch
reallocates, which corrupted the heap; on CUDA workspaces, and tensors that are allocated on the
builder's stream and read on another). In the stream of the forward passes they are in order.
Some builders keep buffers that captured graphs read, hence one for each version.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from sipipe.worker.inputs.buffers import InputVersion
from sipipe.worker.inputs.model_input import ModelInput


class AttentionMetadata:
    """Builds what vLLM's forward context wants to know of a batch.

    Args:
        stock: the vLLM runner that set up the attention groups.
        versions: the input versions; metadata refer to their tensors.
    """

    def __init__(self, stock: Any, versions: list[InputVersion]) -> None:
        self._attn_groups = stock.attn_groups
        self._cache_groups = stock.kv_cache_config.kv_cache_groups
        self._max_model_len: int = stock.max_model_len
        self._versions = versions
        kernel_sizes = stock._kernel_block_sizes
        for gid, groups in enumerate(self._attn_groups):
            for group in groups:
                if len(group.metadata_builders) < len(versions):
                    group.create_metadata_builders(
                        stock.vllm_config,
                        stock.device,
                        kernel_sizes[gid] if gid < len(kernel_sizes) else None,
                        num_metadata_builders=len(versions),
                    )

    def build(self, inputs: ModelInput, *, capturing: bool = False) -> None:
        """Fill ``inputs.attn_metadata`` and ``inputs.slot_mapping``, by layer."""
        source = self._versions[inputs.version]
        count = inputs.graph_size or inputs.num_reqs
        tokens = inputs.graph_size or inputs.num_tokens
        common = CommonAttentionMetadata(
            query_start_loc=source.query_start.device[: count + 1],
            query_start_loc_cpu=source.query_start.host[: count + 1],
            seq_lens=source.seq_lens.device[:count],
            seq_lens_cpu_upper_bound=source.seq_lens.host[:count],
            num_reqs=count,
            num_actual_tokens=tokens,
            max_query_len=inputs.longest_query,
            max_seq_len=inputs.longest_seq,
            block_table_tensor=source.tables[0].device[:count],
            slot_mapping=source.slots[0].device[: inputs.num_tokens_padded],
            is_prefilling=source.prefilling.host[:count],
            positions=source.positions.device[:tokens],
        )
        for gid, groups in enumerate(self._attn_groups):
            of_group = (
                common.replace(
                    block_table_tensor=source.tables[gid].device[:count],
                    slot_mapping=source.slots[gid].device[: inputs.num_tokens_padded],
                )
                if gid
                else common
            )
            for group in groups:
                build = (
                    group.build_metadata_for_cudagraph_capture
                    if capturing
                    else group.build_metadata
                )
                metadata = build(of_group, inputs.version)
                for layer in group.layer_names:
                    inputs.attn_metadata[layer] = metadata
            slot_mapping: torch.Tensor = of_group.slot_mapping
            for layer in self._cache_groups[gid].layer_names:
                inputs.slot_mapping[layer] = slot_mapping

    def pose(self, version: int, size: int) -> ModelInput:
        """Inputs of ``size`` made-up sequences of one token, for capturing a graph.

        Blocking: the arrays are written when nothing copies from them, and are on the device when
        this returns.
        """
        source = self._versions[version]
        inputs = ModelInput(
            iteration=-1,
            slot=0,
            version=version,
            num_reqs=size,
            num_tokens=size,
            num_tokens_padded=size,
            graph_size=size,
            longest_query=1,
            longest_seq=self._max_model_len,
        )
        source.pose(size)
        self.build(inputs, capturing=True)
        return inputs
