"""Where each stage's time went: busy, or one of four kinds of bubble, to the nanosecond.

The definitions, and a worked example, are in docs/tracing.md. In short: an instant at which the
device does the model's work is busy; every other instant belongs to what the *next* microbatch of
this stage was waiting for then. Each piece of time in which nothing changes has one cause, so that
the parts of a stage add up to the wall time exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.observe.phases import DEVICE_PHASES, Phase
from sipipe.tools.report.reader import ProcessTrace, Records, Trace

Array = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).min
"""A time before every other: for what is not known to have been waited for."""


class Intervals:
    """Half-open intervals [start, end); they may overlap or be empty. Both arrays are sorted on
    their own: an instant is in as many intervals as have started less those that have ended."""

    def __init__(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> None:
        """No interval may end before it starts."""
        self.starts: Array = np.sort(np.asarray(starts, np.int64))
        self.ends: Array = np.sort(np.asarray(ends, np.int64))

    @classmethod
    def of(cls, records: npt.NDArray[Any]) -> Intervals:
        return cls(records["start_ns"], records["end_ns"])

    def count(self, times: Array) -> Array:
        """Count the intervals that hold each instant."""
        begun = np.searchsorted(self.starts, times, side="right")
        return np.asarray(begun - np.searchsorted(self.ends, times, side="right"), np.int64)

    def covers(self, times: Array) -> npt.NDArray[np.bool_]:
        """Say for each instant if any interval holds it."""
        return self.count(times) > 0

    def merged(self) -> tuple[Array, Array]:
        """Starts and ends of the union, which are disjoint and do not touch."""
        edges = np.unique(np.concatenate([self.starts, self.ends]))
        change = np.diff(self.covers(edges), prepend=np.False_)
        # The union is left at the last edge, so changes come in pairs: in, out.
        return edges[change][::2], edges[change][1::2]


class ByIteration:
    """One value per iteration, looked up for many iterations at once."""

    def __init__(self, iterations: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Where an iteration has several values, the largest counts: of times, the latest."""
        keys = np.asarray(iterations, np.int64)
        array = np.asarray(values, np.int64)
        order = np.lexsort((array, keys))
        keys = keys[order]
        array = array[order]
        last = np.diff(keys, append=-1) != 0
        self.iterations: Array = keys[last]
        """Ascending."""
        self.values: Array = array[last]

    @classmethod
    def of(cls, records: npt.NDArray[Any], field: str) -> ByIteration:
        return cls(records["iteration"], records[field])

    def at(self, iterations: Array, missing: int = NEVER) -> Array:
        """The value of each iteration; ``missing`` where there is none."""
        if not len(self.iterations):
            return np.full(len(iterations), missing, np.int64)
        index = np.minimum(np.searchsorted(self.iterations, iterations), len(self.iterations) - 1)
        matches = self.iterations[index] == iterations
        return np.where(matches, self.values[index], missing)


PAUSE_NS = 20_000_000
"""Nothing in flight for this long is a pause of the service, not a slow iteration."""
_STILL = np.iinfo(np.int64).max
"""When an iteration leaves whose end was not recorded."""


class Pipeline:
    """Facts of the rest of the pipeline that a stage's accounting needs."""

    def __init__(self, trace: Trace) -> None:
        executor = trace.executor
        stages = trace.of("stage")
        drained = stages[-1].phase(*DEVICE_PHASES, Phase.SAMPLE)
        self.stages = {(p.header.index, p.header.rank): p for p in stages}
        """Stages by index and rank."""
        self.limit = trace.inflight
        if executor is not None and len(executor.phase(Phase.DISPATCH)):
            self.dispatched = ByIteration.of(executor.phase(Phase.DISPATCH), "end_ns")
            """When each iteration's scheduling output was out; empty without the executor's file."""
            gathered = executor.phase(Phase.GATHER)
            left = gathered if len(gathered) else drained
            at_work = executor.phase(Phase.SCHEDULE, Phase.DISPATCH, Phase.UPDATE)
            iterations = self.dispatched.iterations
            entered = self.dispatched.values
        else:
            self.dispatched = ByIteration([], [])
            left = drained
            at_work = drained[:0]
            began = stages[0].phase(Phase.PREPARE, *DEVICE_PHASES)  # sorted by start
            iterations, first = np.unique(began["iteration"].astype(np.int64), return_index=True)
            scheduled = ByIteration.of(stages[0].phase(Phase.WAIT_SCHEDULING), "end_ns")
            # A planned one is prepared before it enters, with its tokens.
            entered = np.maximum(began["start_ns"][first], scheduled.at(iterations, missing=0))
        self.left = ByIteration.of(left, "end_ns")
        """When each iteration's tokens were there."""
        self.at_work = Intervals.of(at_work)
        """When the scheduler or the executor worked."""
        self.idle = Intervals.of(executor.phase(Phase.IDLE) if executor else drained[:0])
        """When there was no request."""
        gone = np.maximum(self.left.at(iterations, missing=_STILL), entered)
        self.flying = Intervals(entered, gone)

    def pauses(self) -> Intervals:
        """When nothing was in flight for at least ``PAUSE_NS``."""
        entered, left = self.flying.merged()
        begins = left[:-1]
        ends = entered[1:]
        long = ends - begins >= PAUSE_NS
        return Intervals(begins[long], ends[long])


