"""Compiled loops of input preparation: from the facts of a batch to the tensors a model reads.

Every kernel runs without the GIL, so that the thread that prepares a microbatch does not hold up the
one that drives the device. It touches only the arrays that it gets. ``lay_out`` has a slow, obvious
twin in ``tests/worker/test_kernels.py``.

Shapes: B requests in the batch, T tokens in the batch, R rows of :class:`RequestStates`, W
columns of a block table.
"""

import numpy as np
from numpy.typing import NDArray

from sipipe.jit import compiling, entry

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


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
        num_drafts: [B], drafts among them, which are the last ones.
        query_start_loc, seq_lens, positions: out, at least [B + 1], [B] and [T], as vLLM has them.
        logits_indices: out, at least [B + drafts]; the last token of row b before its drafts, and
            each of those.
        first_logits: out, at least [B + 1]; index in ``logits_indices`` at which row b begins.

    Returns the number of all tokens, and the largest number of one request.
    """
    start = 0
    longest = 0
    logits = 0
    query_start_loc[0] = 0
    first_logits[0] = 0
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
        block_size: tokens of a block.
        window: tokens before this iteration's first one that attention looks back at; 0: all. Blocks
            before those may be another request's by now, and are written as block 0.
        mapped: true if tokens have slots in this group. A recurrent state's have none, which is -1.
        block_table: out, at least [B, W].
        slot_mapping: out, at least [T]; block id x block size + offset.

    Returns -1, or the first row of the batch whose tokens do not fit its blocks. No later row is
    written then.
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


def warm_up() -> None:
    """Compile every kernel, or load it from the cache, at the start and not in the first request."""
    row = np.zeros(1, np.int64)
    int32 = np.ones(1, np.int32)
    starts = np.zeros(2, np.int32)
    table = np.zeros((1, 2), np.int32)
    out = np.zeros(1, np.int32)
    with compiling("sipipe.worker.inputs"):
        lay_out(int32, int32, out, starts, row.copy(), out.copy(), row.copy(), starts.copy())
        gather_blocks(row, int32, int32, table, int32, 2, 0, True, table.copy(), row.copy())
