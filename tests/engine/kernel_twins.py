"""vLLM's second runner without Triton: its kernels written again with NumPy, for the CPU build.

Given to an engine as ``worker_extension_cls``, which vLLM imports in each worker before it makes
the worker. The twins are set in place of the kernels in vLLM's modules; all else of the runner is
vLLM's. A twin takes what its kernel takes and does what it does, program after program.
"""

import ctypes
from functools import partial

import numpy as np
import torch
from vllm.v1.worker import gpu_worker, utils
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch
from vllm.v1.worker.gpu.mm import rope
from vllm.v1.worker.gpu.model_states import mamba_hybrid
from vllm.v1.worker.gpu.sample import gumbel, logprob, penalties, prompt_logprob, states


class Twins:
    """Mixed into the worker's class, to which it adds nothing."""


class Twin:
    def __init__(self, function):
        self._function = function

    def __getitem__(self, grid):
        return partial(self._function, grid)


def twin_of(module, kernel):
    def replace(function):
        assert hasattr(module, kernel), f"vLLM has no {module.__name__}.{kernel}"
        setattr(module, kernel, Twin(function))
        return function

    return replace


def at(address, start, count):
    """``count`` int32 from element ``start`` of the array at ``address``."""
    place = int(address) + 4 * int(start)
    return np.ctypeslib.as_array((ctypes.c_int32 * max(int(count), 0)).from_address(place))


gpu_worker.HAS_TRITON = True  # vLLM 0.33 looks when it makes a worker
for _module in (input_batch, logprob):
    _module.triton.next_power_of_2 = lambda n: 1 << (int(n) - 1).bit_length()
