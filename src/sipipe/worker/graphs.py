"""The stage's model, captured for decode batches by <input version, batch size> (section 4.2).

Which sizes, and whether at all, is vLLM's own choice: ``cudagraph_capture_sizes`` where
``cudagraph_mode`` captures whole decode batches (its default on CUDA; ``--enforce-eager`` or
``--compilation-config '{"cudagraph_mode": "NONE"}'`` turn it off). vLLM's own graphs cannot be
used: they are bound to vLLM's own input buffers, of which there is one set.

A decode batch is padded to the next captured size: padding rows have no tokens of their own in
the attention's metadata, write no KV cache (slot -1) and their hidden states are dropped. The
tests run the same code on a CPU, with a bank that makes plain calls; **capturing itself has not
run on a GPU with a whole model yet**.

Who runs here: the device executor's thread; capturing is done at start-up, with nothing running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import get_pp_group
from vllm.logger import init_logger

from sipipe.errors import SiPipeError
from sipipe.worker.attention import AttentionMetadata
from sipipe.worker.graph_bank import GraphBank
from sipipe.worker.inputs.model_input import ModelInput

logger = init_logger(f"vllm.{__name__}")

Call = Callable[[ModelInput, int, Mapping[str, torch.Tensor] | None], Any]


def graph_sizes(stock: Any) -> list[int]:
    """Batch sizes to capture, as vLLM is configured; empty for none.

    vLLM has resolved ``cudagraph_mode`` by the time the KV cache is set up: it is a mode with
    full graphs for decode batches only if every attention backend of the model can be captured.
    """
    if stock.device.type != "cuda":
        return []
    config = stock.vllm_config.compilation_config
    mode = config.cudagraph_mode
    if mode is None or mode.decode_mode() != CUDAGraphMode.FULL:
        return []
    if stock.lora_config is not None:
        logger.warning(
            "SiPipe runs this stage without CUDA graphs: LoRA changes what a captured graph reads"
        )
        return []
    return [size for size in config.cudagraph_capture_sizes or () if size <= stock.max_num_reqs]


class StageGraphs:
    """Runs padded decode batches of one stage.

    Args:
        stock: the vLLM runner with the loaded model.
        attention: builds metadata for the input versions that graphs are bound to.
        call: runs the model on an input's version in vLLM's forward context, eagerly.
        bank: the graphs, not captured yet.

    Raises:
        SiPipeError: capturing failed; says which options turn it off.
    """

    def __init__(
        self, stock: Any, attention: AttentionMetadata, call: Call, bank: GraphBank
    ) -> None:
        self._call = call
        self._attention = attention
        self.bank = bank
        device: torch.device = stock.device
        self._inputs: list[ModelInput | None] = [None] * bank.versions
        self._intermediate: list[dict[str, torch.Tensor]] = [{} for _ in range(bank.versions)]
        if not get_pp_group().is_first_rank:
            for version in range(bank.versions):
                empty = stock.model.make_empty_intermediate_tensors(
                    batch_size=max(bank.sizes), dtype=stock.model_config.dtype, device=device
                )
                self._intermediate[version] = dict(empty.tensors)
        try:
            with _capturing(device):
                bank.capture(self._run, before=self._pose)
        except RuntimeError as error:
            raise SiPipeError(
                f"capturing CUDA graphs of {len(bank.sizes)} batch sizes failed ({error}); "
                "--enforce-eager runs without them"
            ) from error

    def run(self, inputs: ModelInput, received: Mapping[str, torch.Tensor] | None) -> Any:
        """Run a batch that was padded to a captured size (``inputs.graph_size``).

        Hidden states for the next stage are copied out of the graph's memory, which the next
        replay, of either version, writes again, while the link may still be sending them. On the
        last stage the result is read by what is launched next on the same stream.
        """
        assert inputs.graph_size is not None
        self._inputs[inputs.version] = inputs
        if received is not None:
            for name, tensor in received.items():
                self._intermediate[inputs.version][name][: tensor.shape[0]].copy_(tensor)
        result = self.bank.replay(inputs.version, inputs.graph_size)
        if get_pp_group().is_last_rank:
            return result
        return {name: tensor.clone() for name, tensor in result.items()}

    def _run(self, version: int, size: int) -> Any:
        inputs = self._inputs[version]
        assert inputs is not None
        intermediate = self._intermediate[version]
        return self._call(
            inputs, size, {name: tensor[:size] for name, tensor in intermediate.items()} or None
        )

    def _pose(self, version: int, size: int) -> None:
        """A batch of ``size`` sequences of one token, to capture with."""
        self._inputs[version] = self._attention.pose(version, size)


def _capturing(device: torch.device) -> AbstractContextManager[Any]:
    """What vLLM's own collectives need around a capture."""
    if device.type != "cuda":
        return nullcontext()
    from vllm.distributed.parallel_state import graph_capture

    return graph_capture(device=device)
