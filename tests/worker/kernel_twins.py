"""The kernels of vLLM's second runner, slow and obvious: program after program, with NumPy.

A twin takes what vLLM launches its kernel with, behind the grid.
"""

import ctypes

import numpy as np
import torch

TWINS = {}
"""By the kernel's name below ``vllm.v1.worker``."""


def twin_of(module, kernel):
    def keep(function):
        TWINS[f"{module}.{kernel}"] = function
        return function

    return keep


def at(address, start, count):
    """``count`` int32 from element ``start`` of the array at ``address``."""
    place = int(address) + 4 * int(start)
    return np.ctypeslib.as_array((ctypes.c_int32 * max(int(count), 0)).from_address(place))


@twin_of("gpu.buffer_utils", "_apply_write_kernel")
def apply_write(
    grid, output, stride, rows, starts, contents, ends, groups, *, MULTI_GROUP, BLOCK_SIZE
):
    rows, starts, ends, contents = (t.numpy() for t in (rows, starts, ends, contents))
    for write in range(grid[0]):
        begin, end = ends[write - 1] if write else 0, ends[write]
        row, start, new = rows[write], starts[write], contents[begin:end]
        if MULTI_GROUP:
            group = int(groups[write])
            at(output[group], row * int(stride[group]) + start, end - begin)[:] = new
        else:
            where = int(row) * stride + start
            output.view(-1).numpy()[where : where + end - begin] = new