BUBBLES = ("load_imbalance", "intra_stage", "inter_stage", "unscheduled")
WORKING = ("busy", *BUBBLES)
"""Kinds that an instant of a stage can have while there are requests."""
KINDS = (*WORKING, "idle")
"""All kinds of an instant; a kind's number is its place here."""


class Cause(IntEnum):
    """Why a stage's device was in the state it was in: number, kind, and the report's words."""

    kind: str
    text: str

    def __new__(cls, number: int, kind: str, text: str) -> Cause:
        cause = int.__new__(cls, number)
        cause._value_ = number
        cause.kind = kind
        cause.text = text
        return cause

    BUSY = 0, "busy", "device at work"
    SAMPLING = 1, "load_imbalance", "sampling on the stage"
    EARLIER_STAGE = 2, "load_imbalance", "an earlier stage is longer"
    LATER_STAGE = 3, "load_imbalance", "a later stage or sampling is longer"
    PREPARING = 4, "intra_stage", "preparing inputs"
    STARTING = 5, "intra_stage", "starting the forward"
    HIDDEN_STATES = 6, "inter_stage", "hidden states under way"
    SENDING = 7, "inter_stage", "sender occupied"
    SCHEDULER = 8, "unscheduled", "scheduler at work"
    DISPATCHED = 9, "unscheduled", "scheduling output under way"
    FILLING = 10, "unscheduled", "too few microbatches"
    NOTHING = 11, "unscheduled", "nothing to schedule"
    IDLE = 12, "idle", "no requests"


KIND_OF = np.array([KINDS.index(cause.kind) for cause in Cause], np.uint8)
"""Number of each cause's kind."""
SEGMENT = np.dtype(
    [("start_ns", "<i8"), ("end_ns", "<i8"), ("iteration", "<i8"), ("cause", "u1"), ("slot", "<u2")]
)
"""A stretch of a stage's time; ``iteration`` is the one that runs or is waited for, -1 for none."""


@dataclass(frozen=True, slots=True)
class StageAccount:
    """One stage process, from the first to the last instant of the window."""

    index: int
    rank: int
    segments: npt.NDArray[Any]
    """dtype ``SEGMENT``: a partition of the window."""
    by_cause: tuple[int, ...]
    """Nanoseconds by ``Cause``; they add up to the wall time."""

    @property
    def by_kind(self) -> tuple[int, ...]:
        """Nanoseconds by kind, in the order of ``KINDS``."""
        by_cause = list(zip(Cause, self.by_cause, strict=True))
        return tuple(sum(ns for cause, ns in by_cause if cause.kind == kind) for kind in KINDS)


def shares(spent: Sequence[int]) -> dict[str, float]:
    """Shares of nanoseconds by kind: of the time with requests, and for ``idle`` of all."""
    by_kind = dict(zip(KINDS, spent, strict=True))
    idle = spent[-1]
    working = {kind: by_kind[kind] / max(1, sum(spent) - idle) for kind in WORKING}
    return working | {"idle": idle / sum(spent)}


def total(stages: Iterable[StageAccount]) -> tuple[int, ...]:
    """Nanoseconds by kind over all stages; they add up to wall time × stage processes."""
    return tuple(sum(column) for column in zip(*(s.by_kind for s in stages), strict=True))


def account(trace: Trace, window: tuple[int, int] | None = None) -> tuple[StageAccount, ...]:
    """Account for every stage's time, by index and rank; ``window``: in ns (None: the trace's)."""
    start, end = window or trace.window()
    pipeline = Pipeline(trace)
    return tuple(_stage(process, pipeline, start, end) for process in pipeline.stages.values())


