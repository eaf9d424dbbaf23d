"""The layout of a batch beside a slow, obvious twin. Its blocks: test_prepare.py has vLLM's."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sipipe.worker.inputs.kernels import lay_out

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
    ends = np.cumsum(scheduled).tolist()
    assert found == (total, max(scheduled))
    assert starts[: rows + 1].tolist() == [0, *ends]
    assert positions[:total].tolist() == [c + j for c, s in batch for j in range(s)]
    assert seq_lens[:rows].tolist() == [c + s for c, s in batch]
    behind = zip(ends, drafts.tolist(), strict=True)
    logits = [token for end, count in behind for token in range(end - 1 - count, end)]
    assert last[: len(logits)].tolist() == logits
    assert first[: rows + 1].tolist() == [0, *np.cumsum(1 + drafts).tolist()]
    used_of = (starts, rows + 1), (positions, total), (seq_lens, rows), (last, len(logits))
    for array, used in (*used_of, (first, rows + 1)):
        assert (array[used:] == -7).all(), "wrote past its part"
