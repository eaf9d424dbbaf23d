"""Kernels of vLLM's second runner for a CPU, as NumPy expressions.

Each does what vLLM's kernel of the same name does, in all of its programs, and has that kernel's
parameter names, by which it is called (:mod:`sipipe.worker.cpu_kernels.launch`). Most have a slow,
obvious twin in ``tests/worker/kernel_twins.py``. Rejected: compiled loops, which save 55 µs an
iteration of 128 requests where vLLM prepares its inputs itself, and nothing elsewhere.

Shapes: B requests in the batch, T tokens in the batch, R rows of vLLM's request states, G groups of
KV cache. ``idx_mapping`` [B] has each request's row, ``query_start_loc`` at least [B + 1] its first
token. A table that holds addresses stands for arrays of int32, one a group.
"""

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]


@lru_cache(256)
def at(address: Any, rows: Any, width: Any) -> Int32:
    """The array [rows, width] of int32 at ``address``, where it stays as long as it is asked for."""
    memory: Any = (ctypes.c_int32 * int(rows * width)).from_address(int(address))
    found: Int32 = np.frombuffer(memory, np.int32).reshape(rows, width)
    return found


def lengths(index: Int64, query_start_loc: Int32) -> Int32:
    """How many tokens of each request are in the batch, [B]. (``np.diff`` takes ten times as long.)"""
    count = len(index)
    return query_start_loc[1 : count + 1] - query_start_loc[:count]


def places(index: Int64, query_start_loc: Int32, num_computed_tokens: Int32) -> tuple[Any, Any]:
    """Of each token of a batch: its request's row, and its place among that request's; [T] both."""
    first = num_computed_tokens[index] - query_start_loc[: len(index)]
    counts = lengths(index, query_start_loc)
    return index.repeat(counts), first.repeat(counts) + np.arange(query_start_loc[len(index)])


