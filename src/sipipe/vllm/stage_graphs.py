"""The stage's model, captured for decode batches by <input version, batch size> (section 4.2).

A decode batch is padded to the next captured size: padding rows have no tokens of their own in
the attention's metadata, write no KV cache (slot -1) and their hidden states are dropped. On a
CPU the same code runs with plain calls in place of graphs, which is how it is tested; **capturing
has not been run on a GPU with a whole model yet**, so it is off unless sizes are given.

Who runs here: the device executor's thread; capturing is done at start-up, with nothing running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.v1.attention.backend import AttentionCGSupport

from sipipe.stage.graph_bank import GraphBank, PlainBank
from sipipe.vllm.stage_inputs import InputPreparer, ModelInput

Call = Callable[[ModelInput, int, Mapping[str, torch.Tensor] | None], Any]


class StageGraphs:
    """Runs padded decode batches of one stage.

    Args:
        stock: the vLLM runner with the loaded model.
        preparer: owns the input versions that graphs are bound to; told to pad to ``sizes``.
        call: runs the model on an input's version in vLLM's forward context, eagerly.
        sizes: batch sizes to capture.
    """

    def __init__(
        self, stock: Any, preparer: InputPreparer, call: Call, sizes: Sequence[int]
    ) -> None:
        self._call = call
        self._preparer = preparer
        versions = len(preparer.versions)
        device: torch.device = stock.device
        sizes = [size for size in sizes if size <= stock.max_num_reqs]
        if not sizes:
            raise ValueError(f"no graph size is within max_num_seqs {stock.max_num_reqs}")
        self._inputs: list[ModelInput | None] = [None] * versions
        self._intermediate: list[dict[str, torch.Tensor]] = [{} for _ in range(versions)]
        if not get_pp_group().is_first_rank:
            for version in range(versions):
                empty = stock.model.make_empty_intermediate_tensors(
                    batch_size=max(sizes), dtype=stock.model_config.dtype, device=device
                )
                self._intermediate[version] = dict(empty.tensors)
        if device.type == "cuda":
            from vllm.distributed.parallel_state import graph_capture

            self.bank = GraphBank(sizes, versions)
            with graph_capture(device=device):
                self.bank.capture(self._run, before=self._pose)
        else:
            self.bank = PlainBank(sizes, versions)
            self.bank.capture(self._run)
        preparer.padded_size = self.bank.size_for

    @staticmethod
    def reason(stock: Any) -> str | None:
        """Why this stage cannot be captured, or None."""
        if stock.lora_config is not None:
            return "LoRA changes what a captured graph reads"
        if stock.device.type != "cuda":
            return None
        for gid, groups in enumerate(stock.attn_groups):
            spec = stock.kv_cache_config.kv_cache_groups[gid].kv_cache_spec
            for group in groups:
                support = group.get_metadata_builder().get_cudagraph_support(
                    stock.vllm_config, spec
                )
                if support.value < AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE.value:
                    return f"{group.backend.get_name()} attention cannot be captured"
        return None

    def run(self, inputs: ModelInput, received: Mapping[str, torch.Tensor] | None) -> Any:
        """Run a batch that was padded to a captured size (``inputs.graph_size``)."""
        assert inputs.graph_size is not None
        self._inputs[inputs.version] = inputs
        if received is not None:
            for name, tensor in received.items():
                self._intermediate[inputs.version][name][: tensor.shape[0]].copy_(tensor)
        return self.bank.replay(inputs.version, inputs.graph_size)

    def _run(self, version: int, size: int) -> Any:
        inputs = self._inputs[version]
        assert inputs is not None
        intermediate = self._intermediate[version]
        return self._call(
            inputs, size, {name: tensor[:size] for name, tensor in intermediate.items()} or None
        )

    def _pose(self, version: int, size: int) -> None:
        """A batch of ``size`` sequences of one token, to capture with."""
        self._inputs[version] = self._preparer.pose(version, size)
