"""Kernels of vLLM's second runner for recurrent states (Mamba) on a CPU, as NumPy expressions.

They are written by the rules, and with the shapes, of :mod:`sipipe.worker.cpu_kernels.kernels`.
"""

import ctypes

import numpy as np

from sipipe.worker.cpu_kernels.kernels import Int32, Int64, at, lengths


def fill_num_accepted(idx_mapping_ptr: Int64, num_accepted_ptr: Int32, num_sampled: int) -> None:
    """Write ``num_sampled`` for all requests of the batch into ``num_accepted_ptr`` [R]. A row of -1 is
    left out."""
    num_accepted_ptr[idx_mapping_ptr[idx_mapping_ptr >= 0]] = num_sampled


def scatter_num_accepted(
    idx_mapping_ptr: Int64, num_sampled_ptr: Int32, num_accepted_ptr: Int32
) -> None:
    """Write into ``num_accepted_ptr`` [R] how many tokens each request got, from ``num_sampled_ptr``
    [B], at least 1. A row of -1 is left out."""
    exist = (idx_mapping_ptr >= 0).nonzero()[0]
    num_accepted_ptr[idx_mapping_ptr[exist]] = np.maximum(num_sampled_ptr[exist], 1)


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
    """Write in which block each request's recurrent state is, before and after this iteration. A state
    is in the block of its last token, so it moves when this iteration's tokens reach another.

    Args:
        state_idx_ptr: in and out, [R], column of the block; -1 for a request without tokens.
        num_computed_tokens_ptr: [R].
        num_accepted_tokens_ptr: in and out, [R], tokens that the last iteration gave.
        src_col_ptr: out, [R], ``state_idx_ptr`` as it was.
        src_off_ptr: out, [R], draft tokens of the last iteration that were accepted.
        MAMBA_BLOCK_SIZE: tokens of a block.
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
    """Copy the recurrent states of requests that have reached another block into that block. Whole
    states are copied: as the runner has no drafts, no part of a state is of rejected tokens.

    Args:
        mamba_state_idx_ptr: [R], column of the block to copy to.
        src_col_ptr: [R], column of the block to copy from; -1: there is none.
        block_table_ptrs_ptr: [G], addresses of tables [R, block_table_stride_req].
        state_base_addrs_ptr: [S], address of block 0 of each state of each layer.
        state_block_strides_ptr: [S], bytes between blocks.
        state_elem_sizes_ptr: [S], bytes of an element.
        state_inner_sizes_ptr: [S], elements of a token, or of the state if it has no tokens.
        state_conv_widths_ptr: [S], tokens of a convolution's state, or 0.
        state_group_indices_ptr: [S], group of KV cache.
        state_dim_row_count_ptr: [S], rows of a layout with tokens innermost, or 0.
        state_dim_row_stride_ptr: [S], bytes between such rows.
    """
    rows = idx_mapping_ptr[:num_reqs]
    sources = src_col_ptr[rows]
    targets = mamba_state_idx_ptr[rows]
    moved = ((rows >= 0) & (sources >= 0) & (sources != targets)).nonzero()[0]
    if not len(moved):
        return
    elements = np.maximum(state_conv_widths_ptr, 1) * state_inner_sizes_ptr
    sizes = elements * state_elem_sizes_ptr
    parts = np.maximum(state_dim_row_count_ptr, 1)
    for state, group in enumerate(state_group_indices_ptr):
        table = at(block_table_ptrs_ptr[group], rows.max() + 1, block_table_stride_req)
        stride = int(state_block_strides_ptr[state])
        base = int(state_base_addrs_ptr[state])
        for batch in moved:
            blocks = table[rows[batch]]
            source = base + int(blocks[sources[batch]]) * stride
            target = base + int(blocks[targets[batch]]) * stride
            for part in range(parts[state]):
                offset = part * int(state_dim_row_stride_ptr[state])
                ctypes.memmove(target + offset, source + offset, int(sizes[state]))


def postprocess_mamba() -> None:
    """Do nothing: a state ends where its tokens do, as no draft is rejected here."""
