"""Polls of the page: rates between two of them, queues between processes."""

from __future__ import annotations

import pytest

from sipipe.observe.live import LivePage, PageHeader, Word
from sipipe.observe.phases import Phase
from sipipe.observe.poll import Poll


@pytest.fixture
def page():
    made = LivePage.create(PageHeader(stages=2, samplers=1, inflight=3))
    yield made
    made.close()


def saw(page, role, index, **last):
    writer = page.writer(role, index)
    for name, iteration in last.items():
        writer.phase(Phase[name.upper()], iteration, 0, 1, 4, 4)


def depths(page, role, index):
    return block(Poll(page), role, index).queues


def block(poll, role, index, rank=0):
    return next(b for b in poll.blocks() if (b.role, b.index, b.rank) == (role, index, rank))


def test_nothing_waits_before_the_first_iteration(page):
    assert depths(page, "stage", 0) == {"scheduling": 0, "inputs": 0}
    assert depths(page, "stage", 1) == {"scheduling": 0, "inputs": 0, "hidden_states": 0}
    assert depths(page, "sampler", 0) == {"logits": 0}
    assert depths(page, "executor", 0) == {}


def test_what_one_side_passed_on_and_the_other_did_not_take(page):
    page.writer("executor").set(Word.INFLIGHT, 5)
    saw(page, "executor", 0, dispatch=9)
    saw(page, "stage", 0, prepare=8, forward=7, send=7)
    saw(page, "stage", 1, prepare=8, forward=5, logits=5)
    saw(page, "sampler", 0, wait_logits=4)
    assert depths(page, "stage", 0) == {"scheduling": 1, "inputs": 1}
    assert depths(page, "stage", 1) == {"scheduling": 1, "inputs": 3, "hidden_states": 2}
    assert depths(page, "sampler", 0) == {"logits": 1}


def test_what_is_planned_waits_for_its_tokens_alone(page):
    page.writer("executor").set(Word.INFLIGHT, 5)
    saw(page, "executor", 0, dispatch=8)
    saw(page, "stage", 0, prepare=9, forward=8)
    assert depths(page, "stage", 0) == {"scheduling": 0, "inputs": 0}


def test_logits_are_there_when_every_stage_has_multiplied(page):
    page.writer("executor").set(Word.INFLIGHT, 5)
    saw(page, "executor", 0, dispatch=9)
    saw(page, "stage", 0, forward=8, logits=5)
    saw(page, "stage", 1, forward=7, logits=7)
    saw(page, "sampler", 0, wait_logits=4)
    assert depths(page, "sampler", 0) == {"logits": 1}


def test_a_server_at_rest_has_empty_queues(page):
    saw(page, "executor", 0, dispatch=9)
    saw(page, "stage", 0, prepare=9, forward=9, send=9)
    saw(page, "stage", 1, prepare=9, forward=9, logits=9)
    saw(page, "sampler", 0, wait_logits=9)
    for role, index, _ in page.blocks:
        assert not any(depths(page, role, index).values())


def test_no_more_waits_than_is_in_flight_where_another_hosts_figures_are_old(page):
    executor = page.writer("executor")
    executor.set(Word.INFLIGHT, 3)
    executor.phase(Phase.DISPATCH, 90, 0, 1, 4, 4)
    saw(page, "stage", 0, prepare=90, forward=90, send=90)
    saw(page, "stage", 1, prepare=45, forward=45, logits=45)
    assert depths(page, "stage", 1) == {"scheduling": 3, "inputs": 0, "hidden_states": 3}
    executor.set(Word.INFLIGHT, 0)
    assert not any(depths(page, "stage", 1).values())


def test_two_polls_that_cross_give_no_negative_depth(page):
    saw(page, "stage", 0, prepare=3, forward=4)
    assert depths(page, "stage", 0) == {"scheduling": 0, "inputs": 0}


def test_growth_between_two_polls(page):
    poll = Poll(page)
    stage = page.writer("stage", 1)
    for i in range(10):
        if i == 5:
            poll.blocks()
        stage.phase(Phase.FORWARD, i, 1000 * i, 1000 * i + 800, 4, 8)
    found = block(poll, "stage", 1)
    seconds = found.span_ns / 1e9
    assert found.words[Word.BATCHES] == 10
    assert found.last_iteration == 9
    assert found.rate(Word.TOKENS) * seconds == pytest.approx(40)
    assert found.rate(Word.BATCHES) * seconds == pytest.approx(5)
    assert found.main_ns(Word.BATCHES) == 800
    assert found.busy * found.span_ns == pytest.approx(5 * 800)
    assert block(poll, "stage", 1).rate(Word.TOKENS) == 0


def test_a_share_is_never_more_than_all(page):
    poll = Poll(page)
    poll.blocks()
    page.writer("stage", 0).phase(Phase.FORWARD, 0, 0, 10**15, 4, 4)
    assert block(poll, "stage", 0).busy == 1.0
