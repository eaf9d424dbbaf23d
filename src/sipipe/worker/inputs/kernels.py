"""Compiled loops of input preparation: from the facts of a batch to the tensors a model reads.

Every kernel runs without the GIL, so that the thread that prepares a microbatch does not hold up
the one that drives the device, and touches only the arrays it is given. Each has a slow, obvious
twin in ``tests/worker/test_kernels.py``.

Shapes: B requests in the batch, T tokens in the batch, R rows of :class:`RequestStates`, W
columns of a block table.
"""

import numpy as np
from numpy.typing import NDArray

from sipipe.jit import compiling, entry

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]


@entry
def lay_out(
    num_computed_tokens: Int32,
    num_scheduled_tokens: Int32,
    num_drafts: Int32,
    query_start_loc: Int32,
    positions: Int64,
    seq_lens: Int32,
    logits_indices: Int64,
    first_logits: Int32,
) -> tuple[int, int]:
    """Write query starts, token positions, sequence lengths and rows of logits of a batch.

    Args:
        num_computed_tokens: [B], tokens of each request whose KV cache entries exist already.
        num_scheduled_tokens: [B], tokens of each request in this iteration, 1 or more.
        num_drafts: [B], how many of them are drafts, the last ones.
        query_start_loc, seq_lens, positions: out, at least [B + 1], [B] and [T], as vLLM has them.
        logits_indices: out, at least [B + drafts]; the last token of row b before its drafts, and
            each of those.
        first_logits: out, at least [B + 1]; where in that the tokens of row b begin.

    Returns how many tokens there are, and the largest number of one request.
    """
    start = longest = logits = 0
    query_start_loc[0] = first_logits[0] = 0
    for row in range(num_computed_tokens.shape[0]):
        first = num_computed_tokens[row]
        count = num_scheduled_tokens[row]
        for j in range(count):
            positions[start + j] = first + j
        start += count
        query_start_loc[row + 1] = start
        seq_lens[row] = first + count
        for token in range(start - 1 - num_drafts[row], start):
            logits_indices[logits] = token
            logits += 1
        first_logits[row + 1] = logits
        longest = max(longest, count)
    return start, longest


@entry
def gather_blocks(
    rows: Int64,
    num_computed_tokens: Int32,
    num_scheduled_tokens: Int32,
    blocks: Int32,
    block_counts: Int32,
    block_size: int,
    window: int,
    mapped: bool,
    block_table: Int32,
    slot_mapping: Int64,
) -> int:
    """Write the block table of a batch and the KV cache slot of each of its tokens.

    Columns of ``block_table`` past a request's blocks keep what they held: attention reads only as
    many as the sequence length says.

    Args:
        rows: [B], each request's row of the request states.
        num_computed_tokens, num_scheduled_tokens: [B], before and in this iteration.
        blocks: [R, W], block ids of every known request; ``block_counts`` [R] of them are valid.
        block_size: tokens a block holds.
        window: 0, or how many tokens before this iteration's first one attention looks back at:
            blocks before those may be another request's by now, and are given as block 0.
        mapped: whether tokens have slots in this group (a recurrent state's have none: -1).
        block_table: out, at least [B, W].
        slot_mapping: out, at least [T]; block id x block size + offset.

    Returns -1, or the first batch row whose tokens do not fit its blocks (it is the last written).
    """
    token = 0
    for row in range(rows.shape[0]):
        source = rows[row]
        count = block_counts[source]
        first = num_computed_tokens[row]
        last = first + num_scheduled_tokens[row]
        unseen = min(max(first - window, 0) // block_size, count) if window else 0
        for j in range(unseen):
            block_table[row, j] = 0
        for j in range(unseen, count):
            block_table[row, j] = blocks[source, j]
        if not mapped:
            for _ in range(first, last):
                slot_mapping[token] = -1
                token += 1
            continue
        if last > count * block_size:
            return row
        for position in range(first, last):
            block = np.int64(blocks[source, position // block_size])
            slot_mapping[token] = block * block_size + position % block_size
            token += 1
    return -1


@entry
def find_prefills(
    rows: Int64,
    num_computed_tokens: Int32,
    num_scheduled_tokens: Int32,
    known: Int32,
    prefill_lens: Int32,
    num_computed_prefill_tokens: Int32,
    is_prefilling: Bools,
    runs_as_decode: Bools,
    decoding: Bools,
) -> tuple[int, int, bool]:
    """Write which requests of a batch are in their prefill, and which end it or are past it.

    Args:
        rows: [B], each request's row of the request states.
        num_computed_tokens, num_scheduled_tokens: [B], before and in this iteration.
        known: [R], tokens of every known request when it was added.
        prefill_lens, num_computed_prefill_tokens: out, at least [B]; those, and computed ones.
        is_prefilling: out, at least [B]; whether the request is in its prefill.
        runs_as_decode: out, at least [B]; whether it is, with one token behind others.
        decoding: out, [R]; whether the request samples in this iteration; written at ``rows`` only.

    Returns how many requests sample, how many are in their prefill, and whether all of those run as
    decodes.
    """
    samples = prefilling = 0
    as_decodes = True
    for row in range(rows.shape[0]):
        source = rows[row]
        length = known[source]
        first = num_computed_tokens[row]
        within = first < length
        as_decode = within and first > 0 and num_scheduled_tokens[row] == 1
        prefill_lens[row] = length
        num_computed_prefill_tokens[row] = min(first, length)
        is_prefilling[row] = within
        runs_as_decode[row] = as_decode
        decoding[source] = first + num_scheduled_tokens[row] >= length
        samples += decoding[source]
        prefilling += within
        as_decodes = as_decodes and (as_decode or not within)
    return samples, prefilling, as_decodes


@entry
def append_blocks(
    rows: Int64, lengths: Int32, ids: Int32, blocks: Int32, block_counts: Int32
) -> int:
    """Write block ids behind those that requests have.

    Args:
        rows, lengths: [n], rows of the request states, which may repeat, and how many ids each gets.
        ids: their ids, one request after another.
        blocks, block_counts: in and out, [R, W], and [R], how many of a row are valid.

    Returns -1, or the first change that does not fit its row (it and later ones are not written).
    """
    start = 0
    for change in range(rows.shape[0]):
        row = rows[change]
        count = block_counts[row]
        length = lengths[change]
        if count + length > blocks.shape[1]:
            return change
        for j in range(length):
            blocks[row, count + j] = ids[start + j]
        block_counts[row] = count + length
        start += length
    return -1


def warm_up() -> None:
    """Compile every kernel (or load it from the cache): at start-up, not in the first request."""
    row, int32, flag = np.zeros(1, np.int64), np.ones(1, np.int32), np.zeros(1, np.bool_)
    starts, table = np.zeros(2, np.int32), np.zeros((1, 2), np.int32)
    out = np.zeros(1, np.int32)
    with compiling("sipipe.worker.inputs"):
        lay_out(int32, int32, out, starts, row.copy(), out.copy(), row.copy(), starts.copy())
        find_prefills(row, int32, int32, int32, out, out.copy(), flag, flag.copy(), flag.copy())
        append_blocks(row, int32, int32, table, out.copy())
        gather_blocks(row, int32, int32, table, int32, 2, 0, True, table.copy(), row.copy())
