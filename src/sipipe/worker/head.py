"""The rows of the output projection that a rank multiplies by, where it is shared out.

The last stage's ranks offer the rows of their loaded model in shared memory; every rank of every
stage takes its part of them: on CPUs packed with vLLM's own kernels, on GPUs as it is.

Who runs here: whoever follows BIC-I, in control calls; the thread that multiplies in
:meth:`HeadShard.compute`, ``whole`` and ``joins``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from sipipe.errors import ResourceError
from sipipe.ipc.memory import PAGE, SharedMemory
from sipipe.messages.boots import HeadOffer
from sipipe.messages.measured import Measured
from sipipe.worker.device import Device, HostDevice, seconds
from sipipe.worker.logits import StageLogits, placed_in

_HOST = torch.device("cpu")
_BLOCK = 64
"""Columns that stay together: kernels work on as many."""
_MANY = 32
"""Rows of the larger product by which a row's time is told from the rest."""
PIECE = 32 << 20
"""Bytes of weights of a piece of a product, for each core of the rank: 3 ms for a row, 5 for 32.
Smaller pieces cost more (five in the place of three: 2 % and a fifth of the copies), and let a
forward pass in hardly sooner."""


class OfferedHead:
    """A rank's rows of the loaded model's head, in memory that other stages can read.

    Args:
        head: the last stage's.
        hidden: some rows of hidden states, not all zero, of the model's dtype.

    Attributes:
        reason: why the head cannot be shared out; then there is nothing else.
        rows: the matrix's, as they were loaded.
    """

    def __init__(self, head: StageLogits, hidden: torch.Tensor) -> None:
        self._memory: SharedMemory | None = None
        found = _find(head, hidden)
        if isinstance(found, str):
            self.reason = found
            return
        self.reason = ""
        self._module, processor = found
        start, stop = head.columns
        self.rows = weight = self._module.weight.detach()[: stop - start]
        try:
            self._memory = SharedMemory.create("head", PAGE + weight.nbytes, None)
        except ResourceError as error:
            self.reason = str(error)
            return
        self.offer = HeadOffer(
            memory=self._memory.endpoint,
            columns=head.columns,
            hidden=weight.shape[1],
            scale=processor.scale,
            soft_cap=processor.soft_cap,
        )
        _rows(self._memory, self.offer, weight.dtype).copy_(weight)

    def close(self, *, taken: bool = True) -> None:
        """Every stage has taken its rows, or the last stage keeps them."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None  # the mapping goes with it, and with that memory for all rows
        if taken and self.rows.is_cpu:
            # The packed matrix goes. What scores prompts multiplies by the loaded one, more slowly:
            # packing it again would keep as much memory for good.
            self._module.cpu_linear = torch.nn.functional.linear


def _find(head: StageLogits, hidden: torch.Tensor) -> tuple[Any, LogitsProcessor] | str:
    """The module with the matrix and what multiplies by it; or why its rows are not all there is."""
    if head.processor is None:
        return "the model computes its logits in a way of its own"
    logits, calls = head.watch(hidden)
    if len(calls) != 1 or logits is None or len(calls[0].args) < 2:
        return "the model computes its logits in a way of its own"
    (module, rows, *bias), kwargs, result = calls[0]
    if type(getattr(module, "quant_method", None)) is not UnquantizedEmbeddingMethod:
        return "the output projection is quantized"
    if any(value is not None for value in [*bias, *kwargs.values()]):
        return "the output projection has a bias"
    if not torch.equal(rows, hidden) or not torch.equal(result[:, : logits.shape[1]], logits):
        return "the model does more to its logits than to project, cap and scale them"
    start, stop = head.columns
    if logits.dtype != hidden.dtype or logits.shape[1] != stop - start:
        return "the output projection has a type or a size of its own"
    if module.shard_indices.num_added_elements:
        return "the model has added vocabulary"
    if module.tp_size > 1 and head.shard is None:
        return "vLLM gathers the model's logits over its tensor-parallel ranks"
    return module, head.processor


class HeadShard:
    """Some rows of the output projection, by vLLM's kernels, in pieces of about the same size.

    Args:
        offers: of the last stage's ranks, each with its tokens.
        start, stop: first token, and the one behind the last; all of one offer.
        dtype: the model's.
        piece: bytes of weights of a piece at most, for each thread; None: all is one, as on the
            last stage, whose products nothing interrupts.
        device: where to have them.
        loaded: the last stage's rank's own rows of the loaded model, which need no copy on a GPU.

    Attributes:
        pieces: the columns of each, from ``start`` on; there may be none.
        fixed, per_row: seconds of a product, whatever its rows, and of each row.
    """

    fixed = per_row = 0.0

    def __init__(
        self,
        offers: Sequence[HeadOffer],
        start: int,
        stop: int,
        dtype: torch.dtype,
        piece: int | None = PIECE,
        device: torch.device = _HOST,
        loaded: torch.Tensor | None = None,
    ) -> None:
        offer = next(o for o in offers if o.columns[0] <= start and stop <= o.columns[1])
        memory = SharedMemory.attach(offer.memory)
        rows = _rows(memory, offer, dtype) if loaded is None else loaded
        rows = rows[start - offer.columns[0] : stop - offer.columns[0]]
        count = max(1, -(-rows.nbytes // (piece * torch.get_num_threads()))) if piece else 1
        width = -(-(stop - start) // (count * _BLOCK)) * _BLOCK
        self.pieces = [
            slice(first, min(first + width, stop - start))
            for first in range(0, stop - start, width or 1)
        ]
        self._modules = [
            _Rows(rows[columns].to(device, copy=device.type == "cpu"), offer)
            for columns in self.pieces
        ]
        del rows
        memory.close()
        if device.type != "cpu":
            return  # nothing is in pieces there, and nothing joins
        hidden = torch.randn(_MANY, offer.hidden, dtype=dtype)
        # All stages do this at the same time.
        one, many = (seconds(HostDevice(), partial(self.whole, hidden[:n])) for n in (1, _MANY))
        self.per_row = max(0.0, many - one) / (_MANY - 1)
        self.fixed = max(0.0, one - self.per_row)

    def compute(
        self, hidden: torch.Tensor, piece: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[n, H] to [n, columns of this piece]; ``into`` is as :meth:`StageLogits.compute` has it."""
        rows = self._modules[piece]
        with placed_in(into, hidden):
            logits: torch.Tensor = rows.project(rows, hidden)
        return logits

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] to [n, columns of all pieces], of which there may be none."""
        parts = [self.compute(hidden, piece) for piece in range(len(self.pieces))]
        return parts[0] if len(parts) == 1 else torch.cat([hidden[:, :0], *parts], 1)

    def joins(self, rows: int) -> bool:
        """Whether ``rows`` more in a product delay it by no more than a product of their own would
        take for reading the matrix."""
        return self.per_row * rows <= self.fixed


class _Rows(torch.nn.Module):
    """What vLLM's ``LogitsProcessor`` wants of a head, and the processor."""

    def __init__(self, weight: torch.Tensor, offer: HeadOffer) -> None:
        super().__init__()
        self.project = LogitsProcessor(len(weight), scale=offer.scale, soft_cap=offer.soft_cap)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = UnquantizedEmbeddingMethod()
        self.tp_size = 1
        if weight.is_cpu:
            dispatch_cpu_unquantized_gemm(self, remove_weight=True)


