"""Compiled loops of input preparation: from the facts of a batch to the tensors a model reads.

Every kernel runs without the GIL, so that the thread that prepares a microbatch does not hold up
the one that drives the device, and touches only the arrays it is given. Each has a slow, obvious
twin in ``tests/stage/test_kernels.py``.

Shapes: B rows (sequences) in the batch, T tokens in the batch, R rows in the sequence cache,
W block-table columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sipipe.jit import compiling, entry

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]


@entry
def _spans(
    computed: Any, scheduled: Any, query_start: Any, positions: Any, seq_lens: Any
) -> tuple[int, int]:
    start = 0
    longest_query = 0
    longest_seq = 0
    query_start[0] = 0
    for row in range(computed.shape[0]):
        first = computed[row]
        count = scheduled[row]
        for j in range(count):
            positions[start + j] = first + j
        start += count
        query_start[row + 1] = start
        seq_lens[row] = first + count
        longest_query = max(longest_query, count)
        longest_seq = max(longest_seq, first + count)
    return longest_query, longest_seq


def spans(
    computed: Int32,
    scheduled: Int32,
    *,
    query_start: Int32,
    positions: Int64,
    seq_lens: Int32,
) -> tuple[int, int]:
    """Write query starts, token positions and sequence lengths of a batch.

    Args:
        computed: [B], tokens of each sequence whose KV cache entries exist already.
        scheduled: [B], tokens of each sequence in this iteration, 1 or more.
        query_start: out, at least [B + 1]; ``query_start[b]`` is the first token of row b.
        positions: out, at least [T].
        seq_lens: out, at least [B]; computed + scheduled.

    Returns:
        The largest number of scheduled tokens, and the largest sequence length.
    """
    longest: tuple[int, int] = _spans(computed, scheduled, query_start, positions, seq_lens)
    return longest


@entry
def _gather_blocks(
    rows: Any,
    computed: Any,
    scheduled: Any,
    blocks: Any,
    counts: Any,
    block_size: int,
    table: Any,
    slots: Any,
) -> int:
    token = 0
    for row in range(rows.shape[0]):
        source = rows[row]
        count = counts[source]
        for j in range(count):
            table[row, j] = blocks[source, j]
        first = computed[row]
        last = first + scheduled[row]
        if last > count * block_size:
            return row
        for position in range(first, last):
            block = np.int64(blocks[source, position // block_size])
            slots[token] = block * block_size + position % block_size
            token += 1
    return -1


def gather_blocks(
    rows: Int64,
    computed: Int32,
    scheduled: Int32,
    *,
    blocks: Int32,
    counts: Int32,
    block_size: int,
    table: Int32,
    slots: Int64,
) -> int:
    """Write the block table of a batch and the KV cache slot of each of its tokens.

    Columns of ``table`` past a sequence's blocks keep what they held: attention reads only as
    many as the sequence length says.

    Args:
        rows: [B], each sequence's row in the sequence cache.
        computed: [B], tokens computed before this iteration.
        scheduled: [B], tokens of this iteration.
        blocks: [R, W], block ids of every cached sequence.
        counts: [R], how many of them are valid.
        block_size: tokens a block holds.
        table: out, at least [B, W].
        slots: out, at least [T]; block id x block size + offset.

    Returns:
        -1, or the first batch row whose tokens do not fit its blocks (nothing past it is written).
    """
    row: int = _gather_blocks(rows, computed, scheduled, blocks, counts, block_size, table, slots)
    return row


@entry
def _find_sampled(
    rows: Any,
    computed: Any,
    outputs: Any,
    prompt_lens: Any,
    query_start: Any,
    seq_lens: Any,
    prefilling: Any,
    decoding: Any,
    sampled: Any,
    last_tokens: Any,
) -> int:
    found = 0
    for row in range(rows.shape[0]):
        source = rows[row]
        prompt = prompt_lens[source]
        prefilling[row] = computed[row] < prompt
        samples = seq_lens[row] >= prompt + outputs[row]
        decoding[source] = samples
        if samples:
            sampled[found] = row
            last_tokens[found] = query_start[row + 1] - 1
            found += 1
    return found


def find_sampled(
    rows: Int64,
    computed: Int32,
    outputs: Int32,
    *,
    prompt_lens: Int32,
    query_start: Int32,
    seq_lens: Int32,
    prefilling: Bools,
    decoding: Bools,
    sampled: Int64,
    last_tokens: Int64,
) -> int:
    """Find the rows of a batch that produce a token: those whose known tokens end here.

    Args:
        rows: [B], each sequence's row in the sequence cache.
        computed: [B], tokens computed before this iteration.
        outputs: [B], tokens that were sampled for each sequence so far.
        prompt_lens: [R], prompt tokens of every cached sequence.
        query_start: [B + 1] and
        seq_lens: [B], as :func:`spans` wrote them.
        prefilling: out, at least [B]; whether the sequence is in its prompt.
        decoding: in and out, [R]; whether the sequence's last iteration ended with a sampled
            token; written at ``rows`` only.
        sampled: out, at least [B]; batch rows that sample, ascending.
        last_tokens: out, at least [B]; the last token of each of them.

    Returns:
        How many rows sample.
    """
    found: int = _find_sampled(
        rows,
        computed,
        outputs,
        prompt_lens,
        query_start,
        seq_lens,
        prefilling,
        decoding,
        sampled,
        last_tokens,
    )
    return found


@entry
def _append_blocks(rows: Any, lengths: Any, ids: Any, blocks: Any, counts: Any) -> int:
    start = 0
    for change in range(rows.shape[0]):
        row = rows[change]
        count = counts[row]
        length = lengths[change]
        if count + length > blocks.shape[1]:
            return change
        for j in range(length):
            blocks[row, count + j] = ids[start + j]
        counts[row] = count + length
        start += length
    return -1


def append_blocks(rows: Int64, lengths: Int32, ids: Int32, *, blocks: Int32, counts: Int32) -> int:
    """Write block ids behind those that sequences have.

    Args:
        rows: [n], rows of the sequence cache, which may repeat.
        lengths: [n], how many ids each receives, 0 or more.
        ids: their ids, one sequence after another.
        blocks: in and out, [R, W].
        counts: in and out, [R], how many of a row are valid.

    Returns:
        -1, or the first change that does not fit its row (it and later ones are not written).
    """
    change: int = _append_blocks(rows, lengths, ids, blocks, counts)
    return change


def warm_up() -> None:
    """Compile every kernel (or load it from the cache): at start-up, not in the first request."""
    with compiling("sipipe.worker.inputs"):
        _call_all()


def _call_all() -> None:
    one = np.ones(1, dtype=np.int32)
    row = np.zeros(1, np.int64)
    table = np.zeros((1, 2), np.int32)
    flag = np.zeros(1, np.bool_)
    query_start, seq_lens = np.zeros(2, np.int32), np.zeros(1, np.int32)
    spans(one, one, query_start=query_start, positions=row.copy(), seq_lens=seq_lens)
    find_sampled(
        row,
        one,
        one,
        prompt_lens=one,
        query_start=query_start,
        seq_lens=seq_lens,
        prefilling=flag,
        decoding=flag.copy(),
        sampled=row.copy(),
        last_tokens=row.copy(),
    )
    counts = np.zeros(1, np.int32)
    append_blocks(row, one, one, blocks=table, counts=counts)
    gather_blocks(
        row,
        one,
        one,
        blocks=table,
        counts=counts,
        block_size=2,
        table=table.copy(),
        slots=row.copy(),
    )
