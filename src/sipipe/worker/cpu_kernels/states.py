"""Kernels of vLLM's second runner that write request states and the KV cache.

As in :mod:`sipipe.worker.cpu_kernels.inputs`, whose conventions and shapes these have.
"""

from typing import Any

import numpy as np

from sipipe.jit import entry
from sipipe.worker.cpu_kernels.inputs import Grid, Int32, Int64, UInt64, bytes_at, int32_at


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
    pieces = (write_indices_ptr, write_starts_ptr, write_contents_ptr, write_cu_lens_ptr)
    if write_group_ids_ptr is None:
        write_rows(output_ptr.reshape(-1), output_stride, *pieces)
    else:
        write_groups(output_ptr, output_stride, *pieces, write_group_ids_ptr)


@entry
def write_rows(
    rows: Any, stride: int, indices: Int32, starts: Int32, contents: Any, ends: Int32
) -> None:
    """:func:`apply_write` into one array, flat."""
    begin = 0
    for write in range(indices.shape[0]):
        place = np.int64(indices[write]) * stride + starts[write]
        for j in range(ends[write] - begin):
            rows[place + j] = contents[begin + j]
        begin = ends[write]


@entry
def write_groups(
    addresses: UInt64,
    strides: Int64,
    indices: Int32,
    starts: Int32,
    contents: Int32,
    ends: Int32,
    groups: Int32,
) -> None:
    """:func:`apply_write` into the arrays at ``addresses``."""
    begin = 0
    for write in range(indices.shape[0]):
        group = groups[write]
        place = np.int64(indices[write]) * strides[group] + starts[write]
        target = int32_at(addresses[group], place)
        for j in range(ends[write] - begin):
            target[j] = contents[begin + j]
        begin = ends[write]


@entry
def post_update(
    grid: Grid,
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
        sampled_tokens_ptr: [B, at least the most of num_sampled].
        query_start_loc_ptr: [B + 1]; None: computed tokens were counted before.
    """
    for batch in range(grid[0]):
        row = idx_mapping_ptr[batch]
        if row < 0:
            continue
        total, drawn = total_len_ptr[row], num_sampled_ptr[batch]
        for j in range(drawn):
            token = sampled_tokens_ptr[batch, j]
            last_sampled_tokens_ptr[row, 0] = token
            all_token_ids_ptr[row, total + j] = token
            if output_bin_counts_ptr is not None:
                output_bin_counts_ptr[row, token] += 1
        total_len_ptr[row] = total + max(drawn, 0)
        ran = 0
        if query_start_loc_ptr is not None:
            ran = query_start_loc_ptr[batch + 1] - query_start_loc_ptr[batch]
        num_computed_tokens_ptr[row] += ran - num_rejected_ptr[batch]


@entry
def post_update_num_computed_tokens(
    grid: Grid, idx_mapping_ptr: Int64, num_computed_tokens_ptr: Int32, query_start_loc_ptr: Int32
) -> None:
    """Count the tokens of this iteration as computed."""
    for batch in range(grid[0]):
        ran = query_start_loc_ptr[batch + 1] - query_start_loc_ptr[batch]
        num_computed_tokens_ptr[idx_mapping_ptr[batch]] += ran


@entry
def fill_num_accepted(
    grid: Grid, idx_mapping_ptr: Int64, num_accepted_ptr: Int32, num_sampled: int
) -> None:
    """Write one number for all requests; a row of -1 is left out."""
    for batch in range(grid[0]):
        row = idx_mapping_ptr[batch]
        if row >= 0:
            num_accepted_ptr[row] = num_sampled


@entry
def scatter_num_accepted(
    grid: Grid, idx_mapping_ptr: Int64, num_sampled_ptr: Int32, num_accepted_ptr: Int32
) -> None:
    """Write how many tokens each request got, at least 1; a row of -1 is left out."""
    for batch in range(grid[0]):
        row = idx_mapping_ptr[batch]
        if row >= 0:
            num_accepted_ptr[row] = max(num_sampled_ptr[batch], 1)


@entry
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
    for batch in range(num_reqs):
        row = idx_mapping_ptr[batch]
        before = state_idx_ptr[row]
        ran = query_start_loc_ptr[batch + 1] - query_start_loc_ptr[batch]
        last = num_computed_tokens_ptr[row] + ran
        after = (last + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1
        src_col_ptr[row] = before
        src_off_ptr[row] = max(num_accepted_tokens_ptr[row] - 1, 0)
        state_idx_ptr[row] = after
        if before >= 0 and before != after:
            num_accepted_tokens_ptr[row] = 1


@entry
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
    for batch in range(num_reqs):
        row = idx_mapping_ptr[batch]
        if row < 0:
            continue
        source, target = src_col_ptr[row], mamba_state_idx_ptr[row]
        if source < 0 or source == target:
            continue
        for state in range(state_base_addrs_ptr.shape[0]):
            table = block_table_ptrs_ptr[state_group_indices_ptr[state]]
            blocks = int32_at(table, row * block_table_stride_req)
            base, stride = state_base_addrs_ptr[state], state_block_strides_ptr[state]
            tokens = max(state_conv_widths_ptr[state], 1)
            size = tokens * state_inner_sizes_ptr[state] * state_elem_sizes_ptr[state]
            for part in range(max(state_dim_row_count_ptr[state], 1)):
                start = part * state_dim_row_stride_ptr[state]
                read = bytes_at(base, np.int64(blocks[source]) * stride + start)
                written = bytes_at(base, np.int64(blocks[target]) * stride + start)
                for j in range(size):
                    written[j] = read[j]


def postprocess_mamba() -> None:
    """Nothing: a state ends where its tokens do, unless drafts were rejected."""


@entry
def zero_kv_blocks(
    seg_addrs_ptr: UInt64,
    seg_block_strides_ptr: Int64,
    seg_page_sizes_ptr: Int64,
    block_ids_ptr: Int64,
) -> None:
    """Zero blocks of KV cache in every segment: at an address, so many int32 apart and long."""
    for block in block_ids_ptr:
        for segment in range(seg_addrs_ptr.shape[0]):
            place = block * seg_block_strides_ptr[segment]
            target = int32_at(seg_addrs_ptr[segment], place)
            for j in range(seg_page_sizes_ptr[segment]):
                target[j] = 0