def _stage(process: ProcessTrace, pipeline: Pipeline, start: int, end: int) -> StageAccount:
    index = process.header.index
    rank = process.header.rank
    stages = pipeline.stages
    device = process.phase(*DEVICE_PHASES)
    busy, sampling, sending, preparing = unions = [
        Intervals.of(process.phase(*phases))
        for phases in (DEVICE_PHASES, (Phase.SAMPLE,), (Phase.SEND,), (Phase.PREPARE,))
    ]
    awaited = _Waits(process.phase(Phase.WAIT_SCHEDULING))
    hidden = _Waits(process.phase(Phase.WAIT_HIDDEN))
    made, sent = _handed_on(stages.get((index - 1, rank)) or stages.get((index - 1, 0)))
    # Where every stage has a part of the output projection, it waits for the last one's rows.
    last = max(stages)
    final_made, final_sent = _handed_on(stages[last] if index < last[0] else None)

    # Every instant at which one of the answers below may change.
    unions += [pipeline.flying, pipeline.at_work, pipeline.idle]
    marks = [np.array([start, end]), pipeline.dispatched.values]
    marks += [edge for union in unions for edge in (union.starts, union.ends)]
    waits = (awaited.begun, awaited.ended, hidden.begun, hidden.ended)
    marks += [times.values for times in (*waits, made, sent, final_made, final_sent)]
    edges = np.unique(np.concatenate(marks))
    edges = edges[(edges >= start) & (edges <= end)]
    at = edges[:-1]

    following = np.searchsorted(device["start_ns"], at, side="right")
    coming = np.append(device["iteration"].astype(np.int64), -1)  # -1: nothing follows
    iterations = coming[following]

    full = pipeline.flying.count(at) >= pipeline.limit
    undispatched = at < pipeline.dispatched.at(iterations)
    unknown = iterations < 0
    on_its_way = awaited.covers(iterations, at)
    if len(pipeline.dispatched.values):
        undispatched |= unknown
    else:  # without the executor's record, the stage's own wait says when nothing was scheduled
        undispatched = unknown | on_its_way
        on_its_way = np.zeros(len(at), bool)
    part = np.append(device["phase"] == Phase.LOGITS, False)[following] & (index < last[0])
    unfinished = at < np.where(part, final_made.at(iterations), made.at(iterations))
    under_way = at < np.where(part, final_sent.at(iterations), sent.at(iterations))
    under_way |= hidden.covers(iterations, at)

    # The first that holds decides.
    rules: list[tuple[npt.NDArray[np.bool_], Cause]] = [
        (busy.covers(at), Cause.BUSY),
        (sampling.covers(at), Cause.SAMPLING),
        (pipeline.idle.covers(at), Cause.IDLE),
        (undispatched & full, Cause.LATER_STAGE),
        (undispatched & pipeline.at_work.covers(at), Cause.SCHEDULER),
        (undispatched, Cause.NOTHING),
        (on_its_way, Cause.DISPATCHED),
        (unfinished & full & part, Cause.LATER_STAGE),
        (unfinished & full, Cause.EARLIER_STAGE),
        (unfinished, Cause.FILLING),
        (under_way, Cause.HIDDEN_STATES),
        (sending.covers(at), Cause.SENDING),
        (preparing.covers(at), Cause.PREPARING),
    ]
    cause = np.select(
        [holds for holds, _ in rules],
        [np.uint8(cause) for _, cause in rules],
        default=np.uint8(Cause.STARTING),
    )
    # In a busy piece the device runs the work that started last (index -1, never used, is -1).
    iterations = np.where(cause == Cause.BUSY, coming[following - 1], iterations)
    segments = _merge(edges, cause, iterations, ByIteration.of(process.records, "slot"))
    sums = np.zeros(len(Cause), np.int64)
    np.add.at(sums, segments["cause"], segments["end_ns"] - segments["start_ns"])
    return StageAccount(index, rank, segments, tuple(sums.tolist()))


class _Waits:
    """The waits of a stage for something of each iteration."""

    def __init__(self, records: Records) -> None:
        self.begun = ByIteration.of(records, "start_ns")
        self.ended = ByIteration.of(records, "end_ns")

    def covers(self, iterations: Array, times: Array) -> npt.NDArray[np.bool_]:
        """Say for each instant if it lies in the wait for the iteration with the same index."""
        begun = self.begun.at(iterations)
        ended = self.ended.at(iterations)
        return np.asarray((times >= begun) & (times < ended))


def _handed_on(before: ProcessTrace | None) -> tuple[ByIteration, ByIteration]:
    """When the stage before had finished each iteration, and when it had sent it."""
    if before is None:
        return ByIteration([], []), ByIteration([], [])
    made = ByIteration.of(before.phase(Phase.FORWARD), "end_ns")
    sent = ByIteration.of(before.phase(Phase.SEND), "end_ns")
    at_least = np.maximum(sent.at(made.iterations, missing=NEVER), made.values)
    return made, ByIteration(made.iterations, at_least)


def _merge(
    edges: Array, cause: npt.NDArray[Any], iterations: Array, slots: ByIteration
) -> npt.NDArray[Any]:
    """Pieces, which lie between edges, to segments: equal neighbours become one."""
    fresh = np.ones(len(cause), bool)
    fresh[1:] = (cause[1:] != cause[:-1]) | (iterations[1:] != iterations[:-1])
    first = np.flatnonzero(fresh)
    segments = np.zeros(len(first), SEGMENT)
    segments["start_ns"] = edges[first]
    segments["end_ns"] = edges[np.append(first[1:], len(cause))]
    segments["cause"] = cause[first]
    segments["iteration"] = iterations[first]
    segments["slot"] = slots.at(iterations[first], missing=0)
    return segments
