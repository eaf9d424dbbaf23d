"""Compiled kernels beside slow, obvious twins."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sipipe.worker.inputs.kernels import append_blocks, find_sampled, gather_blocks, spans


def naive_spans(computed, scheduled):
    positions = [c + j for c, s in zip(computed, scheduled, strict=True) for j in range(s)]
    starts = [0, *np.cumsum(scheduled).tolist()]
    lens = [c + s for c, s in zip(computed, scheduled, strict=True)]
    return starts, positions, lens


def naive_slots(rows, computed, scheduled, blocks, block_size):
    return [
        int(blocks[row, p // block_size]) * block_size + p % block_size
        for row, c, s in zip(rows, computed, scheduled, strict=True)
        for p in range(c, c + s)
    ]


batches = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(batch=batches)
def test_spans(batch):
    computed = np.array([c for c, _ in batch], np.int32)
    scheduled = np.array([s for _, s in batch], np.int32)
    total = int(scheduled.sum())
    query_start_loc = np.full(len(batch) + 3, -7, np.int32)
    positions = np.full(total + 3, -7, np.int64)
    seq_lens = np.full(len(batch) + 3, -7, np.int32)
    longest = spans(
        computed, scheduled, query_start_loc=query_start_loc, positions=positions, seq_lens=seq_lens
    )
    starts, expected_positions, lens = naive_spans(computed.tolist(), scheduled.tolist())
    assert longest == (max(scheduled), max(lens))
    assert query_start_loc[: len(batch) + 1].tolist() == starts
    assert positions[:total].tolist() == expected_positions
    assert seq_lens[: len(batch)].tolist() == lens
    for array, used in (
        (query_start_loc, len(batch) + 1),
        (positions, total),
        (seq_lens, len(batch)),
    ):
        assert (array[used:] == -7).all(), "wrote past its part"


@settings(max_examples=60, deadline=None)
@given(batch=batches, block_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99))
def test_gather_blocks(batch, block_size, seed):
    rng = np.random.default_rng(seed)
    computed = np.array([c for c, _ in batch], np.int32)
    scheduled = np.array([s for _, s in batch], np.int32)
    cached = len(batch) + 3
    needed = -(-(computed + scheduled) // block_size)
    width = int(needed.max()) + 2
    blocks = rng.integers(0, 1000, (cached, width), dtype=np.int32)
    rows = rng.permutation(cached)[: len(batch)].astype(np.int64)
    counts = np.zeros(cached, np.int32)
    counts[rows] = needed
    table = np.full((len(batch) + 1, width), -7, np.int32)
    total = int(scheduled.sum())
    slots = np.full(total + 2, -7, np.int64)
    arguments = {"blocks": blocks, "block_counts": counts, "block_size": block_size}
    assert (
        gather_blocks(rows, computed, scheduled, **arguments, block_table=table, slot_mapping=slots)
        == -1
    )
    for row, source in enumerate(rows):
        used = counts[source]
        assert table[row, :used].tolist() == blocks[source, :used].tolist()
        assert (table[row, used:] == -7).all()
    assert (table[len(batch)] == -7).all()
    assert slots[:total].tolist() == naive_slots(rows, computed, scheduled, blocks, block_size)
    assert (slots[total:] == -7).all()

    short = rng.integers(len(batch))
    counts[rows[short]] -= 1
    assert (
        gather_blocks(rows, computed, scheduled, **arguments, block_table=table, slot_mapping=slots)
        == short
    )


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(1, 30), st.integers(0, 9)),
        min_size=1,
        max_size=10,
    ),
    seed=st.integers(0, 99),
)
def test_find_sampled(batch, seed):
    """Each sequence: computed and scheduled tokens, prompt length, sampled tokens so far."""
    rng = np.random.default_rng(seed)
    computed, scheduled, prompts, outputs = (
        np.array(part, np.int32) for part in zip(*batch, strict=True)
    )
    size, cached = len(batch), len(batch) + 3
    rows = rng.permutation(cached)[:size].astype(np.int64)
    prompt_lens = np.full(cached, -9, np.int32)
    prompt_lens[rows] = prompts
    decoding = rng.random(cached) < 0.5
    before = decoding.copy()
    starts = np.array([0, *np.cumsum(scheduled)], np.int32)
    prefilling = np.ones(size + 2, np.bool_)
    sampled, logits_indices = np.full(size + 2, -7, np.int64), np.full(size + 2, -7, np.int64)
    found = find_sampled(
        rows,
        computed,
        outputs,
        prompt_lens=prompt_lens,
        query_start_loc=starts,
        seq_lens=computed + scheduled,
        is_prefilling=prefilling,
        decoding=decoding,
        sampled=sampled,
        logits_indices=logits_indices,
    )
    expected = [b for b, (c, s, p, o) in enumerate(batch) if c + s >= p + o]
    assert sampled[:found].tolist() == expected
    assert logits_indices[:found].tolist() == [starts[b + 1] - 1 for b in expected]
    assert prefilling.tolist() == [c < p for c, _, p, _ in batch] + [True, True]
    for row in range(cached):
        here = rows.tolist().index(row) if row in rows else None
        assert decoding[row] == (before[row] if here is None else here in expected)
    assert (sampled[found:] == -7).all()
    assert (logits_indices[found:] == -7).all()


@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 99), max_size=4)), max_size=6
    )
)
def test_append_blocks(changes):
    width = 7
    held = [[1], [], [2, 3, 4], [5]]
    blocks = np.full((4, width), -7, np.int32)
    counts = np.array([len(ids) for ids in held], np.int32)
    for row, ids in enumerate(held):
        blocks[row, : len(ids)] = ids
    expected = -1
    for place, (row, ids) in enumerate(changes):
        if len(held[row]) + len(ids) > width:
            expected = place
            break
        held[row] = held[row] + ids
    found = append_blocks(
        np.array([row for row, _ in changes], np.int64),
        np.array([len(ids) for _, ids in changes], np.int32),
        np.array([i for _, ids in changes for i in ids], np.int32),
        blocks=blocks,
        block_counts=counts,
    )
    assert found == expected
    assert counts.tolist() == [len(ids) for ids in held]
    for row, ids in enumerate(held):
        assert blocks[row].tolist() == ids + [-7] * (width - len(ids))
