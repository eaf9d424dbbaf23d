"""Queues between processes, from what each of them saw last."""

from __future__ import annotations

import pytest

from sipipe.observe.live import LivePage
from sipipe.observe.phases import Phase
from sipipe.observe.queues import queues


@pytest.fixture
def page():
    made = LivePage.create(stages=2, samplers=1, inflight=3)
    yield made
    made.close()


def saw(page, role, index, **last):
    writer = page.writer(role, index)
    for name, iteration in last.items():
        writer.phase(Phase[name.upper()], iteration, 0, 1, 4, 4)


def depths(page, role, index):
    return queues(page, role, index, 0, page.read(role, index))


def test_nothing_waits_before_the_first_iteration(page):
    assert depths(page, "stage", 0) == {"scheduling": 0, "inputs": 0}
    assert depths(page, "stage", 1) == {"scheduling": 0, "inputs": 0, "hidden_states": 0}
    assert depths(page, "sampler", 0) == {"logits": 0}
    assert depths(page, "executor", 0) == {}


def test_what_one_side_passed_on_and_the_other_did_not_take(page):
    saw(page, "executor", 0, dispatch=9)
    saw(page, "stage", 0, prepare=8, forward=7, send=7)
    saw(page, "stage", 1, prepare=8, forward=5, handover=5)
    saw(page, "sampler", 0, wait_logits=4)
    assert depths(page, "stage", 0) == {"scheduling": 1, "inputs": 1}
    assert depths(page, "stage", 1) == {"scheduling": 1, "inputs": 3, "hidden_states": 2}
    assert depths(page, "sampler", 0) == {"logits": 1}


def test_a_server_at_rest_has_empty_queues(page):
    saw(page, "executor", 0, dispatch=9)
    saw(page, "stage", 0, prepare=9, forward=9, send=9)
    saw(page, "stage", 1, prepare=9, forward=9, handover=9)
    saw(page, "sampler", 0, wait_logits=9)
    for role, index, _, _ in page.blocks():
        assert not any(depths(page, role, index).values())


def test_two_looks_that_cross_give_no_negative_depth(page):
    saw(page, "stage", 0, prepare=3, forward=4)
    assert depths(page, "stage", 0) == {"scheduling": 0, "inputs": 0}
