"""SiPipe's stage runner: from scheduling outputs to hidden states or logits (paper section 4.2).

It *has* a stock vLLM runner, which loaded the model, profiled memory, and set up the KV cache,
the attention groups and LoRA. The steady path is SiPipe's, written against what vLLM's two
runners share: the model's forward and ``compute_logits``, ``set_forward_context``, attention
metadata builders fed with common attention metadata, and ``SchedulerOutput``.

Who runs here: ``prepare`` in the CPU executor's thread; ``forward``, ``logits`` and
``prompt_logprobs`` in the device executor's. Everything that changes state which a running
forward pass reads (KV cache blocks to zero or copy, active LoRA adapters, attention metadata) is
described by ``prepare`` and done by ``forward``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import get_pp_group
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.sequence import IntermediateTensors

from sipipe.errors import UnsupportedError
from sipipe.worker.attention import AttentionMetadata
from sipipe.worker.graph_bank import GraphBank
from sipipe.worker.graphs import StageGraphs, graph_sizes
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.inputs.prepare import InputPreparer
from sipipe.worker.inputs.request_state import Counters
from sipipe.worker.inputs.safety import TokenSafety
from sipipe.worker.logits import StageLogits
from sipipe.worker.prompt_logprobs import PromptLogprobs
from sipipe.worker.support import unsupported_reason

__all__ = ["StageRunner"]


class StageRunner:
    """Runs one stage of the model over microbatches.

    Args:
        stock: a ``CPUModelRunner`` or ``GPUModelRunner`` whose model is loaded and whose KV cache
            is initialised.
        slots: microbatches in flight, m; iteration i belongs to slot i mod m.
        versions: input versions; 2 lets one be written while the other is read.
        bank: graphs to run decode batches with, not captured yet; None: those that vLLM's settings
            ask for (:func:`sipipe.worker.graphs.graph_sizes`), if any.
        check_token_safety: stamp every version and raise
            :class:`~sipipe.worker.inputs.safety.TokenSafetyError` at the first overlap.

    Raises:
        UnsupportedError: if :meth:`reason` is not None.
    """

    def __init__(
        self,
        stock: Any,
        *,
        slots: int,
        versions: int = 2,
        check_token_safety: bool = False,
        bank: GraphBank | None = None,
    ) -> None:
        reason = unsupported_reason(stock)
        if reason is not None:
            raise UnsupportedError(f"SiPipe's stage runner does not take {reason}")
        if slots < 1 or versions < 1:
            raise ValueError("slots and versions must be 1 or more")
        self.stock = stock
        self.model = stock.model
        self.safety = TokenSafety(versions) if check_token_safety else None
        self.preparer = InputPreparer(stock, slots=slots, versions=versions, safety=self.safety)
        self.attention = AttentionMetadata(stock, self.preparer.versions)
        self._is_first, self._is_last = get_pp_group().is_first_rank, get_pp_group().is_last_rank
        self._logits = StageLogits(stock) if self._is_last else None
        self._prompt_logprobs = PromptLogprobs(stock)
        self._graphs: StageGraphs | None = None
        if bank is None and (sizes := graph_sizes(stock)):
            bank = GraphBank(sizes, versions)
        if bank is not None:
            with torch.inference_mode():
                self._graphs = StageGraphs(stock, self.attention, self._call, bank)
            self.preparer.padded_size = bank.size_for
        self._iteration = 0

    @staticmethod
    def reason(stock: Any) -> str | None:
        """Why this model must be run by vLLM's own path, or None. Static, the same on all ranks."""
        return unsupported_reason(stock)

    @property
    def counters(self) -> Counters:
        """Whole-sequence writes to the cache so far."""
        return self.preparer.cache.counters

    def prepare(
        self, output: Any, slot: int, version: int, iteration: int | None = None
    ) -> ModelInput:
        """Turn a ``SchedulerOutput`` into device inputs in ``version``; see `InputPreparer`.

        ``iteration`` names the iteration in errors and in the safety check; by default they are
        counted. Iterations must be prepared in the scheduler's order.
        """
        if iteration is None:
            iteration = self._iteration
        self._iteration = iteration + 1
        return self.preparer.prepare(output, slot, version, iteration)

    @torch.inference_mode()
    def forward(
        self, inputs: ModelInput, intermediate: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor] | torch.Tensor | None:
        """Run the stage's layers on a prepared microbatch.

        Args:
            inputs: from :meth:`prepare`.
            intermediate: on all stages but the first, the previous stage's tensors, each with
                ``inputs.num_tokens_padded`` rows.

        Returns:
            A dict of tensors for the next stage; on the last stage the hidden states
            [num_tokens_padded, H]; None for an empty microbatch.
        """
        self._before_forward(inputs)
        if not inputs.num_tokens:
            return None
        received = None
        if not self._is_first:
            received = _of_rows(intermediate, inputs.num_tokens_padded)
        source = self.preparer.versions[inputs.version]
        if self.safety is not None:
            self.safety.begin_read(inputs.version, inputs.iteration)
        source.wait_until_ready()
        self.attention.build(inputs)
        if inputs.lora is not None:
            self.stock._set_active_loras(*inputs.lora)
        if inputs.graph_size is None:
            result = self._call(inputs, inputs.num_tokens_padded, received)
        else:
            assert self._graphs is not None
            result = self._graphs.run(inputs, received)
        if self._is_last and not inputs.all_sample:
            inputs.logits_rows = source.last_tokens.device[: len(inputs.sampled)].clone()
        source.release()
        if self.safety is not None:
            source.wait_until_free()  # the check wants the true end of the reading
            self.safety.end_read(inputs.version, inputs.iteration)
        return result.tensors if isinstance(result, IntermediateTensors) else result

    def _call(
        self, inputs: ModelInput, rows: int, received: Mapping[str, torch.Tensor] | None
    ) -> Any:
        """The model on ``rows`` rows of an input version, in vLLM's forward context."""
        source = self.preparer.versions[inputs.version]
        with set_forward_context(
            inputs.attn_metadata,
            self.stock.vllm_config,
            num_tokens=rows,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            batch_descriptor=BatchDescriptor(rows),
            slot_mapping=inputs.slot_mapping,
            is_padding=source.padding.device[:rows],
        ):
            return self.model(
                input_ids=source.input_ids.device[:rows],
                positions=source.positions.device[:rows],
                intermediate_tensors=None
                if received is None
                else IntermediateTensors(dict(received)),
                inputs_embeds=None,
            )

    def logits(
        self, inputs: ModelInput, hidden: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Logits [n, columns] of the rows that sample, from ``forward``'s hidden states.

        On the last stage, by all ranks of it, in the same order. Rows are in the order of the
        scheduling output's ``num_scheduled_tokens``; columns as :attr:`columns` says. None on a
        rank that has none. ``into``: as :meth:`StageLogits.compute` has it.
        """
        rows = hidden[: inputs.num_tokens] if inputs.all_sample else hidden[inputs.logits_rows]
        return self.compute_logits(rows, into)

    @torch.inference_mode()
    def compute_logits(
        self, hidden: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """As :meth:`logits`, of any hidden-state rows [n, H]."""
        assert self._logits is not None, "only the last stage has logits"
        return self._logits.compute(hidden, into)

    @property
    def head(self) -> StageLogits:
        """Which columns of the vocabulary this rank of the last stage computes."""
        assert self._logits is not None, "only the last stage has logits"
        return self._logits

    @torch.inference_mode()
    def prompt_logprobs(self, inputs: ModelInput, hidden: torch.Tensor) -> dict[str, Any]:
        """vLLM's ``prompt_logprobs_dict`` of an iteration: prompts that are complete with it.

        On the last stage, in each iteration (it costs nothing where nobody asked), by all ranks.
        """
        return self._prompt_logprobs.gather(inputs, hidden)

    def _before_forward(self, inputs: ModelInput) -> None:
        """Changes to the KV cache that the scheduler ordered before this iteration."""
        if inputs.finished:
            self._prompt_logprobs.forget(inputs.finished)
        if inputs.blocks_to_zero:
            self.stock._zero_block_ids(inputs.blocks_to_zero)
        if inputs.block_copies:
            from vllm.v1.worker.gpu_model_runner import copy_kv_cache_blocks_inplace

            copy_kv_cache_blocks_inplace(
                self.stock.kv_caches, self.stock.kv_cache_config.num_blocks, inputs.block_copies
            )


def _of_rows(tensors: Mapping[str, torch.Tensor] | None, rows: int) -> dict[str, torch.Tensor]:
    if tensors is None:
        raise ValueError("a stage after the first needs the previous stage's tensors")
    for name, tensor in tensors.items():
        if tensor.shape[0] < rows:
            raise ValueError(
                f"the previous stage sent {tensor.shape[0]} rows of {name!r}, this one expects {rows}"
            )
    return {name: tensor[:rows] for name, tensor in tensors.items()}
