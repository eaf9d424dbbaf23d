"""Kernels of vLLM's second runner that write request states and the KV cache.

As in :mod:`sipipe.worker.cpu_kernels.inputs`, whose conventions and shapes these have.
"""

from typing import Any

import numpy as np

from sipipe.jit import entry
from sipipe.worker.cpu_kernels.inputs import Grid, Int32, Int64, UInt64, int32_at


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
