"""Installation of SiPipe's kernels in the place of the Triton kernels of vLLM's second runner.

With these kernels the second runner runs on CPUs without Triton.

vLLM launches a kernel as ``kernel[grid](...)``, from a name of the module that defines it. That
name gets a :class:`Launch`, which hands the arguments on by the parameter names of vLLM's kernel. So
vLLM may add parameters, or change their order.

Kernels of the second runner's sampler are not here: on CPUs SiPipe's samplers draw, or vLLM's
PyTorch sampler (:mod:`sipipe.worker.hooks.torch_rows`).

Rejected: vLLM's own register of substitutes (``vllm.triton_utils.dispatcher``), which hands on no
grid.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON, triton
from vllm.utils.math_utils import next_power_of_2

from sipipe.worker.cpu_kernels import kernels, recurrent

ARRAYS: dict[str, Callable[..., None]] = {
    "gpu.buffer_utils._apply_write_kernel": kernels.apply_write,
    "gpu.block_table._gather_block_tables_kernel": kernels.gather_block_tables,
    "gpu.block_table._compute_slot_mappings_kernel": kernels.compute_slot_mappings,
    "gpu.input_batch._prepare_prefill_inputs_kernel": kernels.prepare_prefill_inputs,
    "gpu.input_batch._prepare_pos_seq_lens_kernel": kernels.prepare_pos_seq_lens,
    "gpu.input_batch._combine_sampled_and_draft_tokens_kernel": (
        kernels.combine_sampled_and_draft_tokens
    ),
    "gpu.input_batch._post_update_kernel": kernels.post_update,
    "gpu.input_batch._post_update_num_computed_tokens_kernel": (
        kernels.post_update_num_computed_tokens
    ),
    "gpu.mm.rope._prepare_rope_positions_kernel": kernels.prepare_rope_positions,
    "gpu.model_states.mamba_hybrid._fill_num_accepted_kernel": recurrent.fill_num_accepted,
    "gpu.model_states.mamba_hybrid._scatter_num_accepted_kernel": recurrent.scatter_num_accepted,
    "gpu.model_states.mamba_hybrid.preprocess_mamba_align_fused_kernel": (
        recurrent.preprocess_mamba_align
    ),
    "mamba_utils.precopy_mamba_align_fused_kernel": recurrent.precopy_mamba_align,
    "mamba_utils.postprocess_mamba_fused_kernel": recurrent.postprocess_mamba,
    "gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": (
        kernels.prompt_logprobs_token_ids
    ),
    "utils._zero_kv_blocks_kernel": kernels.zero_kv_blocks,
}
"""Kernels that take NumPy arrays, by the name below ``vllm.v1.worker`` of the one that they replace."""


def topk_log_softmax(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    topk_ids_ptr: torch.Tensor,
    topk: int,
    vocab_size: int,
) -> None:
    """Write log-probabilities of some tokens of each row.

    Args:
        output_ptr: out, [n, topk], float32.
        logits_ptr: [n, at least vocab_size].
        topk_ids_ptr: [n, at least topk], tokens.
    """
    logits = logits_ptr[:, :vocab_size].float()
    chosen = _logits_of(logits, topk_ids_ptr[:, :topk])
    torch.sub(chosen, logits.logsumexp(-1, keepdim=True), out=output_ptr)


def ranks(
    output_ptr: torch.Tensor, logits_ptr: torch.Tensor, token_ids_ptr: torch.Tensor, vocab_size: int
) -> None:
    """Write into ``output_ptr`` [n] how many logits of each row, of ``logits_ptr`` [n, at least
    vocab_size], are at least that of its token in ``token_ids_ptr`` [n]."""
    logits = logits_ptr[:, :vocab_size]
    torch.sum(logits >= _logits_of(logits, token_ids_ptr.view(-1, 1)), -1, out=output_ptr)


def _logits_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of ``tokens`` [n, k] in ``logits`` [n, V]. What stands for an image in a prompt may be no
    token of the vocabulary, and is as unlikely as can be."""
    outside = tokens >= logits.shape[-1]
    return logits.gather(-1, tokens.masked_fill(outside, 0)).masked_fill(outside, -torch.inf)