gumbel.triton.cdiv = lambda n, by: -(-n // by)


@twin_of(buffer_utils, "_apply_write_kernel")
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


@twin_of(block_table, "_gather_block_tables_kernel")
def gather_block_tables(
    grid,
    index,
    sources,
    targets,
    strides,
    num_blocks,
    stride,
    num_reqs,
    computed=None,  # this and the next two, of vLLM 0.33: blocks that a sliding window has left
    reaches=None,
    sizes=None,
    *,
    MASK_SLIDING_WINDOW=False,
    BLOCK_SIZE,
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
            if MASK_SLIDING_WINDOW and (reach := int(reaches[group])) > 0:
                target[: max(int(computed[index[batch]]) - reach, 0) // int(sizes[group])] = 0


@twin_of(block_table, "_compute_slot_mappings_kernel")
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


@twin_of(input_batch, "_prepare_prefill_inputs_kernel")
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


@twin_of(input_batch, "_prepare_pos_seq_lens_kernel")
def prepare_pos_seq_lens(
    grid, positions, seq_lens, index, query_start, num_computed, max_num_reqs, *, BLOCK_SIZE
):
    positions, seq_lens, index, query_start, num_computed = (
        t.numpy() for t in (positions, seq_lens, index, query_start, num_computed)
    )
    seq_lens[grid[0] - 1 : max_num_reqs] = 0
    for batch in range(grid[0] - 1):
        begin, end, computed = (
            query_start[batch],
            query_start[batch + 1],
            num_computed[index[batch]],
        )
        seq_lens[batch] = computed + end - begin
        positions[begin:end] = np.arange(computed, computed + end - begin)


@twin_of(input_batch, "_combine_sampled_and_draft_tokens_kernel")
def combine_sampled_and_draft_tokens(
    grid,
    input_ids,
    index,
    last_sampled,
    query_start,
    seq_lens,
    prefill_lens,
    draft_tokens,
    draft_tokens_stride,
    first_logits,
    logits_indices,
    *,
    NUM_NEW_SAMPLED_TOKENS,
    BLOCK_SIZE,
):
    assert NUM_NEW_SAMPLED_TOKENS == 1
    for batch in range(grid[0]):
        row, last = int(index[batch]), int(query_start[batch + 1]) - 1
        assert int(first_logits[batch + 1] - first_logits[batch]) == 1, "no drafts"
        logits_indices[int(first_logits[batch])] = last
        if int(seq_lens[batch]) > int(prefill_lens[row]):
            input_ids[last] = int(last_sampled.view(-1)[row])


@twin_of(input_batch, "_post_update_kernel")
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
    drafts=None,  # this and the next two, of vLLM 0.33
    drafts_out=None,
    num_drafts=0,
    *,
    num_warps,
):
    assert drafts is None
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


@twin_of(input_batch, "_post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(grid, index, num_computed, query_start):
    for batch in range(grid[0]):
        num_computed[int(index[batch])] += query_start[batch + 1] - query_start[batch]


@twin_of(rope, "_prepare_rope_positions_kernel")
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


@twin_of(mamba_hybrid, "_fill_num_accepted_kernel")
def fill_num_accepted(grid, index, accepted, value):
    accepted[index[: grid[0]]] = value


@twin_of(mamba_hybrid, "_scatter_num_accepted_kernel")
def scatter_num_accepted(grid, index, sampled, accepted):
    there = index[: grid[0]] >= 0
    accepted[index[: grid[0]][there]] = sampled[: grid[0]][there].clamp(min=1)


@twin_of(utils, "_zero_kv_blocks_kernel")
def zero_kv_blocks(grid, addresses, strides, sizes, blocks, *, BLOCK_SIZE):
    for block in blocks.tolist():
        for address, stride, size in zip(addresses, strides, sizes, strict=True):
            at(address, block * int(stride), size)[:] = 0


@twin_of(prompt_logprob, "_prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(
    grid, targets, query_start, index, num_computed, all_tokens, all_tokens_stride, *, BLOCK_SIZE
):
    for batch in range(grid[0]):
        row, begin, end = int(index[batch]), int(query_start[batch]), int(query_start[batch + 1])
        first = int(num_computed[row]) + 1
        known = all_tokens[row, first : first + end - begin]
        targets[begin : begin + len(known)] = known


@twin_of(logprob, "_topk_log_softmax_kernel")
def topk_log_softmax(
    grid, out, logits, stride, ids, ids_stride, topk, vocab, *, BLOCK_SIZE, TOPK_BLOCK_SIZE
):
    scores = logits[:, :vocab].float().log_softmax(-1)
    out.copy_(scores.gather(-1, ids[:, :topk]))


@twin_of(logprob, "_ranks_kernel")
def ranks(grid, out, logits, stride, token_ids, vocab, *, BLOCK_SIZE):
    chosen = logits.gather(-1, token_ids.view(-1, 1))
    out.copy_((logits[:, :vocab] >= chosen).sum(-1))


@twin_of(input_batch, "_get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected(grid, sampled, rejected, seq_lens, first_logits, index, prefill):
    for batch in range(grid[0]):
        chunk = int(seq_lens[batch]) < int(prefill[int(index[batch])])
        sampled[batch] = 0 if chunk else sampled[batch]
        logits = first_logits[batch + 1] - first_logits[batch]
        rejected[batch] = 0 if chunk else logits - sampled[batch]


def murmur3(seed, position, tokens):
    """uint32 for each of ``tokens``, of (seed, position, token): MurmurHash3 of four words."""

    def rotated(value, by):
        return (value << np.uint32(by)) | (value >> np.uint32(32 - by))

    found = np.zeros(len(tokens), np.uint32)
    for word in (seed, seed >> 32, position, tokens):
        word = np.atleast_1d(word & 0xFFFFFFFF).astype(np.uint32) * np.uint32(0xCC9E2D51)
        found = rotated(found ^ (rotated(word, 15) * np.uint32(0x1B873593)), 13)
        found = found * np.uint32(5) + np.uint32(0xE6546B64)
    found ^= np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        found = (found ^ (found >> np.uint32(shift))) * np.uint32(factor)
    return found


@twin_of(gumbel, "_gumbel_sample_kernel")
def gumbel_sample(
    grid,
    tokens,
    tokens_stride,
    values,
    values_stride,
    _cache,
    _cache_stride,
    _cache_column_stride,
    _cache_column,
    _cache_source,
    _cache_source_stride,
    logits,
    logits_stride,
    index,
    seeds,
    positions,
    temperatures,
    vocab,
    *,
    BLOCK_SIZE,
    IS_DRAFTING,
    APPLY_TEMPERATURE,
    USE_FP64,
    PER_TOKEN_COL,
):
    assert (IS_DRAFTING, USE_FP64, PER_TOKEN_COL) == (False, False, False)
    for row in range(grid[0]):
        request = int(index[row])
        scores, temperature = logits[row, :vocab].float().numpy(), float(temperatures[request])
        if temperature and APPLY_TEMPERATURE:
            scores = scores / np.float32(temperature)
        if temperature:
            drawn = murmur3(int(seeds[request]), int(positions[row]), np.arange(vocab))
            uniform = ((drawn.astype(np.float64) + 0.5) * 2.0**-32).astype(np.float32)
            scores = scores - np.log(-np.log1p(-np.minimum(uniform, 1 - 2.0**-24)))
        for block in range(grid[1]):
            here = scores[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            tokens[row, block] = block * BLOCK_SIZE + int(here.argmax())
            values[row, block] = float(here.max())


def apply_temperature(logits, index, temperature):
    asked = temperature[index].unsqueeze(1)
    logits.div_(torch.where(asked == 0, 1.0, asked))


def apply_min_p(logits, index, min_p):
    least = logits.max(-1, keepdim=True).values + min_p[index].unsqueeze(1).log()
    logits.masked_fill_(logits < least, -torch.inf)


def count_tokens(index, all_tokens, prompt_len, prefill_len, in_prompt, in_output, longest):
    """Which tokens a prompt has, as bits, and how often an output has each."""
    for row in index.tolist():
        prompt = all_tokens[row, : prompt_len[row]].numpy()
        bits = np.zeros(in_prompt.shape[1] * 32, bool)
        bits[prompt] = True
        in_prompt[row] = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
        output = all_tokens[row, prompt_len[row] : prefill_len[row]]
        in_output[row] = torch.bincount(output, minlength=in_output.shape[1])


def apply_penalties(logits, index, _ids, _at, repetition, frequency, presence, prompt, output):
    counts = output[index]
    words = np.ascontiguousarray(prompt[index].numpy()).view(np.uint8)
    bits = np.unpackbits(words, axis=1, bitorder="little")[:, : logits.shape[1]]
    seen = torch.from_numpy(bits).bool() | (counts > 0)
    scale = torch.where(seen, repetition[index].unsqueeze(1), 1.0)
    logits.copy_(torch.where(logits > 0, logits / scale, logits * scale))
    logits -= frequency[index].unsqueeze(1) * counts
    logits -= presence[index].unsqueeze(1) * (counts > 0)


states.apply_temperature, states.apply_min_p = apply_temperature, apply_min_p
penalties.bincount, penalties.apply_penalties = count_tokens, apply_penalties
