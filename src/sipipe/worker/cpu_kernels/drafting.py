"""Kernels of vLLM's speculators that run a head step by step, for CPUs; as :mod:`.kernels`.

Shapes: B requests in the batch, T tokens in it, R rows of vLLM's request states, k drafts a request.
They run once a draft, on batches of tens of requests: plain tensor expressions are quick enough.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON

from sipipe.worker.cpu_kernels.launch import Launch

HEADS = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
DRAFT_MODELS = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"


def prepare_prefill_inputs(
    grid: tuple[int, ...],
    last_token_indices_ptr: torch.Tensor,
    draft_current_step_ptr: torch.Tensor,
    draft_input_ids_ptr: torch.Tensor,
    draft_positions_ptr: torch.Tensor,
    draft_query_start_loc_ptr: torch.Tensor,
    draft_seq_lens_ptr: torch.Tensor,
    target_input_ids_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    max_num_reqs: int,
) -> None:
    """Write what a head reads of a pass of the target: its tokens moved to the front by one, and in
    the last place of each request, but for rejected drafts, the token that comes next.

    ``grid`` is B. ``query_start_loc_ptr`` [B + 1], ``num_sampled_ptr`` and ``num_rejected_ptr`` [B];
    where nothing was sampled, the next token is ``next_prefill_tokens_ptr``'s [R].
    """
    count = grid[0]
    starts = query_start_loc_ptr[: count + 1].tolist()
    for request in range(count):
        first = starts[request]
        last = starts[request + 1] - int(num_rejected_ptr[request]) - 1
        row = int(idx_mapping_ptr[request])
        following = last_sampled_ptr if num_sampled_ptr[request] > 0 else next_prefill_tokens_ptr
        draft_input_ids_ptr[first:last] = target_input_ids_ptr[first + 1 : last + 1]
        draft_input_ids_ptr[last] = following.reshape(-1)[row]
        last_token_indices_ptr[request] = last
        draft_positions_ptr[first : last + 1] = target_positions_ptr[first : last + 1]
    draft_query_start_loc_ptr[:count] = query_start_loc_ptr[:count]
    draft_seq_lens_ptr[:count] = seq_lens_ptr[:count]
    draft_current_step_ptr.zero_()
    draft_query_start_loc_ptr[count : max_num_reqs + 1] = starts[count]
    draft_seq_lens_ptr[count:max_num_reqs] = 0
    last_token_indices_ptr[count:max_num_reqs] = 0


def prepare_decode_inputs(
    grid: tuple[int, ...],
    draft_tokens_ptr: torch.Tensor,
    target_seq_lens_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    sample_src_positions_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    max_model_len: int,
    max_num_reqs: int,
    ADVANCE_DRAFT_POSITIONS: bool,
) -> None:
    """Write the inputs of a head's first step of one token a request; ``grid`` is B + 1.

    Positions and lengths stay within ``max_model_len``, as vLLM's do.
    """
    count = grid[0] - 1
    query_start_loc_ptr[: max_num_reqs + 1] = torch.arange(max_num_reqs + 1).clamp(max=count)
    seq_lens_ptr[count:max_num_reqs] = 0
    input_ids_ptr[:count] = draft_tokens_ptr[:count]
    sample_src_positions_ptr[:count] += 1
    lengths = target_seq_lens_ptr[:count] - num_rejected_ptr[:count]
    if ADVANCE_DRAFT_POSITIONS:
        positions_ptr[:count] = (positions_ptr[:count] + 1).clamp(max=max_model_len - 1)
        lengths = (lengths + 1).clamp(max=max_model_len)
    seq_lens_ptr[:count] = lengths


def update_draft_inputs(
    grid: tuple[int, ...],
    output_draft_tokens_ptr: torch.Tensor,
    next_input_hidden_states_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    sample_src_positions_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    current_draft_step_ptr: torch.Tensor,
    hidden_states_ptr: torch.Tensor,
    max_model_len: int,
    num_speculative_steps: int,
    ADVANCE_DRAFT_POSITIONS: bool,
) -> None:
    """Keep the drafts of a step in ``output_draft_tokens_ptr`` [B, k], and write the next step's
    inputs, if there is one; ``grid`` is B."""
    count = grid[0]
    step = int(current_draft_step_ptr)
    output_draft_tokens_ptr[:count, step] = draft_tokens_ptr[:count]
    if step >= num_speculative_steps - 1:
        return
    sample_src_positions_ptr[:count] += 1
    input_ids_ptr[:count] = draft_tokens_ptr[:count]
    next_input_hidden_states_ptr[:count] = hidden_states_ptr[:count]
    if ADVANCE_DRAFT_POSITIONS:
        positions_ptr[:count] = (positions_ptr[:count] + 1).clamp(max=max_model_len - 1)
        seq_lens_ptr[:count] = (seq_lens_ptr[:count] + 1).clamp(max=max_model_len)


def prepare_one_more(
    grid: tuple[int, ...],
    target_input_ids_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    out_input_ids_ptr: torch.Tensor,
    out_positions_ptr: torch.Tensor,
    last_token_indices_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
) -> None:
    """Write what a draft model reads of a pass of the target: each request's tokens, but for rejected
    drafts, and the token that comes next; tokens 0 behind it make it one more than in the pass.

    ``grid`` is B. ``query_start_loc_ptr`` [B + 1], ``seq_lens_ptr`` and ``num_rejected_ptr`` [B],
    ``last_sampled_ptr`` [R]. Positions and lengths stay within ``max_model_len``, as vLLM's do.
    """
    count = grid[0]
    starts = query_start_loc_ptr[: count + 1].tolist()
    for request in range(count):
        first, end = starts[request : request + 2]
        begin = first + request
        right = end - first - int(num_rejected_ptr[request])
        tokens = out_input_ids_ptr[begin : end + request + 1]
        tokens[:right] = target_input_ids_ptr[first : first + right]
        tokens[right] = last_sampled_ptr.reshape(-1)[idx_mapping_ptr[request]]
        tokens[right + 1 :] = 0
        positions = int(target_positions_ptr[first]) + torch.arange(len(tokens))
        out_positions_ptr[begin : begin + len(tokens)] = positions.clamp(max=max_model_len - 1)
        last_token_indices_ptr[request] = begin + right
        out_query_start_loc_ptr[request] = begin
    out_query_start_loc_ptr[count : max_num_reqs + 1] = starts[count] + count
    out_seq_lens_ptr[:count] = (seq_lens_ptr[:count] + 1).clamp(max=max_model_len)
    out_seq_lens_ptr[count:max_num_reqs] = 0
    last_token_indices_ptr[count:max_num_reqs] = 0


KERNELS: dict[tuple[str, str], Callable[..., None]] = {
    (HEADS, "_prepare_prefill_inputs_kernel"): prepare_prefill_inputs,
    (HEADS, "_prepare_decode_inputs_kernel"): prepare_decode_inputs,
    (HEADS, "_update_draft_inputs_kernel"): update_draft_inputs,
    (DRAFT_MODELS, "_prepare_prefill_inputs_kernel"): prepare_one_more,
}
"""Ours for vLLM's, by the module and the name of the one that they replace; they take tensors."""


def install() -> None:
    """Set ours in place of vLLM's, in a process that hosts a head; as :func:`.launch.install`."""
    if HAS_TRITON:
        return
    for (name, kernel), function in KERNELS.items():
        module = import_module(name)
        theirs: Any = getattr(module, kernel)
        if not isinstance(theirs, Launch):
            setattr(module, kernel, Launch(theirs, function, lambda tensor: tensor))
