"""SiPipe's stage runner: from scheduling outputs to hidden states or logits (paper section 4.2).

It *has* one of vLLM's runners, which loaded the model, profiled memory, and set up the KV cache,
the attention groups and LoRA. The steady path is SiPipe's, written against what vLLM's two
runners share: the model's forward and ``compute_logits``, ``set_forward_context``, attention
metadata builders fed with common attention metadata, and ``SchedulerOutput``. It runs on CPUs.

Who runs here: ``prepare`` in the preparing thread; ``forward``, ``rows`` and
``prompt_logprobs`` in the device thread. Everything that changes state which a running forward
pass reads (KV cache blocks to zero or copy, active LoRA adapters, attention metadata) is described
by ``prepare`` and done by ``forward``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import get_pp_group
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import copy_kv_cache_blocks_inplace

from sipipe.worker.attention import AttentionMetadata
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.inputs.prepare import InputPreparer
from sipipe.worker.inputs.safety import TokenSafety
from sipipe.worker.logits import StageLogits
from sipipe.worker.prompt_logprobs import PromptLogprobs


class StageRunner:
    """Runs one stage of the model over microbatches.

    Args:
        vllm_runner: a ``CPUModelRunner`` whose model is loaded and whose KV cache is initialised, and
            in which :mod:`sipipe.worker.support` finds nothing against it.
        slots: microbatches in flight, m; iteration i belongs to slot i mod m.
        sets: sets of input buffers; 2 lets one be written while the other is read.
        check_token_safety: stamp every set and raise
            :class:`~sipipe.worker.inputs.safety.TokenSafetyError` at the first overlap.
    """

    def __init__(
        self, vllm_runner: Any, *, slots: int, sets: int = 2, check_token_safety: bool = False
    ) -> None:
        self._vllm_runner = vllm_runner
        self._model = vllm_runner.model
        self._safety = TokenSafety(sets) if check_token_safety else None
        self.preparer = InputPreparer(vllm_runner, slots=slots, sets=sets)
        self.attention = AttentionMetadata(vllm_runner, self.preparer.buffers)
        self._is_first, self._is_last = get_pp_group().is_first_rank, get_pp_group().is_last_rank
        self.head = StageLogits(vllm_runner) if self._is_last else None
        """Computes this rank's columns of the logits, on the last stage."""
        self._prompt_logprobs = PromptLogprobs(vllm_runner)
        # Nothing is padded here; vLLM's layers were traced with a mask.
        self._is_padding = torch.zeros(int(vllm_runner.max_num_tokens), dtype=torch.bool)

    def prepare(
        self, output: SchedulerOutput, slot: int, buffer_set: int, iteration: int
    ) -> ModelInput:
        """Turn a ``SchedulerOutput`` into model inputs in ``buffer_set``; see `InputPreparer`.

        Iterations must be prepared in the scheduler's order.

        Raises:
            TokenSafetyError: with the check on, if the device may still read ``buffer_set``.
        """
        if self._safety is None or not output.total_num_scheduled_tokens:
            return self.preparer.prepare(output, slot, buffer_set, iteration)
        self._safety.begin_write(buffer_set, iteration)
        inputs = self.preparer.prepare(output, slot, buffer_set, iteration)
        self._safety.end_write(buffer_set, iteration)
        return inputs

    @torch.inference_mode()
    def forward(
        self,
        inputs: ModelInput,
        received: Mapping[str, torch.Tensor] | None = None,
        between: Callable[[float], None] | None = None,
    ) -> dict[str, torch.Tensor] | torch.Tensor | None:
        """Run the stage's layers on a prepared microbatch.

        Args:
            inputs: from :meth:`prepare`.
            received: on all stages but the first, the previous stage's tensors, each with
                ``inputs.num_tokens`` rows.
            between: what to call in each layer, as :class:`LayerMetadata` does.

        Returns:
            A dict of tensors for the next stage; on the last stage the hidden states
            [num_tokens, H]; None for an empty microbatch.
        """
        self._change_cache(inputs)
        tokens = inputs.num_tokens
        if not tokens:
            return None
        intermediate = None
        if not self._is_first:
            assert received is not None
            intermediate = IntermediateTensors(dict(received))
        source = self.preparer.buffers[inputs.buffer_set]
        if self._safety is not None:
            self._safety.begin_read(inputs.buffer_set, inputs.iteration)
        self.attention.build(inputs)
        inputs.attn_metadata.between = between
        if inputs.lora is not None:
            self._vllm_runner._set_active_loras(*inputs.lora)
        with set_forward_context(
            inputs.attn_metadata,
            self._vllm_runner.vllm_config,
            num_tokens=tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            batch_descriptor=BatchDescriptor(tokens),
            slot_mapping=inputs.slot_mapping,
            is_padding=self._is_padding[:tokens],
        ):
            result = self._model(
                input_ids=source.input_ids.tensor[:tokens],
                positions=source.positions.tensor[:tokens],
                intermediate_tensors=intermediate,
                inputs_embeds=None,
            )
        if self._is_last and not inputs.all_sample:
            inputs.logits_indices = source.logits_indices.tensor[: len(inputs.sampled)].clone()
        if self._safety is not None:
            self._safety.end_read(inputs.buffer_set, inputs.iteration)
        return result.tensors if isinstance(result, IntermediateTensors) else result

    @torch.inference_mode()
    def rows(self, inputs: ModelInput, hidden: torch.Tensor) -> torch.Tensor:
        """Last stage: the rows [n, H] of ``forward``'s hidden states that sample, in the order of
        the scheduling output's ``num_scheduled_tokens``."""
        return hidden if inputs.all_sample else hidden[inputs.logits_indices]

    @torch.inference_mode()
    def prompt_logprobs(self, inputs: ModelInput, hidden: torch.Tensor) -> dict[str, Any]:
        """vLLM's ``prompt_logprobs_dict`` of an iteration: prompts that are complete with it.

        On the last stage, in each iteration (it costs nothing where nobody asked), by all ranks.
        """
        return self._prompt_logprobs.gather(inputs, hidden)

    def _change_cache(self, inputs: ModelInput) -> None:
        """Changes to the KV cache that the scheduler ordered before this iteration."""
        runner = self._vllm_runner
        if inputs.finished:
            self._prompt_logprobs.remove(inputs.finished)
        if inputs.blocks_to_zero:
            runner._zero_block_ids(inputs.blocks_to_zero)
        if inputs.block_copies:
            copy_kv_cache_blocks_inplace(
                runner.kv_caches, runner.kv_cache_config.num_blocks, inputs.block_copies
            )
