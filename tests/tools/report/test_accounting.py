"""Bubble accounting: a worked example, each cause on its own, and random timelines."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.emulation.replay import whole
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tools.report import naive
from tests.tools.report.timeline import pipeline, process

from sipipe.observe.phases import Phase as P
from sipipe.tools.report.accounting import KINDS, Cause, account, shares, total
from sipipe.tools.report.reader import Trace

# The worked example of docs/tracing.md: two stages, two microbatches in flight, times in ms.
# The last stage samples (3 ms), each stage prepares on its device's path (1 ms).
EXECUTOR = [
    (P.SCHEDULE, 0, 0, 1), (P.DISPATCH, 0, 1, 2),
    (P.SCHEDULE, 1, 2, 3), (P.DISPATCH, 1, 3, 4),
    (P.GATHER, 0, 4, 28), (P.UPDATE, 0, 28, 29), (P.SCHEDULE, 2, 29, 30), (P.DISPATCH, 2, 30, 31),
    (P.GATHER, 1, 31, 42), (P.UPDATE, 1, 42, 43),
    (P.GATHER, 2, 43, 57), (P.UPDATE, 2, 57, 58),
]  # fmt: skip
STAGE_0 = [
    (P.WAIT_SCHEDULING, 0, 0, 2), (P.PREPARE, 0, 2, 3), (P.FORWARD, 0, 3, 13), (P.SEND, 0, 13, 14),
    (P.WAIT_SCHEDULING, 1, 14, 14), (P.PREPARE, 1, 14, 15), (P.FORWARD, 1, 15, 25),
    (P.SEND, 1, 25, 26),
    (P.WAIT_SCHEDULING, 2, 26, 32), (P.PREPARE, 2, 32, 33), (P.FORWARD, 2, 33, 43),
    (P.SEND, 2, 43, 44),
]  # fmt: skip
STAGE_1 = [
    (P.WAIT_SCHEDULING, 0, 0, 3), (P.WAIT_HIDDEN, 0, 3, 14), (P.PREPARE, 0, 14, 15),
    (P.FORWARD, 0, 15, 25), (P.SAMPLE, 0, 25, 28),
    (P.WAIT_SCHEDULING, 1, 28, 28), (P.WAIT_HIDDEN, 1, 28, 28), (P.PREPARE, 1, 28, 29),
    (P.FORWARD, 1, 29, 39), (P.SAMPLE, 1, 39, 42),
    (P.WAIT_SCHEDULING, 2, 42, 42), (P.WAIT_HIDDEN, 2, 42, 44), (P.PREPARE, 2, 44, 45),
    (P.FORWARD, 2, 45, 54), (P.SAMPLE, 2, 54, 57),
]  # fmt: skip


def spent(stage) -> dict[Cause, int]:
    return {Cause(n): ns for n, ns in enumerate(stage.by_cause) if ns}


def test_worked_example():
    first, last = account(pipeline([STAGE_0, STAGE_1], EXECUTOR, inflight=2))
    assert spent(first) == {
        Cause.BUSY: 30,
        Cause.LATER_STAGE: 3,  # 25-28: both microbatches were at stage 1
        Cause.PREPARING: 3,
        Cause.SENDING: 1,  # 13-14; at 25 and 43 nothing waited behind the sender
        Cause.SCHEDULER: 3,  # 28-31: the pipeline had room
        Cause.DISPATCHED: 1,  # 31-32
        Cause.NOTHING: 14,
    }
    assert spent(last) == {
        Cause.BUSY: 29,
        Cause.SAMPLING: 9,
        Cause.EARLIER_STAGE: 9,  # 4-13
        Cause.PREPARING: 3,
        Cause.HIDDEN_STATES: 2,  # 13-14, 43-44
        Cause.DISPATCHED: 1,
        Cause.FILLING: 2,  # 3-4, 42-43: one microbatch in flight, and it was at stage 0
    }
    found = total((first, last))
    assert dict(zip(KINDS, found, strict=True)) == {
        "busy": 59,
        "load_imbalance": 21,
        "intra_stage": 6,
        "inter_stage": 3,
        "unscheduled": 21,
        "idle": 0,
    }
    assert sum(found) == 2 * 55  # from 2, when the first stage begins, to 57


PLANNED = [
    (P.WAIT_SCHEDULING, 0, 0, 1), (P.PREPARE, 0, 1, 2), (P.FORWARD, 0, 2, 12),
    (P.WAIT_SCHEDULING, 1, 2, 4), (P.PREPARE, 1, 4, 5),  # its plan ...
    (P.WAIT_SCHEDULING, 1, 5, 31),  # ... and its tokens
    (P.FORWARD, 1, 32, 42),
]  # fmt: skip


def test_a_planned_iteration_waits_for_its_tokens():
    executor = [
        (P.DISPATCH, 0, 0, 1), (P.GATHER, 0, 1, 28), (P.DISPATCH, 1, 29, 30), (P.GATHER, 1, 30, 50),
    ]  # fmt: skip
    (stage,) = account(pipeline([PLANNED], executor, inflight=1), (2, 42))
    assert spent(stage) == {
        Cause.BUSY: 20,
        Cause.LATER_STAGE: 16,  # 12-28: sampling
        Cause.NOTHING: 1,
        Cause.SCHEDULER: 1,
        Cause.DISPATCHED: 1,  # 30-31
        Cause.STARTING: 1,
    }


def test_a_planned_iteration_enters_with_its_tokens_where_the_executors_file_is_missing():
    (stage,) = account(pipeline([PLANNED], inflight=1), (2, 42))
    assert spent(stage) == {Cause.BUSY: 20, Cause.NOTHING: 19, Cause.STARTING: 1}


def test_a_part_of_the_projection_waits_for_the_last_stage():
    """Two stages, each with half of the projection, one microbatch in flight after the other."""
    first = [(P.FORWARD, 0, 0, 10), (P.SEND, 0, 10, 11), (P.LOGITS, 0, 25, 32)]
    last = [(P.FORWARD, 0, 12, 20), (P.SEND, 0, 20, 24), (P.LOGITS, 0, 24, 32)]
    stage_0, stage_1 = account(pipeline([first, last], inflight=1))
    assert spent(stage_0) == {
        Cause.BUSY: 17,
        Cause.LATER_STAGE: 10,  # 10-20
        Cause.HIDDEN_STATES: 4,  # 20-24
        Cause.STARTING: 1,
    }
    assert spent(stage_1) == {
        Cause.BUSY: 16,
        Cause.EARLIER_STAGE: 10,
        Cause.HIDDEN_STATES: 1,
        Cause.STARTING: 1,
        Cause.SENDING: 4,
    }


def test_a_pass_amid_a_product_and_a_product_of_two():
    """Stage 0 multiplies for 0, runs 2 in between, then multiplies for 1 and 2 at once."""
    first = [
        (P.LOGITS, 0, 10, 14), (P.SEND, 0, 14, 15), (P.FORWARD, 2, 15, 20),
        (P.LOGITS, 0, 20, 23), (P.SEND, 0, 23, 24),
        (P.LOGITS, 1, 24, 28), (P.LOGITS, 2, 28, 32), (P.SEND, 1, 32, 33),
        (P.SEND, 2, 33, 34),
    ]  # fmt: skip
    trace = pipeline([first, [(P.FORWARD, 2, 20, 30)]], inflight=3)
    found = spent(account(trace, (10, 34))[0])
    assert found == {Cause.BUSY: 20, Cause.SENDING: 2, Cause.NOTHING: 2}
    products = whole(trace.of("stage")[0], P.LOGITS)
    assert (products["end_ns"] - products["start_ns"]).tolist() == [7, 4, 4]
    assert products["iteration"].tolist() == [0, 1, 2]
    assert len(whole(trace.of("stage")[0])) == 7


def test_time_without_requests_is_no_bubble():
    idle = [*EXECUTOR, (P.IDLE, 0, 0, 1), (P.IDLE, 0, 46, 57)]
    first, last = account(pipeline([STAGE_0, STAGE_1], idle, inflight=2))
    assert spent(first)[Cause.IDLE] == 11
    assert spent(first)[Cause.NOTHING] == 3  # 43-46
    assert Cause.IDLE not in spent(last)  # the device works, and the stage samples
    found = shares(first.by_kind)
    assert found.pop("idle") == 11 / 55
    assert sum(found.values()) == pytest.approx(1)
    assert found["busy"] == 30 / 44


def test_window_cuts_records():
    trace = pipeline([STAGE_0, STAGE_1], EXECUTOR, inflight=2)
    found = spent(account(trace, (5, 27))[0])
    assert sum(found.values()) == 22
    assert found == {
        Cause.BUSY: 8 + 10,
        Cause.SENDING: 1,
        Cause.PREPARING: 1,
        Cause.LATER_STAGE: 2,
    }


TIMES = st.integers(0, 40)


@st.composite
def timelines(draw):
    def rows(phases):
        found = []
        for _ in range(draw(st.integers(0, 8))):
            a, b = sorted((draw(TIMES), draw(TIMES)))
            found.append((draw(st.sampled_from(phases)), draw(st.integers(0, 4)), a, b))
        return found

    on_stage = [
        P.WAIT_SCHEDULING, P.PREPARE, P.WAIT_HIDDEN, P.FORWARD, P.FORWARD, P.SEND, P.LOGITS,
        P.SAMPLE,
    ]  # fmt: skip
    stages = [rows(on_stage) for _ in range(draw(st.integers(1, 3)))]
    stages[0].append((P.FORWARD, 0, 0, draw(st.integers(1, 40))))
    on_executor = [P.SCHEDULE, P.DISPATCH, P.DISPATCH, P.GATHER, P.UPDATE, P.IDLE]
    executor = draw(st.one_of(st.none(), st.just(0)))
    inflight = draw(st.integers(1, 3))
    return pipeline(stages, None if executor is None else rows(on_executor), inflight=inflight)


@pytest.mark.ci
@settings(max_examples=300, deadline=None)
@given(timelines())
def test_random_timelines_add_up_and_agree_with_the_definition(trace):
    start, end = trace.window()
    for stage in account(trace):
        assert sum(stage.by_cause) == sum(stage.by_kind) == end - start
        segments = stage.segments
        assert segments["start_ns"][0] == start
        assert segments["end_ns"][-1] == end
        assert (segments["end_ns"][:-1] == segments["start_ns"][1:]).all()
        causes = np.repeat(segments["cause"], segments["end_ns"] - segments["start_ns"])
        for t, cause in zip(range(start, end), causes, strict=True):
            assert Cause(cause) == naive.cause(trace, stage.index, t, end), (t, stage.index)


def test_ranks_of_a_stage_are_counted_separately():
    rows = [(P.FORWARD, i, 10 * i, 10 * i + 6) for i in range(4)]
    trace = Trace(
        tuple(process("stage", 0, rows, stages=1, inflight=1, rank=rank) for rank in range(2))
    )
    stages = account(trace)
    assert [stage.rank for stage in stages] == [0, 1]
    assert sum(total(stages)) == 2 * 36
