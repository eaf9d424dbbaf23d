"""State from iteration to iteration: what a draw may and may not depend on."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampler.support import memory_kept
from tests.sampler.test_filters import logits

from sipipe.messages.params import SequenceParams
from sipipe.sampler.kernels.tables import SeenTables
from sipipe.sampler.state import SequenceColumns

V = 1000
KINDS = [
    SequenceParams(seed=1),
    SequenceParams(temperature=0.0),
    SequenceParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.3),
    SequenceParams(top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=5),
    SequenceParams(top_p=0.8, presence_penalty=0.5, seed=6),
    SequenceParams(min_p=0.02, logit_bias={3: 4.0}, bad_words_token_ids=[[1], [2, 3]], seed=7),
    SequenceParams(top_k=700, seed=8, min_tokens=5, all_stop_token_ids=[1, 2, 3]),
    SequenceParams(allowed_token_ids=list(range(0, V, 7)), seed=9),
    SequenceParams(thinking_token_budget=4, seed=10),
]
MIXED = [kind for kind in KINDS if not kind.allowed_token_ids and kind.top_k < 300]
STEADY = [
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1},
    {"frequency_penalty": 0.1},
]


@pytest.mark.parametrize(
    "params",
    [
        SequenceParams(repetition_penalty=1.2, seed=3),
        SequenceParams(presence_penalty=0.7, top_p=0.9, seed=4),
        SequenceParams(frequency_penalty=0.1, repetition_penalty=0.9, min_p=0.001, seed=5),
    ],
    ids=["temperature", "top_p", "min_p"],
)
def test_rebuilt_state_draws_as_kept_state(params: SequenceParams) -> None:
    """Through several sizes of its table, so that only the tokens themselves may matter."""
    x = logits("flat", V).reshape(1, -1)
    prompt = list(range(0, 90, 3))
    kept = SequenceColumns(V)
    kept.join(0, params, prompt)
    output: list[int] = []
    for step in range(400):
        token = int(kept.sample([0], x).token_ids[0])
        if step % 7 == 0:
            rebuilt = SequenceColumns(V)
            for other in range(step % 4):
                rebuilt.join(10 + other, params, [1, 2])
            rebuilt.join(0, params, prompt, output)
            assert rebuilt.sample([0], x).token_ids[0] == token
        kept.append(0, token)
        output.append(token)


@pytest.mark.parametrize("size", [300, 151_936])
def test_1024_sequences_draw_as_each_alone(size: int) -> None:
    """Sampled together, in halves of other orders, and one by one."""
    batch = 1024 if size == 300 else 64
    rng = np.random.default_rng(0)
    matrix = rng.normal(0, 2, (batch, size)).astype(np.float32)
    together = SequenceColumns(size)
    for i in range(batch):
        together.join(i, KINDS[i % len(KINDS)] if size > 999 else MIXED[i % len(MIXED)], [i % 7])
    expected = together.sample(range(batch), matrix).token_ids
    order = rng.permutation(batch)
    for half in (order[: batch // 2], order[batch // 2 :]):
        np.testing.assert_array_equal(together.sample(half, matrix, half).token_ids, expected[half])
    for i in order[:: batch // 64].tolist():
        drawn = together.sample([i], np.ascontiguousarray(matrix[i : i + 1]))
        assert drawn.token_ids[0] == expected[i]


def test_an_iteration_allocates_nothing_of_the_size_of_the_vocabulary() -> None:
    size, batch = 151_936, 16
    matrix = np.random.default_rng(0).normal(size=(batch, size)).astype(np.float32)
    columns = SequenceColumns(size)
    for i in range(batch):
        columns.join(i, SequenceParams(**(STEADY[i % len(STEADY)]), seed=i), range(100), range(300))
    columns.append(range(batch), columns.sample(range(batch), matrix).token_ids)
    tracemalloc.start()
    try:
        for _ in range(3):
            columns.append(range(batch), columns.sample(range(batch), matrix).token_ids)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size


def test_thinking_is_forced_to_end() -> None:
    columns = SequenceColumns(V, reasoning_start_token_ids=[7], reasoning_end_token_ids=[8, 9])
    columns.join(0, KINDS[8], [8, 7])
    tokens = []
    for step in range(6):
        result = columns.sample([0], logits("zipf", V, 8000 + step).reshape(1, -1))
        tokens.append(int(result.token_ids[0]))
        columns.append(0, tokens[-1])
    assert tokens[4:] == [8, 9]


def test_input_is_left_alone_and_may_be_read_only() -> None:
    matrix = np.stack([logits("zipf", V, i) for i in range(len(KINDS))])
    before = matrix.copy()
    matrix.flags.writeable = False
    columns = SequenceColumns(V)
    for i, params in enumerate(KINDS):
        columns.join(i, params, [1, 2], [2, 3])
    columns.sample(range(len(KINDS)), matrix)
    np.testing.assert_array_equal(matrix, before)


def test_handles() -> None:
    columns = SequenceColumns(V)
    for handle in range(40):
        columns.join(handle, KINDS[handle % 5], [1])
    columns.leave(7)
    assert 7 not in columns
    columns.discard(7)
    with pytest.raises(KeyError, match="handle 7 has not joined"):
        columns.append(7, 1)
    with pytest.raises(KeyError, match="handle 7 has not joined"):
        columns.leave(7)
    with pytest.raises(ValueError, match="handle 8 has already joined"):
        columns.join(8, KINDS[0])
    with pytest.raises(KeyError, match="handle 41"):
        columns.sample([8, 41], np.zeros((2, V), np.float32))


def test_memory_is_of_distinct_tokens_only() -> None:
    """B 1,024 with 128 K-token texts (5,000 distinct tokens each): megabytes."""
    columns = SequenceColumns(150_000)
    text = np.random.default_rng(0).zipf(1.3, 131_072) % 5000

    def join() -> None:
        for handle in range(8):
            columns.join(handle, SequenceParams(repetition_penalty=1.1), text)

    assert memory_kept(join) / 8 * 1024 < 200e6


def test_a_sequence_that_leaves_leaves_no_seen_tokens() -> None:
    """Else memory would grow with every request that has penalties."""
    columns = SequenceColumns(1000)
    params = SequenceParams(repetition_penalty=1.1)

    def come_and_go(handles: range) -> None:
        for handle in handles:
            columns.join(handle, params, list(range(600)), [1, 2])
            columns.leave(handle)

    come_and_go(range(1))
    assert memory_kept(lambda: come_and_go(range(1, 200))) < 100_000, "their texts are 500 KB"


def contents(tables: SeenTables, request: int) -> dict[int, int]:
    """{token: occurrences in the output}."""
    index, tokens, counts, first, room, start, used = tables.tables
    part = slice(start[request], start[request] + used[request])
    entries = index[first[request] : first[request] + room[request]]
    assert sorted(entries[entries >= 0].tolist()) == list(range(used[request]))
    return dict(zip(tokens[part].tolist(), counts[part].tolist(), strict=True))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tables_count_as_a_dictionary_does(data: st.DataObject) -> None:
    tables = SeenTables(3)
    positions = np.zeros(3, np.int64)
    model: list[tuple[set[int], Counter[int]] | None] = [None] * 3
    token = st.integers(0, data.draw(st.sampled_from([5, 300, 200_000])))
    for _ in range(data.draw(st.integers(1, 12))):
        column = data.draw(st.integers(0, 2))
        if model[column] is None:
            prompt = data.draw(st.lists(token, max_size=200))
            output = data.draw(st.lists(token, max_size=200))
            tables.add(column, np.array(prompt, np.int32), np.array(output, np.int32))
            model[column] = (set(prompt), Counter(output))
        elif data.draw(st.booleans()):
            added = data.draw(st.lists(token, min_size=1, max_size=100))
            tables.append(positions, np.full(len(added), column), np.array(added, np.int32))
            model[column][1].update(added)
        else:
            tables.remove(column)
            model[column] = None
        for at, expected in enumerate(model):
            if expected is not None:
                seen, counts = expected
                wanted = {**dict.fromkeys(seen, 0), **counts}
                assert contents(tables, at) == wanted
