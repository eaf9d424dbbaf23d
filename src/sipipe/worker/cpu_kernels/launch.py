"""Has vLLM's second runner run on a CPU: kernels of ours in place of its Triton kernels.

vLLM launches a kernel as ``kernel[grid](...)``, from a name of the module that defines it. That
name gets a :class:`Launch`, which hands the arguments on by the parameter names of vLLM's kernel. So
vLLM may add parameters, or change their order.

What the second runner's sampler launches is not here: on CPUs SiPipe's samplers draw, or vLLM's
PyTorch sampler (:mod:`sipipe.worker.hooks.torch_rows`).
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

from sipipe.worker.cpu_kernels import kernels

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
    "gpu.model_states.mamba_hybrid._fill_num_accepted_kernel": kernels.fill_num_accepted,
    "gpu.model_states.mamba_hybrid._scatter_num_accepted_kernel": kernels.scatter_num_accepted,
    "gpu.model_states.mamba_hybrid.preprocess_mamba_align_fused_kernel": (
        kernels.preprocess_mamba_align
    ),
    "mamba_utils.precopy_mamba_align_fused_kernel": kernels.precopy_mamba_align,
    "mamba_utils.postprocess_mamba_fused_kernel": kernels.postprocess_mamba,
    "gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": (
        kernels.prompt_logprobs_token_ids
    ),
    "utils._zero_kv_blocks_kernel": kernels.zero_kv_blocks,
}
"""Ours for vLLM's, by its name below ``vllm.v1.worker``; they take arrays."""


def topk_log_softmax(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    topk_ids_ptr: torch.Tensor,
    topk: int,
    vocab_size: int,
) -> None:
    """Log-probabilities [n, topk] of the tokens that are named, from logits [n, at least V]."""
    logits = logits_ptr[:, :vocab_size].float()
    found = logits.gather(-1, topk_ids_ptr[:, :topk])
    torch.sub(found, logits.logsumexp(-1, keepdim=True), out=output_ptr)


def ranks(
    output_ptr: torch.Tensor, logits_ptr: torch.Tensor, token_ids_ptr: torch.Tensor, vocab_size: int
) -> None:
    """How many logits of a row are at least that of its token, [n]."""
    logits = logits_ptr[:, :vocab_size]
    torch.sum(logits >= logits.gather(-1, token_ids_ptr.view(-1, 1)), -1, out=output_ptr)


def apply_prompt_embeds(
    inputs_embeds_ptr: torch.Tensor,
    embeds_ptrs_ptr: torch.Tensor,
    mask_ptrs_ptr: torch.Tensor,
    embeds_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
) -> None:
    """Rows of requests whose prompts are embeddings [L, H], into the batch's [tokens, H]; but for
    positions that a request's mask [L] says are tokens."""
    starts, into = query_start_loc_ptr.tolist(), inputs_embeds_ptr
    width = into.shape[1] * into.element_size()
    for request, row in enumerate(idx_mapping_ptr.tolist()):
        computed, length = int(num_computed_tokens_ptr[row]), int(embeds_lens_ptr[row])
        source, mask = int(embeds_ptrs_ptr[row]), int(mask_ptrs_ptr[row])
        first = starts[request]
        for place in range(min(starts[request + 1] - first, length - computed)):
            at = computed + place
            if not mask or not ctypes.string_at(mask + at, 1)[0]:
                ctypes.memmove(into[first + place].data_ptr(), source + at * width, width)


TENSORS: dict[str, Callable[..., None]] = {
    "gpu.sample.logprob._topk_log_softmax_kernel": topk_log_softmax,
    "gpu.sample.logprob._ranks_kernel": ranks,
    "gpu.model_states.prompt_embeds._apply_prompt_embeds_kernel": apply_prompt_embeds,
}
"""As :data:`ARRAYS`, but torch's own, or seldom needed: they take tensors."""


class Launch:
    """Stands where vLLM's ``kernel`` stood, whose parameter names count.

    Args:
        function: ours. A parameter ``grid`` gets the numbers of programs that vLLM launches.
        take: makes of an argument of vLLM's what ``function`` takes.

    Raises TypeError: vLLM's kernel has no parameter of a name that ``function`` needs.
    """

    def __init__(
        self, kernel: Callable[..., None], function: Callable[..., None], take: Callable[[Any], Any]
    ) -> None:
        self._function, self._take = function, take
        given = list(inspect.signature(kernel).parameters)
        wanted = inspect.signature(function).parameters
        self._hands_grid = "grid" in wanted
        self._wanted = [(given.index(name), name) for name in wanted if name in given]
        missing = [
            name
            for name, parameter in wanted.items()
            if name not in ("grid", *given) and parameter.default is parameter.empty
        ]
        if missing:
            raise TypeError(f"vLLM's {kernel.__name__} has no {', '.join(missing)}")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        take, count = self._take, len(arguments)
        handed = [
            take(arguments[place] if place < count else named[name]) for place, name in self._wanted
        ]
        self._function(grid, *handed) if self._hands_grid else self._function(*handed)


def array(argument: Any) -> Any:
    """A tensor as an array of the same memory; anything else as it is."""
    return argument.numpy() if isinstance(argument, torch.Tensor) else argument


def install() -> None:
    """Set ours in place of vLLM's kernels, in this process.

    Nothing is done where Triton runs on CPUs: vLLM's own kernels do. Raises TypeError,
    AttributeError: this vLLM's kernels are others."""
    if HAS_TRITON:
        return
    # vLLM's stand-in for Triton lacks what launches of the second runner ask for.
    triton.next_power_of_2 = next_power_of_2
    for table, take in ((ARRAYS, array), (TENSORS, lambda tensor: tensor)):
        for name, function in table.items():
            below, _, kernel = name.rpartition(".")
            module = import_module(f"vllm.v1.worker.{below}")
            if not isinstance(found := getattr(module, kernel), Launch):
                setattr(module, kernel, Launch(found, function, take))
