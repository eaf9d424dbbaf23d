"""Kernels of vLLM's second runner for a CPU, as NumPy expressions.

Each function does what all programs of vLLM's kernel of the same name do. It has that kernel's
parameter names, by which it is called (:mod:`sipipe.worker.cpu_kernels.launch`). Most have a slow,
obvious twin in ``tests/worker/kernel_twins.py``.

Rejected: compiled loops, which save 55 µs an iteration of 128 requests where vLLM prepares its
inputs itself, and nothing elsewhere.

Shapes: B requests in the batch, T tokens in the batch, R rows of vLLM's request states, G groups of
KV cache. ``idx_mapping`` [B] has each request's row of the states, ``query_start_loc`` at least
[B + 1] its first token in the batch. A table of addresses stands for arrays of int32, one for each
group.
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
    """The array [rows, width] of int32 at ``address``. It is cached by address: vLLM keeps its
    tables in place as long as it launches kernels on them."""
    memory: Any = (ctypes.c_int32 * int(rows * width)).from_address(int(address))
    array: Int32 = np.frombuffer(memory, np.int32).reshape(rows, width)
    return array


def lengths(index: Int64, query_start_loc: Int32) -> Int32:
    """Numbers of tokens of each request in the batch, [B]."""
    # `np.diff` takes ten times as long.
    count = len(index)
    return query_start_loc[1 : count + 1] - query_start_loc[:count]


def places(index: Int64, query_start_loc: Int32, num_computed_tokens: Int32) -> tuple[Any, Any]:
    """Rows of the requests of each token of the batch, and the tokens' positions; both [T]."""
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
    """Write the block tables of a batch, and zeros into the rows behind it.

    Columns past a request's blocks keep what they held.

    Args:
        grid: G, and the number of rows to write.
        batch_idx_to_req_idx: ``idx_mapping``.
        src_block_table_ptrs: [G], addresses of tables [R, stride].
        dst_block_table_ptrs: [G], addresses of tables [rows to write, stride].
        block_table_strides: [G], columns of a table.
        num_blocks_ptr: [G, R], blocks of each row.
        sliding_window_reach_ptr: [G], tokens before a query that it sees; 0: all.
        block_sizes_ptr: [G], tokens of a block.
        MASK_SLIDING_WINDOW: write the null block, 0, for blocks that no query of this iteration sees.
    """
    index = batch_idx_to_req_idx[:num_reqs]
    for group, width in enumerate(block_table_strides):
        target = at(dst_block_table_ptrs[group], grid[1], width)
        target[num_reqs:] = 0
        counts = num_blocks_ptr[group, index]
        most = counts.max(initial=0)
        source = at(src_block_table_ptrs[group], num_blocks_ptr.shape[1], width)[:, :most]
        columns = np.arange(most, dtype=np.int32)
        exist = columns < counts[:, None]
        np.copyto(target[:num_reqs, :most], source[index], where=exist)
        if MASK_SLIDING_WINDOW and sliding_window_reach_ptr[group] > 0:
            oldest = num_computed_tokens_ptr[index] - sliding_window_reach_ptr[group]
            unseen = columns < (oldest // block_sizes_ptr[group])[:, None]
            target[:num_reqs, :most][unseen & exist] = 0


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
    """Write the KV cache slot of each token of a batch.

    ``PAD_ID`` stands behind the tokens, for all tokens of a group without slots, and for tokens of a
    row of -1.

    Args:
        pos: [at least T], positions.
        block_table_ptrs: [G], addresses of tables [R, stride].
        block_table_strides: [G], columns of a table.
        block_sizes: [G], tokens of a block.
        slot_mapping_enabled: [G], false for a group without slots.
        slot_mappings_ptr: out, [G, at least max_num_tokens].
    """
    rows = idx_mapping.repeat(lengths(idx_mapping, query_start_loc))
    tokens = query_start_loc[len(idx_mapping)]
    most = idx_mapping.max(initial=0) + 1
    for group, enabled in enumerate(slot_mapping_enabled):
        slots = slot_mappings_ptr[group]
        size = int(block_sizes[group])
        slots[tokens:max_num_tokens] = PAD_ID
        if not enabled:
            slots[:tokens] = PAD_ID
            continue
        blocks = at(block_table_ptrs[group], most, block_table_strides[group])
        columns = np.where(rows < 0, 0, pos[:tokens] // size)  # -1: any position
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
    """Write the input tokens of requests that are in their prompt, and the tokens that follow those.

    Args:
        input_ids_ptr: out, [at least T].
        next_prefill_tokens_ptr: out, [num_lookahead, R], the prompt's tokens behind this batch's, and
            0 behind the prompt.
        all_token_ids_ptr: [R, max_model_len].
        prefill_lens_ptr: [R], lengths of prompts.
        num_computed_tokens_ptr: [R].
    """
    prompts = prefill_lens_ptr[idx_mapping_ptr]
    for batch in (num_computed_tokens_ptr[idx_mapping_ptr] < prompts).nonzero()[0]:
        row = idx_mapping_ptr[batch]
        length = prompts[batch]
        begin = query_start_loc_ptr[batch]
        end = query_start_loc_ptr[batch + 1]
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
    """Write the tokens' positions into ``pos_ptr`` [at least T], and the requests' lengths with this
    iteration's tokens into ``seq_lens_ptr`` [max_num_reqs], which are 0 behind the batch."""
    count = len(idx_mapping_ptr)
    new = lengths(idx_mapping_ptr, query_start_loc_ptr)
    seq_lens_ptr[:count] = num_computed_tokens_ptr[idx_mapping_ptr] + new
    seq_lens_ptr[count:max_num_reqs] = 0
    _, positions = places(idx_mapping_ptr, query_start_loc_ptr, num_computed_tokens_ptr)
    pos_ptr[: len(positions)] = positions


def combine_sampled_and_draft_tokens(
    input_ids_ptr: Int32,
    idx_mapping_ptr: Int64,
    last_sampled_tokens_ptr: Int64,
    query_start_loc_ptr: Int32,
    seq_lens_ptr: Int32,
    prefill_len_ptr: Int32,
    logits_indices_ptr: Int64,
) -> None:
    """Write which tokens have logits, and the input tokens of requests that decode. SiPipe's samplers
    verify drafts, so the runner has none, and each request has one token with logits: its last.

    Args:
        input_ids_ptr: out, [at least T].
        last_sampled_tokens_ptr: [R, 1].
        seq_lens_ptr: [at least B], lengths with this iteration's tokens.
        prefill_len_ptr: [R], lengths of prompts.
        logits_indices_ptr: out, [B].
    """
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
        prefill_positions_ptr: [R x D, max_model_len], positions of the tokens of prompts.
        prefill_delta_ptr: [R], added to the position of a token behind the prompt.
        prefill_lens_ptr: [R], lengths of prompts.
        num_computed_tokens_ptr: [R].
    """
    rows, positions = places(idx_mapping_ptr, query_start_loc_ptr, num_computed_tokens_ptr)
    positions_ptr[:NUM_DIMS, : len(positions)] = positions + prefill_delta_ptr[rows]
    prompt = (num_computed_tokens_ptr[rows] < prefill_lens_ptr[rows]).nonzero()[0]
    if not len(prompt):
        return
    for dimension in range(NUM_DIMS):
        row = rows[prompt] * NUM_DIMS + dimension
        positions_ptr[dimension, prompt] = prefill_positions_ptr[row, positions[prompt]]


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: Int64,
    query_start_loc_ptr: Int32,
    idx_mapping_ptr: Int64,
    num_computed_tokens_ptr: Int32,
    all_token_ids_ptr: Int32,
) -> None:
    """Write for each token of the batch the next token of its request, from ``all_token_ids_ptr``
    [R, max_model_len], into ``prompt_logprobs_token_ids_ptr`` [at least T]."""
    rows, positions = places(idx_mapping_ptr, query_start_loc_ptr, num_computed_tokens_ptr)
    # The last token of a full context has no next one, and nobody reads its value.
    following = np.minimum(positions + 1, all_token_ids_ptr.shape[1] - 1)
    prompt_logprobs_token_ids_ptr[: len(positions)] = all_token_ids_ptr[rows, following]


def apply_write(
    output_ptr: Any,
    output_stride: Any,
    write_indices_ptr: Int32,
    write_starts_ptr: Int32,
    write_contents_ptr: Any,
    write_cu_lens_ptr: Int32,
    write_group_ids_ptr: Any,
) -> None:
    """Write pieces into rows of one array, or of the array of each piece's group.

    Args:
        output_ptr: [R, W] or [R]; with groups [G], addresses of arrays [R, W_g].
        output_stride: elements of a row; with groups [G].
        write_indices_ptr: each piece's row.
        write_starts_ptr: each piece's first column.
        write_contents_ptr: the pieces, one behind another.
        write_cu_lens_ptr: the end of each piece in ``write_contents_ptr``.
        write_group_ids_ptr: each piece's group; None without groups.
    """
    begin = 0
    pieces = zip(write_indices_ptr, write_starts_ptr, write_cu_lens_ptr, strict=True)
    for piece, (row, start, end) in enumerate(pieces):
        if write_group_ids_ptr is None:
            target = output_ptr.reshape(-1, output_stride)[row]
        else:
            group = write_group_ids_ptr[piece]
            width = output_stride[group]
            row_bytes = 4 * int(width)
            target = at(output_ptr[group] + np.uint64(int(row) * row_bytes), 1, width)[0]
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
    """Write drawn tokens into the request states. A row of -1 is left out.

    Args:
        num_computed_tokens_ptr: in and out, [R].
        last_sampled_tokens_ptr: out, [R, 1].
        output_bin_counts_ptr: in and out, [R, V], how often each token was drawn; or None.
        sampled_tokens_ptr: [B, 1], as the runner has no drafts.
        num_sampled_ptr: [B], 1 for a request with a drawn token, else 0.
        num_rejected_ptr: [B], tokens of this iteration that do not count as computed.
        query_start_loc_ptr: [B + 1]; None if computed tokens were counted before.
        all_token_ids_ptr: in and out, [R, max_model_len].
        total_len_ptr: in and out, [R], tokens in ``all_token_ids_ptr``.
    """
    exist = idx_mapping_ptr >= 0
    drawn = (exist & (num_sampled_ptr > 0)).nonzero()[0]
    rows = idx_mapping_ptr[drawn]
    tokens = sampled_tokens_ptr[drawn, 0]
    last_sampled_tokens_ptr[rows, 0] = tokens
    total = total_len_ptr[rows]
    all_token_ids_ptr[rows, total] = tokens
    total_len_ptr[rows] = total + 1
    if output_bin_counts_ptr is not None:
        output_bin_counts_ptr[rows, tokens] += 1
    computed = -num_rejected_ptr
    if query_start_loc_ptr is not None:
        computed += lengths(idx_mapping_ptr, query_start_loc_ptr)
    num_computed_tokens_ptr[idx_mapping_ptr[exist]] += computed[exist]


def post_update_num_computed_tokens(
    idx_mapping_ptr: Int64, num_computed_tokens_ptr: Int32, query_start_loc_ptr: Int32
) -> None:
    """Count the tokens of this iteration as computed, in ``num_computed_tokens_ptr`` [R]."""
    num_computed_tokens_ptr[idx_mapping_ptr] += lengths(idx_mapping_ptr, query_start_loc_ptr)


def zero_kv_blocks(
    seg_addrs_ptr: UInt64,
    seg_block_strides_ptr: Int64,
    seg_page_sizes_ptr: Int64,
    block_ids_ptr: Int64,
) -> None:
    """Zero blocks of KV cache in every segment.

    Args:
        seg_addrs_ptr: addresses of block 0 of each segment.
        seg_block_strides_ptr: int32 between blocks of each segment.
        seg_page_sizes_ptr: int32 of a block of each segment.
        block_ids_ptr: the blocks.
    """
    segments = [
        array.tolist() for array in (seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr)
    ]
    for address, stride, size in zip(*segments, strict=True):
        for block in block_ids_ptr.tolist():
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)
