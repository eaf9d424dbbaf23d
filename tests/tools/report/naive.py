"""The bubble accounting as docs/tracing.md defines it, one instant at a time: slow and obvious."""

from __future__ import annotations

from sipipe.observe.phases import DEVICE_PHASES, Phase
from sipipe.tools.report.accounting import Cause
from sipipe.tools.report.reader import Trace


def rows(process, *phases):
    if process is None:
        return []
    return [r for r in process.records.tolist() if r[5] in phases]


def inside(t, records):
    return any(start <= t < end for start, end, *_ in records)


def latest(records, iteration, field):
    return max((r[field] for r in records if r[2] == iteration), default=None)


def cause(trace: Trace, index: int, t: int, end: int) -> Cause:
    """Why the device of a stage was in the state it was in at instant t."""
    stage = next(p for p in trace.of("stage") if p.header.index == index)
    before = next((p for p in trace.of("stage") if p.header.index == index - 1), None)
    device = rows(stage, *DEVICE_PHASES)
    if inside(t, device):
        return Cause.BUSY
    if inside(t, rows(stage, Phase.SAMPLE)):
        return Cause.SAMPLING
    if inside(t, rows(trace.executor, Phase.IDLE)):
        return Cause.IDLE
    following = [r for r in device if r[0] > t]
    i = following[0][2] if following else None
    dispatches = rows(trace.executor, Phase.DISPATCH)
    full = in_flight(trace, t, end) >= trace.inflight
    waits = [r for r in rows(stage, Phase.WAIT_SCHEDULING) if r[2] == i]
    waiting = (
        bool(waits)
        and latest(waits, i, 0) <= t < latest(waits, i, 1)  # the last begun, the last ended
    )
    if dispatches:
        dispatched = latest(dispatches, i, 1)
        nothing = i is None or (dispatched is not None and t < dispatched)
    else:
        nothing, waiting = i is None or waiting, False
    if nothing:
        if full:
            return Cause.LATER_STAGE
        if dispatches and inside(
            t, rows(trace.executor, Phase.SCHEDULE, Phase.DISPATCH, Phase.UPDATE)
        ):
            return Cause.SCHEDULER
        return Cause.NOTHING
    if waiting:
        return Cause.DISPATCHED
    last = trace.of("stage")[-1]
    waits_for_last = following[0][5] == Phase.LOGITS and index < last.header.index
    before = last if waits_for_last else before
    made = latest(rows(before, Phase.FORWARD), i, 1)
    if made is not None and t < made:
        if waits_for_last and full:
            return Cause.LATER_STAGE
        return Cause.EARLIER_STAGE if full else Cause.FILLING
    sent = latest(rows(before, Phase.SEND), i, 1) if made is not None else None
    hidden = [r for r in rows(stage, Phase.WAIT_HIDDEN) if r[2] == i]
    if (sent is not None and t < sent) or (
        hidden and latest(hidden, i, 0) <= t < latest(hidden, i, 1)
    ):
        return Cause.HIDDEN_STATES
    if inside(t, rows(stage, Phase.SEND)):
        return Cause.SENDING
    if inside(t, rows(stage, Phase.PREPARE)):
        return Cause.PREPARING
    return Cause.STARTING


def in_flight(trace: Trace, t: int, end: int) -> int:
    last = trace.of("stage")[-1]
    drained = rows(last, *DEVICE_PHASES, Phase.SAMPLE)
    dispatches = rows(trace.executor, Phase.DISPATCH)
    if dispatches:
        leaving = rows(trace.executor, Phase.GATHER) or drained
        entering = {i: latest(dispatches, i, 1) for _, _, i, *_ in dispatches}
    else:
        leaving = drained
        began = rows(trace.of("stage")[0], Phase.PREPARE, *DEVICE_PHASES)
        told = rows(trace.of("stage")[0], Phase.WAIT_SCHEDULING)
        entering = {
            i: max(min(r[0] for r in began if r[2] == i), latest(told, i, 1) or 0)
            for _, _, i, *_ in began
        }
    count = 0
    for i, entered in entering.items():
        left = latest(leaving, i, 1)
        left = max(end if left is None else left, entered)
        count += entered <= t < left
    return count