def gather_block_tables(
    grid: tuple[int, ...],
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
    index = batch_idx_to_req_idx[:num_reqs]
    for group, width in enumerate(block_table_strides):
        target = at(dst_block_table_ptrs[group], grid[1], width)
        target[num_reqs:] = 0
        counts = num_blocks_ptr[group, index]
        most = counts.max(initial=0)
        source = at(src_block_table_ptrs[group], num_blocks_ptr.shape[1], width)[:, :most]
        columns = np.arange(most, dtype=np.int32)
        there = columns < counts[:, None]
        np.copyto(target[:num_reqs, :most], source[index], where=there)
        if MASK_SLIDING_WINDOW and sliding_window_reach_ptr[group] > 0:
            oldest = num_computed_tokens_ptr[index] - sliding_window_reach_ptr[group]
            unseen = columns < (oldest // block_sizes_ptr[group])[:, None]
            target[:num_reqs, :most][unseen & there] = 0


def compute_slot_mappings(
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
    rows, tokens = (
        idx_mapping.repeat(lengths(idx_mapping, query_start_loc)),
        query_start_loc[len(idx_mapping)],
    )
    most = idx_mapping.max(initial=0) + 1
    for group, enabled in enumerate(slot_mapping_enabled):
        slots, size = slot_mappings_ptr[group], int(block_sizes[group])
        slots[tokens:max_num_tokens] = PAD_ID
        if not enabled:
            slots[:tokens] = PAD_ID
            continue
        blocks = at(block_table_ptrs[group], most, block_table_strides[group])
        columns = np.where(rows < 0, 0, pos[:tokens] // size)  # a row of -1 has any position
        slots[:tokens] = blocks[rows, columns] * np.int64(size) + pos[:tokens] % size
        slots[:tokens][rows < 0] = PAD_ID


def prepare_prefill_inputs(
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
    prompts = prefill_lens_ptr[idx_mapping_ptr]
    for batch in (num_computed_tokens_ptr[idx_mapping_ptr] < prompts).nonzero()[0]:
        row, length = idx_mapping_ptr[batch], prompts[batch]
        begin, end = query_start_loc_ptr[batch], query_start_loc_ptr[batch + 1]
        first = num_computed_tokens_ptr[row]
        last = first + end - begin
        input_ids_ptr[begin:end] = all_token_ids_ptr[row, first:last]
        following = all_token_ids_ptr[row, last : min(last + num_lookahead, length)]
        next_prefill_tokens_ptr[:num_lookahead, row] = 0
        next_prefill_tokens_ptr[: len(following), row] = following


def prepare_pos_seq_lens(
    pos_ptr: Int64,
    seq_lens_ptr: Int32,
    idx_mapping_ptr: Int64,
    query_start_loc_ptr: Int32,
    num_computed_tokens_ptr: Int32,
    max_num_reqs: int,
) -> None:
    """Write positions and sequence lengths, and length 0 behind the batch."""
    count = len(idx_mapping_ptr)
    ran = lengths(idx_mapping_ptr, query_start_loc_ptr)
    seq_lens_ptr[:count] = num_computed_tokens_ptr[idx_mapping_ptr] + ran
    seq_lens_ptr[count:max_num_reqs] = 0
    _, found = places(idx_mapping_ptr, query_start_loc_ptr, num_computed_tokens_ptr)
    pos_ptr[: len(found)] = found


def combine_sampled_and_draft_tokens(
    input_ids_ptr: Int32,
    idx_mapping_ptr: Int64,
    last_sampled_tokens_ptr: Int64,
    query_start_loc_ptr: Int32,
    seq_lens_ptr: Int32,
    prefill_len_ptr: Int32,
    logits_indices_ptr: Int64,
) -> None:
    """Write which tokens have logits, one a request, as the runner has no drafts, and the input token
    of each request that decodes, from ``last_sampled_tokens_ptr`` [R, 1]."""
    count = len(idx_mapping_ptr)
    last = query_start_loc_ptr[1 : count + 1] - 1
    logits_indices_ptr[:count] = last
    decodes = (seq_lens_ptr[:count] > prefill_len_ptr[idx_mapping_ptr]).nonzero()[0]
    input_ids_ptr[last[decodes]] = last_sampled_tokens_ptr[idx_mapping_ptr[decodes], 0]


def prepare_rope_positions(
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
    rows, found = places(idx_mapping_ptr, query_start_loc_ptr, num_computed_tokens_ptr)
    positions_ptr[:NUM_DIMS, : len(found)] = found + prefill_delta_ptr[rows]
    known = (num_computed_tokens_ptr[rows] < prefill_lens_ptr[rows]).nonzero()[0]
    for dimension in range(NUM_DIMS if len(known) else 0):
        row = rows[known] * NUM_DIMS + dimension
        positions_ptr[dimension, known] = prefill_positions_ptr[row, found[known]]


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: Int64,
    query_start_loc_ptr: Int32,
    idx_mapping_ptr: Int64,
    num_computed_tokens_ptr: Int32,
    all_token_ids_ptr: Int32,
) -> None:
    """Write the token behind each token of a batch, of the same request."""
    rows, found = places(idx_mapping_ptr, query_start_loc_ptr, num_computed_tokens_ptr)
    # Of a full context's last token nobody asks what follows.
    following = np.minimum(found + 1, all_token_ids_ptr.shape[1] - 1)
    prompt_logprobs_token_ids_ptr[: len(found)] = all_token_ids_ptr[rows, following]


def apply_write(
    output_ptr: Any,
    output_stride: Any,
    write_indices_ptr: Int32,
    write_starts_ptr: Int32,
    write_contents_ptr: Any,
    write_cu_lens_ptr: Int32,
    write_group_ids_ptr: Any,
) -> None:
    """Write pieces into rows: of one array, or of the array of the piece's group.

    Args:
        output_ptr: [R, W] or [R]; with groups, the addresses of [R, W_g], [G].
        output_stride: elements of a row; with groups, [G].
        write_contents_ptr: the pieces, one behind another.
        write_cu_lens_ptr: where each piece ends.
        write_group_ids_ptr: each piece's group, or None.
    """
    begin = 0
    pieces = zip(write_indices_ptr, write_starts_ptr, write_cu_lens_ptr, strict=True)
    for piece, (row, start, end) in enumerate(pieces):
        if write_group_ids_ptr is None:
            target = output_ptr.reshape(-1, output_stride)[row]
        else:
            group = write_group_ids_ptr[piece]
            width = output_stride[group]
            target = at(output_ptr[group] + np.uint64(4 * int(row) * int(width)), 1, width)[0]
        target[start : start + end - begin] = write_contents_ptr[begin:end]
        begin = end


def post_update(
    idx_mapping_ptr: Int64,
    num_computed_tokens_ptr: Int32,
    last_sampled_tokens_ptr: Int64,
    output_bin_counts_ptr: Any,
    sampled_tokens_ptr: Int64,
    num_sampled_ptr: Int32,
    num_rejected_ptr: Int32,
    query_start_loc_ptr: Any,
    all_token_ids_ptr: Int32,
    total_len_ptr: Int32,
) -> None:
    """Take over drawn tokens into the request states; a row of -1 is left out.

    Args:
        output_bin_counts_ptr: [R, V], or None.
        sampled_tokens_ptr: [B, 1], as the runner has no drafts; num_sampled_ptr [B]: whether it is.
        query_start_loc_ptr: [B + 1]; None: computed tokens were counted before.
    """
    there = idx_mapping_ptr >= 0
    drawn = (there & (num_sampled_ptr > 0)).nonzero()[0]
    rows, tokens = idx_mapping_ptr[drawn], sampled_tokens_ptr[drawn, 0]
    last_sampled_tokens_ptr[rows, 0] = tokens
    total = total_len_ptr[rows]
    all_token_ids_ptr[rows, total] = tokens
    total_len_ptr[rows] = total + 1
    if output_bin_counts_ptr is not None:
        output_bin_counts_ptr[rows, tokens] += 1
    ran = -num_rejected_ptr
    if query_start_loc_ptr is not None:
        ran += lengths(idx_mapping_ptr, query_start_loc_ptr)
    num_computed_tokens_ptr[idx_mapping_ptr[there]] += ran[there]


def post_update_num_computed_tokens(
    idx_mapping_ptr: Int64, num_computed_tokens_ptr: Int32, query_start_loc_ptr: Int32
) -> None:
    """Count the tokens of this iteration as computed."""
    num_computed_tokens_ptr[idx_mapping_ptr] += lengths(idx_mapping_ptr, query_start_loc_ptr)


def fill_num_accepted(idx_mapping_ptr: Int64, num_accepted_ptr: Int32, num_sampled: int) -> None:
    """Write one number for all requests; a row of -1 is left out."""
    num_accepted_ptr[idx_mapping_ptr[idx_mapping_ptr >= 0]] = num_sampled


def scatter_num_accepted(
    idx_mapping_ptr: Int64, num_sampled_ptr: Int32, num_accepted_ptr: Int32
) -> None:
    """Write how many tokens each request got, at least 1; a row of -1 is left out."""
    there = (idx_mapping_ptr >= 0).nonzero()[0]
    num_accepted_ptr[idx_mapping_ptr[there]] = np.maximum(num_sampled_ptr[there], 1)


def preprocess_mamba_align(
    idx_mapping_ptr: Int64,
    state_idx_ptr: Int32,
    num_computed_tokens_ptr: Int32,
    query_start_loc_ptr: Int32,
    num_accepted_tokens_ptr: Int32,
    src_col_ptr: Int32,
    src_off_ptr: Int32,
    num_reqs: int,
    MAMBA_BLOCK_SIZE: int,
) -> None:
    """Find the block of each request's recurrent state: that of the last token so far, which moves
    to that of the last token of this iteration.

    Args:
        state_idx_ptr: in and out, [R]; -1 in a request without tokens.
        src_col_ptr: out, [R], what ``state_idx_ptr`` was.
        src_off_ptr: out, [R], tokens of drafts that were accepted.
    """
    rows = idx_mapping_ptr[:num_reqs]
    before = state_idx_ptr[rows]
    last = num_computed_tokens_ptr[rows] + lengths(rows, query_start_loc_ptr)
    after = (last + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1
    src_col_ptr[rows] = before
    src_off_ptr[rows] = np.maximum(num_accepted_tokens_ptr[rows] - 1, 0)
    state_idx_ptr[rows] = after
    num_accepted_tokens_ptr[rows[(before >= 0) & (before != after)]] = 1


def precopy_mamba_align(
    mamba_state_idx_ptr: Int32,
    src_col_ptr: Int32,
    block_table_ptrs_ptr: Int64,
    block_table_stride_req: int,
    state_base_addrs_ptr: Int64,
    state_block_strides_ptr: Int64,
    state_elem_sizes_ptr: Int32,
    state_inner_sizes_ptr: Int64,
    state_conv_widths_ptr: Int32,
    state_group_indices_ptr: Int32,
    state_dim_row_count_ptr: Int32,
    state_dim_row_stride_ptr: Int64,
    idx_mapping_ptr: Int64,
    num_reqs: int,
) -> None:
    """Copy recurrent states of requests that have come to another block into that block: whole ones,
    as the runner has no drafts, and so no part of a state is of tokens that were rejected.

    Args:
        state_base_addrs_ptr: [S], of each state of each layer, and likewise the others: bytes
            between blocks, bytes of an element, elements of a token (or of the whole), tokens of a
            convolution (or 0), group of KV cache, rows of a layout with tokens innermost (or 0)
            and bytes between those.
    """
    rows = idx_mapping_ptr[:num_reqs]
    sources, targets = src_col_ptr[rows], mamba_state_idx_ptr[rows]
    moved = ((rows >= 0) & (sources >= 0) & (sources != targets)).nonzero()[0]
    if not len(moved):
        return
    elements = np.maximum(state_conv_widths_ptr, 1) * state_inner_sizes_ptr
    sizes, parts = elements * state_elem_sizes_ptr, np.maximum(state_dim_row_count_ptr, 1)
    for state, group in enumerate(state_group_indices_ptr):
        table = at(block_table_ptrs_ptr[group], rows.max() + 1, block_table_stride_req)
        stride, base = int(state_block_strides_ptr[state]), int(state_base_addrs_ptr[state])
        for batch in moved:
            blocks = table[rows[batch]]
            read = base + int(blocks[sources[batch]]) * stride
            written = base + int(blocks[targets[batch]]) * stride
            for part in range(parts[state]):
                start = part * int(state_dim_row_stride_ptr[state])
                ctypes.memmove(written + start, read + start, int(sizes[state]))


def postprocess_mamba() -> None:
    """Nothing: a state ends where its tokens do, unless drafts were rejected."""


def zero_kv_blocks(
    seg_addrs_ptr: UInt64,
    seg_block_strides_ptr: Int64,
    seg_page_sizes_ptr: Int64,
    block_ids_ptr: Int64,
) -> None:
    """Zero blocks of KV cache in every segment: at an address, so many int32 apart and long."""
    segments = [
        array.tolist() for array in (seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr)
    ]
    for address, stride, size in zip(*segments, strict=True):
        for block in block_ids_ptr.tolist():
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)
