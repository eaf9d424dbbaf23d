"""Kernels of vLLM's second runner that read request states into a batch, as loops of one thread.

Each does what vLLM's kernel of the same name does, program after program, and has that kernel's
parameter names, by which it is called (:mod:`sipipe.worker.cpu_kernels.launch`); ``grid`` is how
many programs vLLM launches. Each has a slow, obvious twin in ``tests/worker/kernel_twins.py``.

Shapes: B requests in the batch, T tokens in the batch, R rows of vLLM's request states, G groups of
KV cache. ``idx_mapping`` [B] has each request's row. A table that holds addresses stands for arrays
of int32, one a group.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from sipipe.jit import entry

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Grid = tuple[int, ...]


def _pointer_to(element: types.Type) -> Any:
    @intrinsic
    def at(typing: Any, address: Any, start: Any) -> Any:  # noqa: ARG001 - Numba hands it in
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = context.get_value_type(signature.return_type)
            return builder.gep(builder.inttoptr(arguments[0], pointer), [arguments[1]])

        return types.CPointer(element)(types.uint64, types.int64), generate

    return at


int32_at = _pointer_to(types.int32)
"""``(address, start)``: int32 from element ``start`` of the array at ``address``, to be indexed."""
bytes_at = _pointer_to(types.uint8)


@entry
def gather_block_tables(
    grid: Grid,
    batch_idx_to_req_idx: Int64,
    src_block_table_ptrs: UInt64,
    dst_block_table_ptrs: UInt64,
    block_table_strides: Int64,
    num_blocks_ptr: Int32,
    num_reqs: int,
    num_computed_tokens_ptr: Any = None,
    sliding_window_reach_ptr: Any = None,
    block_sizes_ptr: Any = None,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Write the block table of a batch, and zeros into the rows behind it; ``grid`` is G and the rows
    to write, ``num_blocks_ptr`` [G, R] each row's blocks.

    Columns past a request's blocks keep what they held. With ``MASK_SLIDING_WINDOW``, the blocks
    that no query of this iteration can see are the null block.
    """
    for group in range(grid[0]):
        width = block_table_strides[group]
        for batch in range(grid[1]):
            target = int32_at(dst_block_table_ptrs[group], batch * width)
            if batch >= num_reqs:
                for j in range(width):
                    target[j] = 0
                continue
            row = batch_idx_to_req_idx[batch]
            count = num_blocks_ptr[group, row]
            source = int32_at(src_block_table_ptrs[group], row * width)
            unseen = 0
            if MASK_SLIDING_WINDOW and sliding_window_reach_ptr is not None:
                reach = sliding_window_reach_ptr[group]
                if reach > 0:
                    oldest = max(num_computed_tokens_ptr[row] - reach, 0)
                    unseen = min(oldest // block_sizes_ptr[group], count)
            for j in range(unseen):
                target[j] = 0
            for j in range(unseen, count):
                target[j] = source[j]


@entry
def compute_slot_mappings(
    grid: Grid,
    max_num_tokens: int,
    idx_mapping: Int64,
    query_start_loc: Int32,
    pos: Int64,
    block_table_ptrs: UInt64,
    block_table_strides: Int64,
    block_sizes: Int32,
    slot_mapping_enabled: Bools,
    slot_mappings_ptr: Int64,
    PAD_ID: int,
) -> None:
    """Write the KV cache slot of each token of a batch into ``slot_mappings_ptr`` [G, at least
    max_num_tokens], and ``PAD_ID`` behind them, for a group without slots and for a row of -1."""
    requests = grid[1] - 1
    for group in range(grid[0]):
        size, width = block_sizes[group], block_table_strides[group]
        slots = slot_mappings_ptr[group]
        for batch in range(requests):
            row = idx_mapping[batch]
            first, last = query_start_loc[batch], query_start_loc[batch + 1]
            if row < 0 or not slot_mapping_enabled[group]:
                slots[first:last] = PAD_ID
                continue
            blocks = int32_at(block_table_ptrs[group], row * width)
            for token in range(first, last):
                position = pos[token]
                slots[token] = np.int64(blocks[position // size]) * size + position % size
        slots[query_start_loc[requests] : max_num_tokens] = PAD_ID


@entry
def prepare_prefill_inputs(
    grid: Grid,
    input_ids_ptr: Int32,
    next_prefill_tokens_ptr: Int32,
    num_lookahead: int,
    idx_mapping_ptr: Int64,
    query_start_loc_ptr: Int32,
    all_token_ids_ptr: Int32,
    prefill_lens_ptr: Int32,
    num_computed_tokens_ptr: Int32,
) -> None:
    """Write the tokens of requests that are in their prompt, from ``all_token_ids_ptr`` [R,
    max_model_len], and those that follow: [num_lookahead, R], 0 behind the prompt."""
    for batch in range(grid[0]):
        row = idx_mapping_ptr[batch]
        prefill, computed = prefill_lens_ptr[row], num_computed_tokens_ptr[row]
        if computed >= prefill:
            continue
        begin, end = query_start_loc_ptr[batch], query_start_loc_ptr[batch + 1]
        for j in range(end - begin):
            input_ids_ptr[begin + j] = all_token_ids_ptr[row, computed + j]
        for ahead in range(num_lookahead):
            place = computed + end - begin + ahead
            token = all_token_ids_ptr[row, place] if place < prefill else 0
            next_prefill_tokens_ptr[ahead, row] = token


@entry
def prepare_pos_seq_lens(
    grid: Grid,
    pos_ptr: Int64,
    seq_lens_ptr: Int32,
    idx_mapping_ptr: Int64,
    query_start_loc_ptr: Int32,
    num_computed_tokens_ptr: Int32,
    max_num_reqs: int,
) -> None:
    """Write positions and sequence lengths, and length 0 behind the batch."""
    requests = grid[0] - 1
    seq_lens_ptr[requests:max_num_reqs] = 0
    for batch in range(requests):
        computed = num_computed_tokens_ptr[idx_mapping_ptr[batch]]
        begin, end = query_start_loc_ptr[batch], query_start_loc_ptr[batch + 1]
        seq_lens_ptr[batch] = computed + end - begin
        for j in range(end - begin):
            pos_ptr[begin + j] = computed + j


@entry
def combine_sampled_and_draft_tokens(
    grid: Grid,
    input_ids_ptr: Int32,
    idx_mapping_ptr: Int64,
    last_sampled_tokens_ptr: Int64,
    query_start_loc_ptr: Int32,
    seq_lens_ptr: Int32,
    prefill_len_ptr: Int32,
    cu_num_logits_ptr: Int32,
    logits_indices_ptr: Int64,
) -> None:
    """Write which tokens have logits, one a request, as the runner has no drafts, and the input token
    of each request that decodes, from ``last_sampled_tokens_ptr`` [R, 1]."""
    for batch in range(grid[0]):
        row = idx_mapping_ptr[batch]
        last = query_start_loc_ptr[batch + 1] - 1
        logits_indices_ptr[cu_num_logits_ptr[batch]] = last
        if seq_lens_ptr[batch] > prefill_len_ptr[row]:
            input_ids_ptr[last] = last_sampled_tokens_ptr[row, 0]


@entry
def prepare_rope_positions(
    grid: Grid,
    positions_ptr: Int64,
    prefill_positions_ptr: Int32,
    prefill_delta_ptr: Int32,
    idx_mapping_ptr: Int64,
    query_start_loc_ptr: Int32,
    prefill_lens_ptr: Int32,
    num_computed_tokens_ptr: Int32,
    NUM_DIMS: int,
) -> None:
    """Write the positions of each token in all dimensions (M-RoPE).

    Args:
        positions_ptr: out, [D, more than T].
        prefill_positions_ptr: [R x D, max_model_len], of each token of a prompt.
        prefill_delta_ptr: [R], what is added to the place of a token behind the prompt.
    """
    for batch in range(grid[0]):
        row = idx_mapping_ptr[batch]
        begin, end = query_start_loc_ptr[batch], query_start_loc_ptr[batch + 1]
        computed = num_computed_tokens_ptr[row]
        known = computed < prefill_lens_ptr[row]
        for dimension in range(NUM_DIMS):
            for j in range(end - begin):
                if known:
                    position = prefill_positions_ptr[NUM_DIMS * row + dimension, computed + j]
                else:
                    position = computed + j + prefill_delta_ptr[row]
                positions_ptr[dimension, begin + j] = position


@entry
def prompt_logprobs_token_ids(
    grid: Grid,
    prompt_logprobs_token_ids_ptr: Int64,
    query_start_loc_ptr: Int32,
    idx_mapping_ptr: Int64,
    num_computed_tokens_ptr: Int32,
    all_token_ids_ptr: Int32,
) -> None:
    """Write the token behind each token of a batch, of the same request."""
    last = all_token_ids_ptr.shape[1] - 1
    for batch in range(grid[0]):
        row = idx_mapping_ptr[batch]
        begin, end = query_start_loc_ptr[batch], query_start_loc_ptr[batch + 1]
        following = num_computed_tokens_ptr[row] + 1
        for j in range(end - begin):
            # Of a full context's last token nobody asks what follows.
            token = all_token_ids_ptr[row, min(following + j, last)]
            prompt_logprobs_token_ids_ptr[begin + j] = token
