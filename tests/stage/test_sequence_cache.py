"""The sequence cache against a dictionary, under any order of operations."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sipipe.stage.batch import SlotBatch
from sipipe.stage.sequence_cache import SequenceCache

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
        self.cache.insert(name, prompt, blocks, adapter=len(prompt))
        self.slot.touch(name)
        self.model[name] = (prompt, [list(ids) for ids in blocks], len(prompt))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), blocks=block_lists)
    def append(self, data, blocks):
        name = data.draw(st.sampled_from(sorted(self.model)))
        held = self.model[name][1]
        if any(len(h) + len(b) > w for h, b, w in zip(held, blocks, WIDTHS, strict=True)):
            return
        self.cache.append_blocks(self.cache.index[name], blocks)
        for ids, added in zip(held, blocks, strict=True):
            ids.extend(added)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), blocks=block_lists)
    def resume(self, data, blocks):
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.cache.resume(self.cache.index[name], blocks)
        self.slot.touch(name)
        prompt, _, adapter = self.model[name]
        self.model[name] = (prompt, [list(ids) for ids in blocks], adapter)

    @rule(name=names)
    def remove(self, name):
        assert self.cache.remove(name) == (name in self.model)
        self.slot.touch(name)
        self.model.pop(name, None)

    @rule(data=st.data())
    def resolve(self, data):
        chosen = (
            data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
            if (self.model)
            else []
        )
        if not self.slot.same(chosen):
            self.slot.resolve(chosen, self.cache)
        # Whether the rows were looked up now or before, they are the right ones.
        assert self.slot.rows.tolist() == [self.cache.index[name] for name in chosen]

    @invariant()
    def the_cache_holds_what_the_model_does(self):
        cache = self.cache
        assert set(cache.index) == set(self.model)
        assert len(set(cache.index.values())) == len(self.model)
        for name, (prompt, blocks, adapter) in self.model.items():
            row = cache.index[name]
            assert cache.prompts[row].tolist() == prompt
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
    cache.insert("a", [1], [[5]])
    cache.insert("b", [2], [[6]])
    slots[0].resolve(["a", "b"], cache)
    old = slots[0].rows.tolist()
    for name in ("b", "a"):
        cache.remove(name)
        for slot in slots:
            slot.touch(name)
    cache.insert("b", [2], [[7]])
    cache.insert("a", [1], [[8]])
    assert not slots[0].same(["a", "b"])
    slots[0].resolve(["a", "b"], cache)
    assert slots[0].rows.tolist() != old
    assert cache.blocks[0][slots[0].rows, 0].tolist() == [8, 7]


def test_a_steady_slot_is_recognised_without_looking_at_the_cache():
    cache = SequenceCache(4, (4,))
    slot = SlotBatch(0)
    cache.insert("a", [1], [[5]])
    cache.decoding[cache.index["a"]] = True
    slot.resolve(["a"], cache)
    assert slot.same(["a"])
    assert slot.decoding
    assert not slot.same(["a", "b"])
    assert cache.counters.batches_rebuilt == 1


def test_more_blocks_than_a_row_has_is_an_error_not_a_neighbours_row():
    cache = SequenceCache(2, (2,))
    cache.insert("a", [1], [[5, 6]])
    cache.insert("b", [1], [[7]])
    with pytest.raises(ValueError, match="given 3 blocks, its row holds 2"):
        cache.append_blocks(cache.index["a"], [[9]])
    assert np.array_equal(cache.blocks[0][cache.index["b"]], [7, 0])