def apply_prompt_embeds(
    inputs_embeds_ptr: torch.Tensor,
    embeds_ptrs_ptr: torch.Tensor,
    mask_ptrs_ptr: torch.Tensor,
    embeds_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
) -> None:
    """Copy embeddings of prompts that are given as embeddings into the batch's input.

    Args:
        inputs_embeds_ptr: out, [tokens, H].
        embeds_ptrs_ptr: [R], the address of each request's embeddings [L, H], of the same dtype.
        mask_ptrs_ptr: [R], the address of a byte for each of the L positions, which is not 0 where
            the position holds a token; or 0 for a request without such positions.
        embeds_lens_ptr: [R], L.
        idx_mapping_ptr: [B], each request's row.
        query_start_loc_ptr: [B + 1], each request's first token in the batch.
        num_computed_tokens_ptr: [R].
    """
    starts = query_start_loc_ptr.tolist()
    row_bytes = inputs_embeds_ptr.shape[1] * inputs_embeds_ptr.element_size()
    for request, row in enumerate(idx_mapping_ptr.tolist()):
        computed = int(num_computed_tokens_ptr[row])
        length = int(embeds_lens_ptr[row])
        source = int(embeds_ptrs_ptr[row])
        mask = int(mask_ptrs_ptr[row])
        first = starts[request]
        for offset in range(min(starts[request + 1] - first, length - computed)):
            position = computed + offset
            is_token = mask and ctypes.string_at(mask + position, 1)[0]
            if not is_token:
                target = inputs_embeds_ptr[first + offset].data_ptr()
                ctypes.memmove(target, source + position * row_bytes, row_bytes)


TENSORS: dict[str, Callable[..., None]] = {
    "gpu.sample.logprob._topk_log_softmax_kernel": topk_log_softmax,
    "gpu.sample.logprob._ranks_kernel": ranks,
    "gpu.model_states.prompt_embeds._apply_prompt_embeds_kernel": apply_prompt_embeds,
}
"""Kernels that take tensors, by name as :data:`ARRAYS`: torch has most of them, or they run seldom."""


class Launch:
    """Object in the place of vLLM's ``kernel``, which launches ``function`` instead.

    Args:
        kernel: vLLM's, whose parameter names say which argument is which.
        function: SiPipe's. Its parameter ``grid``, if it has one, gets the numbers of programs that
            vLLM launches.
        take: converts an argument of vLLM's to one of ``function``'s.

    Raises TypeError: vLLM's kernel has no parameter of a name that ``function`` needs.
    """

    def __init__(
        self, kernel: Callable[..., None], function: Callable[..., None], take: Callable[[Any], Any]
    ) -> None:
        self._function = function
        self._take = take
        names = list(inspect.signature(kernel).parameters)
        parameters = inspect.signature(function).parameters
        self._hands_grid = "grid" in parameters
        self._parameters = [(names.index(name), name) for name in parameters if name in names]
        """Positions and names of the arguments that ``function`` takes, in its order."""
        missing = [
            name
            for name, parameter in parameters.items()
            if name not in ("grid", *names) and parameter.default is parameter.empty
        ]
        if missing:
            raise TypeError(f"vLLM's {kernel.__name__} has no {', '.join(missing)}")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        """Run ``function`` with what vLLM launches its kernel with."""
        taken = [
            self._take(arguments[position] if position < len(arguments) else named[name])
            for position, name in self._parameters
        ]
        if self._hands_grid:
            self._function(grid, *taken)
        else:
            self._function(*taken)


def array(argument: Any) -> Any:
    """A tensor on the CPU as an array of the same memory; anything else as it is."""
    return argument.numpy() if isinstance(argument, torch.Tensor) else argument


def install() -> None:
    """Put SiPipe's kernels in the place of vLLM's, in this process. Nothing is done where Triton runs,
    since vLLM's own kernels do then.

    Raises TypeError, AttributeError: this vLLM has other kernels."""
    if HAS_TRITON:
        return
    # vLLM's stand-in for Triton lacks what launches of the second runner ask for.
    triton.next_power_of_2 = next_power_of_2
    for table, take in ((ARRAYS, array), (TENSORS, lambda tensor: tensor)):
        for name, function in table.items():
            module_name, _, kernel = name.rpartition(".")
            module = import_module(f"vllm.v1.worker.{module_name}")
            original = getattr(module, kernel)
            if not isinstance(original, Launch):  # it may be installed already
                setattr(module, kernel, Launch(original, function, take))
