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
def spans(
    num_computed_tokens: Int32,
    num_scheduled_tokens: Int32,
    query_start_loc: Int32,
    positions: Int64,
    seq_lens: Int32,
) -> tuple[int, int]:
    """Write query starts, token positions and sequence lengths of a batch.

    Args:
        num_computed_tokens: [B], tokens of each request whose KV cache entries exist already.
        num_scheduled_tokens: [B], tokens of each request in this iteration, 1 or more.
        query_start_loc: out, at least [B + 1]; ``query_start_loc[b]`` is the first token of row b.
        positions: out, at least [T].
        seq_lens: out, at least [B]; computed + scheduled.

    Returns:
        The largest number of scheduled tokens, and the largest sequence length.
    """
    start = 0
    max_query_len = 0
    max_seq_len = 0
    query_start_loc[0] = 0
    for row in range(num_computed_tokens.shape[0]):
        first = num_computed_tokens[row]
        count = num_scheduled_tokens[row]
        for j in range(count):
            positions[start + j] = first + j
        start += count
        query_start_loc[row + 1] = start
        seq_lens[row] = first + count
        max_query_len = max(max_query_len, count)
        max_seq_len = max(max_seq_len, first + count)
    return max_query_len, max_seq_len


@entry
def gather_blocks(
    rows: Int64,
    num_computed_tokens: Int32,
    num_scheduled_tokens: Int32,
    blocks: Int32,
    block_counts: Int32,
    block_size: int,
    block_table: Int32,
    slot_mapping: Int64,
) -> int:
    """Write the block table of a batch and the KV cache slot of each of its tokens.

    Columns of ``block_table`` past a request's blocks keep what they held: attention reads only as
    many as the sequence length says.

    Args:
        rows: [B], each request's row of the request states.
        num_computed_tokens: [B], before this iteration.
        num_scheduled_tokens: [B], in this iteration.
        blocks: [R, W], block ids of every known request.
        block_counts: [R], how many of them are valid.
        block_size: tokens a block holds.
        block_table: out, at least [B, W].
        slot_mapping: out, at least [T]; block id x block size + offset.

    Returns:
        -1, or the first batch row whose tokens do not fit its blocks (nothing past it is written).
    """
    token = 0
    for row in range(rows.shape[0]):
        source = rows[row]
        count = block_counts[source]
        for j in range(count):
            block_table[row, j] = blocks[source, j]
        first = num_computed_tokens[row]
        last = first + num_scheduled_tokens[row]
        if last > count * block_size:
            return row
        for position in range(first, last):
            block = np.int64(blocks[source, position // block_size])
            slot_mapping[token] = block * block_size + position % block_size
            token += 1
    return -1


@entry
def find_sampled(
    rows: Int64,
    num_computed_tokens: Int32,
    num_output_tokens: Int32,
    prompt_lens: Int32,
    query_start_loc: Int32,
    seq_lens: Int32,
    is_prefilling: Bools,
    decoding: Bools,
    sampled: Int64,
    logits_indices: Int64,
) -> int:
    """Find the rows of a batch that produce a token: those whose known tokens end here.

    Args:
        rows: [B], each request's row of the request states.
        num_computed_tokens: [B], before this iteration.
        num_output_tokens: [B], tokens that were sampled for each request so far.
        prompt_lens: [R], prompt tokens of every known request.
        query_start_loc: [B + 1] and
        seq_lens: [B], as :func:`spans` wrote them.
        is_prefilling: out, at least [B]; whether the request is in its prompt.
        decoding: in and out, [R]; whether the request's last iteration ended with a sampled
            token; written at ``rows`` only.
        sampled: out, at least [B]; batch rows that sample, ascending.
        logits_indices: out, at least [B]; the last token of each of them.

    Returns:
        How many rows sample.
    """
    found = 0
    for row in range(rows.shape[0]):
        source = rows[row]
        prompt = prompt_lens[source]
        is_prefilling[row] = num_computed_tokens[row] < prompt
        samples = seq_lens[row] >= prompt + num_output_tokens[row]
        decoding[source] = samples
        if samples:
            sampled[found] = row
            logits_indices[found] = query_start_loc[row + 1] - 1
            found += 1
    return found


@entry
def append_blocks(
    rows: Int64, lengths: Int32, ids: Int32, blocks: Int32, block_counts: Int32
) -> int:
    """Write block ids behind those that requests have.

    Args:
        rows: [n], rows of the request states, which may repeat.
        lengths: [n], how many ids each receives, 0 or more.
        ids: their ids, one request after another.
        blocks: in and out, [R, W].
        block_counts: in and out, [R], how many of a row are valid.

    Returns:
        -1, or the first change that does not fit its row (it and later ones are not written).
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
    with compiling("sipipe.worker.inputs"):
        spans(int32, int32, starts, row.copy(), np.zeros(1, np.int32))
        find_sampled(
            row, int32, int32, int32, starts, int32, flag, flag.copy(), row.copy(), row.copy()
        )
        append_blocks(row, int32, int32, table, np.zeros(1, np.int32))
        gather_blocks(row, int32, int32, table, int32, 2, table.copy(), row.copy())
