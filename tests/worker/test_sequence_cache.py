"""The sequence cache against a dictionary, under any order of operations."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sipipe.worker.inputs.batch import SlotBatch
from sipipe.worker.inputs.request_state import SequenceCache

WIDTHS = (12, 6)
names = st.sampled_from([f"r{i}" for i in range(9)])
block_lists = st.tuples(
    st.lists(st.integers(0, 99), max_size=3), st.lists(st.integers(0, 99), max_size=2)
)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.cache = SequenceCache(2, WIDTHS)
        self.model = {}
        self.slot = SlotBatch(0)

    @rule(name=names, prompt=st.lists(st.integers(0, 9), max_size=4), blocks=block_lists)
    def insert(self, name, prompt, blocks):
        row = self.cache.insert(name, prompt, adapter=len(prompt))
        self.slot.touch([row])
        self.cache.append_blocks([row], [blocks])
        self.model[name] = (prompt, [list(ids) for ids in blocks], len(prompt))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def append(self, data):
        """Several sequences grow in one iteration."""
        named = data.draw(
            st.dictionaries(st.sampled_from(sorted(self.model)), block_lists, max_size=4)
        )
        grown = {
            name: blocks
            for name, blocks in named.items()
            if all(
                len(held) + len(added) <= width
                for held, added, width in zip(self.model[name][1], blocks, WIDTHS, strict=True)
            )
        }
        self.cache.append_blocks([self.cache.index[name] for name in grown], list(grown.values()))
        for name, blocks in grown.items():
            for held, added in zip(self.model[name][1], blocks, strict=True):
                held.extend(added)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), blocks=block_lists)
    def resume(self, data, blocks):
        name = data.draw(st.sampled_from(sorted(self.model)))
        row = self.cache.index[name]
        self.cache.resume(row)
        self.slot.touch([row])
        self.cache.append_blocks([row], [blocks])
        prompt, _, adapter = self.model[name]
        self.model[name] = (prompt, [list(ids) for ids in blocks], adapter)

    @rule(gone=st.sets(names, max_size=3))
    def remove(self, gone):
        rows = {self.cache.index[name] for name in gone if name in self.model}
        assert set(self.cache.remove(gone)) == rows
        self.slot.touch(list(rows))
        for name in gone:
            self.model.pop(name, None)

    @rule(data=st.data())
    def resolve(self, data):
        chosen = (
            data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
            if (self.model)
            else []
        )
        if not self.slot.same(chosen):
            rows = [self.cache.index[name] for name in chosen]
            self.slot.resolve(chosen, rows, self.cache)
        # Whether the rows were looked up now or before, they are the right ones.
        assert self.slot.rows.tolist() == [self.cache.index[name] for name in chosen]

    @invariant()
    def the_cache_holds_what_the_model_does(self):
        cache = self.cache
        assert set(cache.index) == set(self.model)
        assert len(set(cache.index.values())) == len(self.model)
        for name, (prompt, blocks, adapter) in self.model.items():
            row = cache.index[name]
            assert cache.prompts[row] == prompt
            assert cache.prompt_lens[row] == len(prompt)
            assert cache.adapters[row] == adapter
            for group, ids in enumerate(blocks):
                assert cache.counts[group][row] == len(ids)
                assert cache.blocks[group][row, : len(ids)].tolist() == ids


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestCache = CacheMachine.TestCase


def test_a_name_that_comes_back_with_another_row_is_not_taken_for_the_old_one():
    cache = SequenceCache(4, (4,))
    slots = [SlotBatch(0), SlotBatch(1)]
    old = [cache.insert("a", [1]), cache.insert("b", [2])]
    cache.append_blocks(old, [[[5]], [[6]]])
    slots[0].resolve(["a", "b"], old, cache)
    gone = cache.remove(["a", "b"])
    assert gone == old
    for slot in slots:
        slot.touch(gone)
    new = [cache.insert("a", [1]), cache.insert("b", [2])]
    cache.append_blocks(new, [[[8]], [[7]]])
    assert new != old
    assert not slots[0].same(["a", "b"])
    slots[0].resolve(["a", "b"], new, cache)
    assert cache.blocks[0][slots[0].rows, 0].tolist() == [8, 7]


def test_a_steady_slot_is_recognised_without_looking_at_the_cache():
    cache = SequenceCache(4, (4,))
    slot = SlotBatch(0)
    row = cache.insert("a", [1])
    slot.resolve(["a"], [row], cache)
    slot.touch([row + 1])
    assert slot.same(["a"])
    assert not slot.same(["a", "b"])
    assert cache.counters.batches_rebuilt == 1


def test_more_blocks_than_a_row_has_is_an_error_not_a_neighbours_row():
    cache = SequenceCache(2, (2,))
    rows = [cache.insert("a", [1]), cache.insert("b", [1])]
    cache.append_blocks(rows, [[[5, 6]], [[7]]])
    with pytest.raises(ValueError, match="given 3 blocks, its row holds 2"):
        cache.append_blocks(rows[:1], [[[9]]])
    assert np.array_equal(cache.blocks[0][cache.index["b"]], [7, 0])