def time_parts(
    vllm_runner: Any, head: StageLogits | None, sequences: int, device: Device | None
) -> Measured:
    """Seconds that the layers take for ``sequences`` decoding ones, without their attention, and on
    the last stage, which has ``head``, the whole output projection. All stages at once.

    ``device``: of vLLM's second runner; None: the other one, on CPUs.
    """
    config = vllm_runner.model_config
    clock, decodes = device or HostDevice(), {} if device is None else {"uniform_decode": True}
    with set_current_vllm_config(vllm_runner.vllm_config), torch.inference_mode():
        layers = seconds(clock, lambda: vllm_runner._dummy_run(sequences, **decodes))
        if head is None:
            return Measured(layers=layers)
        hidden = torch.randn(sequences, config.get_hidden_size(), dtype=config.dtype)
        hidden = hidden.to(vllm_runner.device)
        return Measured(layers=layers, head=seconds(clock, lambda: head.compute(hidden)))


def _rows(memory: SharedMemory, offer: HeadOffer, dtype: torch.dtype) -> torch.Tensor:
    tokens = offer.columns[1] - offer.columns[0]
    flat = torch.frombuffer(memory.map, dtype=dtype, count=tokens * offer.hidden, offset=PAGE)
    return flat.view(tokens, offer.hidden)
