"""The rows of the output projection that a rank multiplies by, where it is shared out.

The last stage's ranks offer the rows of their loaded model in shared memory. Every rank of every
stage takes its part of them: on CPUs packed by vLLM's own kernels, on GPUs as it is.

Who runs here: the thread that follows BIC-I, in control calls; the thread that multiplies, in
:meth:`ProjectionShard.multiply`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from sipipe.errors import ResourceError
from sipipe.ipc.memory import PAGE, SharedMemory
from sipipe.messages.measured import Measured
from sipipe.messages.start_records import ProjectionOffer
from sipipe.worker.device import Device, seconds
from sipipe.worker.projection.logits import StageLogits, placed_in

_HOST = torch.device("cpu")


class OfferedRows:
    """A rank's rows of the loaded model's output projection, in memory that other stages can read.

    Attributes:
        reason: why the projection cannot be shared out; empty if it can. With a reason there are no
            other attributes.
        rows: the weights of the loaded model, [columns of this rank, H].
        offer: the description of the memory for other stages.
    """

    def __init__(self, stage_logits: StageLogits, hidden: torch.Tensor) -> None:
        """``hidden`` are some rows of hidden states [n, H] of the model's dtype, not all zero, by which
        it is seen that the projection is a plain one."""
        self._memory: SharedMemory | None = None
        projection = _plain_projection(stage_logits, hidden)
        if isinstance(projection, str):
            self.reason = projection
            return
        self.reason = ""
        self._module, processor = projection
        start, stop = stage_logits.columns
        self.rows = weight = self._module.weight.detach()[: stop - start]
        try:
            self._memory = SharedMemory.create("projection", PAGE + weight.nbytes)
        except ResourceError as error:
            self.reason = str(error)
            return
        self.offer = ProjectionOffer(
            memory=self._memory.endpoint,
            columns=stage_logits.columns,
            hidden=weight.shape[1],
            scale=processor.scale,
            soft_cap=processor.soft_cap,
        )
        _rows(self._memory, self.offer, weight.dtype).copy_(weight)

    def close(self, *, taken: bool = True) -> None:
        """Free the memory. If all stages have ``taken`` their rows, the matrix that the loaded model has
        packed for a CPU goes, too."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None  # the mapping goes with it, and with that memory for all rows
        if taken and self.rows.is_cpu:
            # The packed matrix goes. What scores prompts multiplies by the loaded one, more slowly:
            # packing it again would keep as much memory for good.
            self._module.cpu_linear = torch.nn.functional.linear


def _plain_projection(
    stage_logits: StageLogits, hidden: torch.Tensor
) -> tuple[Any, LogitsProcessor] | str:
    """The module of the output projection and the processor that multiplies by it, or why the product
    of its rows is not all that the logits are."""
    if stage_logits.processor is None:
        return "the model computes its logits in a way of its own"
    logits, calls = stage_logits.watch(hidden)
    if len(calls) != 1 or logits is None or len(calls[0].args) < 2:
        return "the model computes its logits in a way of its own"
    (module, rows, *bias), kwargs, result = calls[0]
    if type(getattr(module, "quant_method", None)) is not UnquantizedEmbeddingMethod:
        return "the output projection is quantized"
    if any(value is not None for value in [*bias, *kwargs.values()]):
        return "the output projection has a bias"
    if not torch.equal(rows, hidden) or not torch.equal(result[:, : logits.shape[1]], logits):
        return "the model does more to its logits than to project, cap and scale them"
    start, stop = stage_logits.columns
    if logits.dtype != hidden.dtype or logits.shape[1] != stop - start:
        return "the output projection has a type or a size of its own"
    if module.shard_indices.num_added_elements:
        return "the model has added vocabulary"
    if module.tp_size > 1 and stage_logits.shard is None:
        return "vLLM gathers the model's logits over its tensor-parallel ranks"
    return module, stage_logits.processor


class ProjectionShard:
    """Some rows of the output projection, by which vLLM's kernels multiply.

    Args:
        offers: the offers of all ranks of the last stage.
        start: first row, which is a token.
        stop: the row behind the last. All rows are of one offer.
        dtype: the weights' dtype.
        device: device on which is multiplied.
        loaded: rows of the loaded model on a rank of the last stage, which need no copy on a GPU.
    """

    def __init__(
        self,
        offers: Sequence[ProjectionOffer],
        start: int,
        stop: int,
        dtype: torch.dtype,
        device: torch.device = _HOST,
        loaded: torch.Tensor | None = None,
    ) -> None:
        offer = next(
            offer for offer in offers if offer.columns[0] <= start and stop <= offer.columns[1]
        )
        memory = SharedMemory.attach(offer.memory)
        rows = _rows(memory, offer, dtype) if loaded is None else loaded
        rows = rows[start - offer.columns[0] : stop - offer.columns[0]]
        self._empty = not len(rows)
        self._rows = _Rows(rows.to(device, copy=device.type == "cpu"), offer)
        del rows
        memory.close()

    def multiply(self, hidden: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [n, rows of this shard, perhaps 0] of hidden states [n, H]. They lie in ``into`` as
        :meth:`.StageLogits.compute` says."""
        if self._empty:
            return hidden[:, :0]
        with placed_in(into, hidden):
            logits: torch.Tensor = self._rows.project(self._rows, hidden)
        return logits


class _Rows(torch.nn.Module):
    """Output projection as vLLM's ``LogitsProcessor`` takes it, with that processor as ``project``."""

    def __init__(self, weight: torch.Tensor, offer: ProjectionOffer) -> None:
        super().__init__()
        self.project = LogitsProcessor(len(weight), scale=offer.scale, soft_cap=offer.soft_cap)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = UnquantizedEmbeddingMethod()
        self.tp_size = 1
        if weight.is_cpu:
            dispatch_cpu_unquantized_gemm(self, remove_weight=True)


def time_parts(
    vllm_runner: Any, stage_logits: StageLogits | None, sequences: int, device: Device
) -> Measured:
    """Measure the seconds that this stage's layers take for ``sequences`` decoding sequences, without
    their attention, and on the last stage, which has ``stage_logits``, those of the whole output
    projection. All stages measure at once.

    On CPUs the seconds are of CPU time, not of the clock: the shares stay for the engine's life, and a
    neighbour that is busy now must not decide them.
    """
    config = vllm_runner.model_config
    device = device.undisturbed()
    with set_current_vllm_config(vllm_runner.vllm_config), torch.inference_mode():
        layers = seconds(device, lambda: vllm_runner._dummy_run(sequences, uniform_decode=True))
        if stage_logits is None:
            return Measured(layers=layers)
        hidden = torch.randn(sequences, config.get_hidden_size(), dtype=config.dtype)
        hidden = hidden.to(vllm_runner.device)
        projection = seconds(device, lambda: stage_logits.compute(hidden))
        return Measured(layers=layers, projection=projection)


def _rows(memory: SharedMemory, offer: ProjectionOffer, dtype: torch.dtype) -> torch.Tensor:
    """The rows [tokens of the offer, H] in its memory."""
    tokens = offer.columns[1] - offer.columns[0]
    flat = torch.frombuffer(memory.map, dtype=dtype, count=tokens * offer.hidden, offset=PAGE)
    return flat.view(tokens, offer.hidden)
