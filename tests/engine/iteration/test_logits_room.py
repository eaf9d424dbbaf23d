"""Rows of BIC-L: no two iterations share any, and an even load never waits for one."""

import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput

from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.logits_room import LogitsRoom, rows_needed
from sipipe.engine.iteration.work import Work

REQUESTS = 64


@given(
    inflight=st.integers(1, 9),
    sizes=st.lists(
        st.one_of(st.integers(0, 4), st.integers(0, REQUESTS // 2), st.integers(0, REQUESTS)),
        min_size=1,
        max_size=200,
    ),
)
@settings(deadline=None, max_examples=200)
def test_iterations_of_any_sizes_find_room_of_their_own(inflight, sizes):
    """As a scheduler makes them: no more in flight than ``inflight``, each request in one."""
    rows = rows_needed(REQUESTS, inflight)
    room, live, drawn = LogitsRoom(rows), deque(), -1
    for iteration, size in enumerate(sizes):
        while len(live) == inflight or sum(len(taken) for _, taken in live) + size > REQUESTS:
            drawn, _ = live.popleft()
            room.give_back(drawn)
        while room.find(size) is None:
            drawn, _ = live.popleft()  # with none in flight there is room
            room.give_back(drawn)
        first = room.take(iteration, size)
        taken = range(first, first + size) if size else range(0)
        assert not size or 0 <= first <= first + size <= rows
        for _, other in live:
            assert not set(taken) & set(other)
        live.append((iteration, taken))


@pytest.mark.parametrize("inflight", [2, 3, 5, 9])
def test_even_microbatches_always_have_room(inflight):
    """In any number of open slots, with some prompts in the closed ones."""
    for opened in range(1, inflight + 1):
        room = LogitsRoom(rows_needed(REQUESTS, inflight))
        shares = [(REQUESTS - inflight) // opened] * opened + [1] * (inflight - opened)
        for iteration in range(50 * inflight):
            room.give_back(iteration - inflight)
            size = shares[iteration % inflight] + iteration % 2
            assert room.find(size) is not None
            room.take(iteration, size)


def begin(iterations, count):
    names = [f"r{i}" for i in range(count)]
    work = Work(request_ids=names, sampled=names, samplers=(0,) if names else ())
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict.fromkeys(names, 1)
    iterations.enter(output)
    return iterations.begin(lambda *_: work)


def test_an_iteration_has_its_rows_until_it_leaves():
    iterations = Iterations(3, 8)
    assert [begin(iterations, count).begun.logits_row for count in (3, 0, 2)] == [0, -1, 3]
    iterations.leave(iterations.deliver(0, tokens={}))
    assert begin(iterations, 3).begun.logits_row == 0
    assert begin(iterations, 3).begun.logits_row == 5


@pytest.mark.parametrize("end", ["drawn", "failed"])
def test_it_waits_where_aborted_requests_still_have_rows(end):
    """And who wants everything published waits for it."""
    iterations, said = Iterations(3, 8), []
    begin(iterations, 6)
    assert not iterations.wait_for_first()
    assert begin(iterations, 3) is None
    waiting = threading.Thread(target=lambda: said.append(iterations.wait_for_first()))
    waiting.start()
    assert not said
    if end == "drawn":
        iterations.leave(iterations.deliver(0, tokens={}))
    else:
        iterations.fail(RuntimeError("stalled"))
    waiting.join(30)
    assert said == [end == "drawn"]
    if end == "drawn":
        assert iterations.begin(lambda *_: Work()).number == 1
        assert not iterations.wait_for_first()
