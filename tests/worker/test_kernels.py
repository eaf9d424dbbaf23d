"""Compiled kernels beside slow, obvious twins."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sipipe.worker.inputs.kernels import append_blocks, find_prefills, gather_blocks, lay_out


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


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(1, 30)),
        min_size=1,
        max_size=10,
    ),
    seed=st.integers(0, 99),
)
def test_find_prefills(batch, seed):
    """Each request: computed and scheduled tokens, and how many it had when it was added."""
    rng = np.random.default_rng(seed)
    computed, scheduled, lengths = (np.array(part, np.int32) for part in zip(*batch, strict=True))
    size, cached = len(batch), len(batch) + 3
    rows = rng.permutation(cached)[:size].astype(np.int64)
    known = np.full(cached, -9, np.int32)
    known[rows] = lengths
    decoding = rng.random(cached) < 0.5
    before = decoding.copy()
    out, done = np.full(size + 2, -7, np.int32), np.full(size + 2, -7, np.int32)
    prefilling, as_decode = np.ones(size + 2, np.bool_), np.ones(size + 2, np.bool_)
    found = find_prefills(
        rows,
        computed,
        scheduled,
        known=known,
        prefill_lens=out,
        num_computed_prefill_tokens=done,
        is_prefilling=prefilling,
        runs_as_decode=as_decode,
        decoding=decoding,
    )
    within = [c < p for c, _, p in batch]
    short = [w and c > 0 and s == 1 for w, (c, s, _) in zip(within, batch, strict=True)]
    samples = [c + s >= p for c, s, p in batch]
    fits = all(s or not w for s, w in zip(short, within, strict=True))
    assert found == (sum(samples), sum(within), fits)
    assert out.tolist() == [*lengths, -7, -7]
    assert done.tolist() == [*(min(c, p) for c, _, p in batch), -7, -7]
    assert prefilling.tolist() == [*within, True, True]
    assert as_decode.tolist() == [*short, True, True]
    for row in range(cached):
        here = rows.tolist().index(row) if row in rows else None
        assert decoding[row] == (before[row] if here is None else samples[here])


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
