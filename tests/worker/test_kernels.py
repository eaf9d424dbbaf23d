"""Compiled kernels beside slow, obvious twins."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sipipe.worker.inputs.kernels import gather_blocks, lay_out


def naive_layout(computed, scheduled):
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
@given(batch=batches, data=st.data())
def test_lay_out(batch, data):
    computed = np.array([c for c, _ in batch], np.int32)
    scheduled = np.array([s for _, s in batch], np.int32)
    total, rows = int(scheduled.sum()), len(batch)
    starts = np.full(rows + 3, -7, np.int32)
    positions = np.full(total + 3, -7, np.int64)
    drafts = np.array([data.draw(st.integers(0, s - 1)) for _, s in batch], np.int32)
    seq_lens, first = np.full(rows + 3, -7, np.int32), np.full(rows + 4, -7, np.int32)
    last = np.full(total + 3, -7, np.int64)
    found = lay_out(
        computed,
        scheduled,
        drafts,
        query_start_loc=starts,
        positions=positions,
        seq_lens=seq_lens,
        logits_indices=last,
        first_logits=first,
    )
    expected_starts, expected_positions, lens = naive_layout(computed.tolist(), scheduled.tolist())
    assert found == (total, max(scheduled))
    assert starts[: rows + 1].tolist() == expected_starts
    assert positions[:total].tolist() == expected_positions
    assert seq_lens[:rows].tolist() == lens
    ends = zip(expected_starts[1:], drafts.tolist(), strict=True)
    logits = [token for end, behind in ends for token in range(end - 1 - behind, end)]
    assert last[: len(logits)].tolist() == logits
    assert first[: rows + 1].tolist() == [0, *np.cumsum(1 + drafts).tolist()]
    used_of = (starts, rows + 1), (positions, total), (seq_lens, rows), (last, len(logits))
    for array, used in (*used_of, (first, rows + 1)):
        assert (array[used:] == -7).all(), "wrote past its part"


@settings(max_examples=60, deadline=None)
@given(
    batch=batches,
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 0, 1, 7, 100]),
    seed=st.integers(0, 99),
)
def test_gather_blocks(batch, block_size, window, seed):
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
    arguments = {
        "blocks": blocks,
        "block_counts": counts,
        "block_size": block_size,
        "window": window,
        "mapped": True,
    }
    assert (
        gather_blocks(rows, computed, scheduled, **arguments, block_table=table, slot_mapping=slots)
        == -1
    )
    for row, source in enumerate(rows):
        used = counts[source]
        passed = max(int(computed[row]) - window, 0) // block_size if window else 0
        expected = [0] * min(passed, used) + blocks[source, passed:used].tolist()
        assert table[row, :used].tolist() == expected
        assert (table[row, used:] == -7).all()
    assert (table[len(batch)] == -7).all()
    assert slots[:total].tolist() == naive_slots(rows, computed, scheduled, blocks, block_size)
    assert (slots[total:] == -7).all()

    unmapped = slots.copy()
    arguments["mapped"] = False
    assert (
        gather_blocks(
            rows, computed, scheduled, **arguments, block_table=table, slot_mapping=unmapped
        )
        == -1
    )
    assert (unmapped[:total] == -1).all()
    assert (unmapped[total:] == -7).all()

    arguments["mapped"] = True
    short = rng.integers(len(batch))
    counts[rows[short]] -= 1
    assert (
        gather_blocks(rows, computed, scheduled, **arguments, block_table=table, slot_mapping=slots)
        == short
    )