@twin_of("gpu.block_table", "_gather_block_tables_kernel")
def gather_block_tables(
    grid,
    index,
    sources,
    targets,
    strides,
    num_blocks,
    stride,
    num_reqs,
    computed=None,
    reach=None,
    block_sizes=None,
    *,
    BLOCK_SIZE,
    MASK_SLIDING_WINDOW=False,
):
    index, num_blocks = index.numpy(), num_blocks.view(-1).numpy()
    for group in range(grid[0]):
        width = int(strides[group])
        for batch in range(grid[1]):
            target = at(targets[group], batch * width, width)
            if batch >= num_reqs:
                target[:] = 0
                continue
            count = num_blocks[group * stride + index[batch]]
            target[:count] = at(sources[group], index[batch] * width, count)
            if MASK_SLIDING_WINDOW and reach[group]:
                oldest = max(int(computed[int(index[batch])] - reach[group]), 0)
                target[: min(oldest // int(block_sizes[group]), count)] = 0


@twin_of("gpu.block_table", "_compute_slot_mappings_kernel")
def compute_slot_mappings(
    grid,
    max_num_tokens,
    index,
    query_start,
    positions,
    tables,
    strides,
    block_sizes,
    enabled,
    dcp_sharded,
    slots,
    stride,
    cp_rank,
    *,
    CP_SIZE,
    CP_INTERLEAVE,
    PAD_ID,
    TRITON_BLOCK_SIZE,
):
    assert CP_SIZE == 1
    index, query_start, positions = (t.numpy() for t in (index, query_start, positions))
    for group in range(grid[0]):
        out, size, width = slots[group].numpy(), int(block_sizes[group]), int(strides[group])
        for batch in range(grid[1] - 1):
            row, here = index[batch], slice(query_start[batch], query_start[batch + 1])
            if row < 0 or not enabled[group]:
                out[here] = PAD_ID
                continue
            blocks = at(tables[group], row * width, width)[positions[here] // size]
            out[here] = blocks.astype(np.int64) * size + positions[here] % size
        out[query_start[grid[1] - 1] : max_num_tokens] = PAD_ID


@twin_of("gpu.input_batch", "_prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(
    grid,
    input_ids,
    following,
    following_stride,
    num_lookahead,
    index,
    query_start,
    all_tokens,
    all_tokens_stride,
    prefill_lens,
    num_computed,
    *,
    BLOCK_SIZE,
    LOOKAHEAD_BLOCK,
):
    input_ids, index, query_start = (t.numpy() for t in (input_ids, index, query_start))
    for batch in range(grid[0]):
        row, begin, end = index[batch], query_start[batch], query_start[batch + 1]
        prefill, computed = int(prefill_lens[row]), int(num_computed[row])
        if computed >= prefill:
            continue
        known = all_tokens[row].numpy()
        input_ids[begin:end] = known[computed : computed + end - begin]
        for ahead in range(num_lookahead):
            place = computed + end - begin + ahead
            following[ahead, row] = int(known[place]) if place < prefill else 0


@twin_of("gpu.input_batch", "_post_update_kernel")
def post_update(
    grid,
    index,
    num_computed,
    last_sampled,
    counts,
    counts_stride,
    sampled,
    sampled_stride,
    num_sampled,
    num_rejected,
    query_start,
    all_tokens,
    all_tokens_stride,
    total_len,
    *_,  # of drafts, with vLLM 0.33
    num_warps,
):
    for batch in range(grid[0]):
        row, drawn = int(index[batch]), int(num_sampled[batch])
        if row < 0:
            continue
        if drawn > 0:
            tokens, total = sampled[batch, :drawn], int(total_len[row])
            last_sampled.view(-1)[row] = tokens[-1]
            all_tokens[row, total : total + drawn] = tokens.to(all_tokens.dtype)
            total_len[row] = total + drawn
            if counts is not None:
                for token in tokens.tolist():
                    counts[row, token] += 1
        ran = 0 if query_start is None else query_start[batch + 1] - query_start[batch]
        num_computed[row] += ran - num_rejected[batch]


@twin_of("gpu.input_batch", "_post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(grid, index, num_computed, query_start):
    for batch in range(grid[0]):
        num_computed[int(index[batch])] += query_start[batch + 1] - query_start[batch]


@twin_of("gpu.mm.rope", "_prepare_rope_positions_kernel")
def prepare_rope_positions(
    grid,
    positions,
    stride,
    known,
    known_stride,
    dimension_stride,
    deltas,
    index,
    query_start,
    prefill_lens,
    num_computed,
    *,
    BLOCK_SIZE,
    NUM_DIMS,
):
    for batch in range(grid[0]):
        row, here = int(index[batch]), slice(int(query_start[batch]), int(query_start[batch + 1]))
        first = int(num_computed[row])
        last = first + here.stop - here.start
        if first < int(prefill_lens[row]):
            found = known[NUM_DIMS * row : NUM_DIMS * (row + 1), first:last]
        else:
            found = torch.arange(first, last) + int(deltas[row])
        positions[:NUM_DIMS, here] = found


@twin_of("gpu.model_states.mamba_hybrid", "_fill_num_accepted_kernel")
def fill_num_accepted(grid, index, accepted, value):
    accepted[index[: grid[0]]] = value


@twin_of("gpu.model_states.mamba_hybrid", "_scatter_num_accepted_kernel")
def scatter_num_accepted(grid, index, sampled, accepted):
    there = index[: grid[0]] >= 0
    accepted[index[: grid[0]][there]] = sampled[: grid[0]][there].clamp(min=1)


@twin_of("utils", "_zero_kv_blocks_kernel")
def zero_kv_blocks(grid, addresses, strides, sizes, blocks, *, BLOCK_SIZE):
    for block in blocks.tolist():
        for address, stride, size in zip(addresses, strides, sizes, strict=True):
            at(address, block * int(stride), size)[:] = 0


@twin_of("gpu.sample.prompt_logprob", "_prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(
    grid, targets, query_start, index, num_computed, all_tokens, all_tokens_stride, *, BLOCK_SIZE
):
    for batch in range(grid[0]):
        row, begin, end = int(index[batch]), int(query_start[batch]), int(query_start[batch + 1])
        first = int(num_computed[row]) + 1
        known = all_tokens[row, first : first + end - begin]
        targets[begin : begin + len(known)] = known


@twin_of("gpu.sample.logprob", "_topk_log_softmax_kernel")
def topk_log_softmax(
    grid, out, logits, stride, ids, ids_stride, topk, vocab, *, BLOCK_SIZE, TOPK_BLOCK_SIZE
):
    scores = logits[:, :vocab].float().log_softmax(-1)
    out.copy_(scores.gather(-1, ids[:, :topk]))


@twin_of("gpu.sample.logprob", "_ranks_kernel")
def ranks(grid, out, logits, stride, token_ids, vocab, *, BLOCK_SIZE):
    chosen = logits.gather(-1, token_ids.view(-1, 1))
    out.copy_((logits[:, :vocab] >= chosen).sum(-1))


@twin_of("gpu.model_states.mamba_hybrid", "preprocess_mamba_align_fused_kernel")
def preprocess_mamba_align(
    grid,
    index,
    column,
    computed,
    query_start,
    accepted,
    before,
    bias,
    num_reqs,
    *,
    BLOCK_SIZE,
    MAMBA_BLOCK_SIZE,
):
    for batch, row in enumerate(index.tolist()[:num_reqs]):
        before[row], bias[row] = column[row], max(int(accepted[row]) - 1, 0)
        tokens = int(computed[row] + query_start[batch + 1] - query_start[batch])
        column[row] = -(-tokens // MAMBA_BLOCK_SIZE) - 1
        if 0 <= before[row] != column[row]:
            accepted[row] = 1


@twin_of("mamba_utils", "precopy_mamba_align_fused_kernel")
def precopy_mamba_align(
    grid,
    column,
    before,
    bias,
    tables,
    stride,
    bases,
    strides,
    elements,
    inner,
    widths,
    groups,
    dimensions,
    dimension_strides,
    index,
    num_reqs,
    **_,
):
    for row in index.tolist()[:num_reqs]:
        if row < 0 or before[row] < 0 or before[row] == column[row]:
            continue
        assert bias[row] == 0, "no drafts"
        for state in range(grid[1]):
            here = at(tables[groups[state]], row * stride, stride)
            source, target = (
                int(bases[state] + here[int(at_[row])] * strides[state]) for at_ in (before, column)
            )
            if dimensions[state]:
                for each in range(int(dimensions[state])):
                    start = each * int(dimension_strides[state])
                    size = int(widths[state] * elements[state])
                    ctypes.memmove(target + start, source + start, size)
            else:
                size = int(inner[state] * elements[state] * max(int(widths[state]), 1))
                ctypes.memmove(target, source, size)


@twin_of("mamba_utils", "postprocess_mamba_fused_kernel")
def postprocess_mamba(
    grid, accepted, column, scheduled, computed, *_, block_size, PRECOMPUTED_NEW_COMPUTED, **__
):
    """What moves a state, but for the move: nothing may come to it."""
    assert PRECOMPUTED_NEW_COMPUTED
    assert (accepted == 1).all(), "no drafts"
