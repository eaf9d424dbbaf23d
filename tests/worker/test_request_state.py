"""The request states against a dictionary, under any order of operations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
from vllm.v1.worker.gpu.states import RequestState

from sipipe.worker.inputs.request_state import RequestStates, SlotBatch, batch_order

from .vllm_preparation import on_host

WIDTHS = (12, 6)
FREE = [3, 0, 7, 1, 2, 8, 5, 6, 4]
"""Rows in the order in which vLLM keeps them after a warm-up; the last one is given first."""
names = st.sampled_from([f"r{i}" for i in range(9)])
block_lists = st.tuples(
    st.lists(st.integers(0, 99), max_size=3), st.lists(st.integers(0, 99), max_size=2)
)


class StatesMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.states = RequestStates(FREE, WIDTHS)
        with on_host():
            self.vllm = RequestState(len(FREE), 64, 64, 0, 100, "cpu")
        self.vllm.free_indices = list(FREE)
        self.model = {}
        self.slot = SlotBatch()

    @rule(name=names, prompt=st.lists(st.integers(0, 9), max_size=4), blocks=block_lists)
    def add(self, name, prompt, blocks):
        row = self.states.add(name, prompt)
        self.vllm.remove_request(name)
        self.vllm.add_request(name, len(prompt), prompt, 0, 1)
        self.slot.touch([row])
        self.states.append_blocks([row], [blocks])
        self.model[name] = (prompt, [list(ids) for ids in blocks])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def append(self, data):
        """Several requests grow in one iteration."""
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
        self.states.append_blocks([self.states.index[name] for name in grown], list(grown.values()))
        for name, blocks in grown.items():
            for held, added in zip(self.model[name][1], blocks, strict=True):
                held.extend(added)

    @rule(gone=st.sets(names, max_size=3))
    def remove(self, gone):
        rows = {self.states.index[name] for name in gone if name in self.model}
        assert set(self.states.remove(gone)) == rows
        for name in sorted(gone):
            self.vllm.remove_request(name)
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
            rows = [self.states.index[name] for name in chosen]
            self.slot.resolve(chosen, rows)
        # Whether the rows were looked up now or before, they are the right ones.
        assert self.slot.rows.tolist() == [self.states.index[name] for name in chosen]

    @invariant()
    def the_states_hold_what_the_model_does(self):
        states = self.states
        assert set(states.index) == set(self.model)
        assert states.index == self.vllm.req_id_to_index
        for name, (prompt, blocks) in self.model.items():
            row = states.index[name]
            assert states.prefills[row] == prompt
            assert states.prefill_lens[row] == len(prompt)
            for group, ids in enumerate(blocks):
                assert states.block_counts[group][row] == len(ids)
                assert states.blocks[group][row, : len(ids)].tolist() == ids


StatesMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestStates = StatesMachine.TestCase


def test_a_steady_slot_is_recognised_without_looking_at_the_states():
    states = RequestStates(range(4), (4,))
    slot = SlotBatch()
    row = states.add("a", [1])
    slot.resolve(["a"], [row])
    slot.touch([row + 1])
    assert slot.same(["a"])
    assert not slot.same(["a", "b"])


def test_more_blocks_than_a_row_has_is_an_error_not_a_neighbours_row():
    states = RequestStates(range(2), (2,))
    rows = [states.add("a", [1]), states.add("b", [1])]
    states.append_blocks(rows, [[[5, 6]], [[7]]])
    with pytest.raises(AssertionError, match="3 blocks for a row of 2"):
        states.append_blocks(rows[:1], [[[9]]])
    assert np.array_equal(states.blocks[0][states.index["b"]], [7, 0])


numbers = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=8)


@given(requests=numbers, decode_tokens=st.sampled_from([1, 4]))
def test_batches_are_ordered_as_vllms_runner_orders_them(requests, decode_tokens):
    """With drafts, where that runner knows of them: elsewhere it is told of none."""
    scheduled = np.array([max(tokens, 1 + drafts) for tokens, drafts in requests], np.int32)
    drafts = np.array([drafts for _, drafts in requests], np.int32)
    order = batch_order(scheduled, drafts, decode_tokens)
    names = [str(index) for index in range(len(requests))]
    told = {name: [0] * int(count) for name, count in zip(names, drafts, strict=True) if count}
    expected = sort_batch_req_ids(
        dict(zip(names, scheduled.tolist(), strict=True)),
        told if decode_tokens > 1 else {},
        decode_tokens,
    )
    found = names if order is None else [names[index] for index in order]
    assert found == expected
