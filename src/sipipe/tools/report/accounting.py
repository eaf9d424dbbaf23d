"""Where each stage's time went: busy, or one of four kinds of bubble, to the nanosecond.

The definitions, and a worked example, are in docs/tracing.md. In short: an instant at which the
device does the model's work is busy; every other instant belongs to what the *next* microbatch of
this stage was waiting for then. The paper names the three kinds (section "Observations of PP
Inefficiencies"); the fourth is time in which there was nothing to run.

All instants of a stage between which nothing changes form a piece; each piece gets one cause, so
that the parts of a stage add up to the wall time exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.observe.online import BUBBLES
from sipipe.observe.phases import DEVICE_PHASES, Phase
from sipipe.tools.report.inflight import Pipeline
from sipipe.tools.report.intervals import NEVER, Array, ByIteration, Union
from sipipe.tools.report.reader import ProcessTrace, Records, Trace

KINDS = ("busy", *BUBBLES)
"""What an instant of a stage can be; a kind's number is its place here."""


class Cause(IntEnum):
    """Why the device was in the state it was in, at an instant."""

    BUSY = 0
    SAMPLING = 1
    """The stage itself samples."""
    HANDOVER = 2
    """The stage hands its logits to the samplers."""
    EARLIER_STAGE = 3
    """The pipeline is full and an earlier stage has not finished the next microbatch."""
    LATER_STAGE = 4
    """The pipeline is full: nothing new until a later stage or the sampling is through."""
    PREPARING = 5
    """The inputs of the next microbatch are being prepared."""
    STARTING = 6
    """Everything is there, and the device has not started."""
    HIDDEN_STATES = 7
    """The stage before has finished, its hidden states are not here."""
    SENDING = 8
    """The stage is occupied with sending the microbatch before."""
    SCHEDULER = 9
    """The pipeline has room and the scheduler or the executor is at work."""
    DISPATCHED = 10
    """The scheduling output is on its way from the executor."""
    FILLING = 11
    """The pipeline has room, and an earlier stage has not finished the only next microbatch."""
    NO_REQUESTS = 12
    """The pipeline has room and nothing is scheduled."""


KIND_OF = np.array([0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4], np.uint8)
"""Kind of each cause."""
CAUSE_TEXT = (
    "device at work",
    "sampling on the stage",
    "handing over logits",
    "an earlier stage is longer",
    "a later stage or sampling is longer",
    "preparing inputs",
    "starting the forward",
    "hidden states under way",
    "sender occupied",
    "scheduler at work",
    "scheduling output under way",
    "too few microbatches",
    "nothing to schedule",
)
SEGMENT = np.dtype(
    [("start_ns", "<i8"), ("end_ns", "<i8"), ("iteration", "<i8"), ("cause", "u1"), ("slot", "<u2")]
)
"""A stretch of a stage's time; ``iteration`` is the one that runs or is waited for, -1 for none."""


@dataclass(frozen=True, slots=True)
class StageAccount:
    """One stage process, from the first to the last instant of the trace."""

    index: int
    rank: int
    segments: npt.NDArray[Any]
    """dtype ``SEGMENT``: a partition of the window."""
    by_cause: tuple[int, ...]
    """Nanoseconds by ``Cause``; they add up to the wall time."""

    @property
    def by_kind(self) -> tuple[int, ...]:
        """Nanoseconds by kind, in the order of ``KINDS``."""
        sums = [0] * len(KINDS)
        for cause, spent in enumerate(self.by_cause):
            sums[KIND_OF[cause]] += spent
        return tuple(sums)


@dataclass(frozen=True, slots=True)
class Account:
    """The bubbles of a run."""

    start_ns: int
    end_ns: int
    stages: tuple[StageAccount, ...]
    """By index and rank."""

    @property
    def wall_ns(self) -> int:
        """Length of the window: what the parts of each stage add up to."""
        return self.end_ns - self.start_ns

    def total(self) -> tuple[int, ...]:
        """Nanoseconds by kind over all stages; they add up to wall time × stage processes."""
        return tuple(sum(column) for column in zip(*(s.by_kind for s in self.stages), strict=True))


def account(trace: Trace, window: tuple[int, int] | None = None) -> Account:
    """Account for the time of every stage.

    Args:
        trace: what was recorded.
        window: first and last instant in ns; without it, ``trace.window()``.
    """
    start, end = window or trace.window()
    pipeline = Pipeline(trace, end)
    stages = {(p.header.index, p.header.rank): p for p in trace.of("stage")}
    return Account(
        start, end, tuple(_stage(p, stages, pipeline, start, end) for p in trace.of("stage"))
    )


def _union(process: ProcessTrace, *phases: int) -> Union:
    records = process.phase(*phases)
    return Union(records["start_ns"], records["end_ns"])


def _stage(
    process: ProcessTrace,
    stages: Mapping[tuple[int, int], ProcessTrace],
    pipeline: Pipeline,
    start: int,
    end: int,
) -> StageAccount:
    index, rank = process.header.index, process.header.rank
    device = process.phase(*DEVICE_PHASES)
    busy = Union(device["start_ns"], device["end_ns"])
    sampling = _union(process, Phase.SAMPLE)
    handover = _union(process, Phase.HANDOVER)
    sending, preparing = _union(process, Phase.SEND), _union(process, Phase.PREPARE)
    awaited = _Waits(process.phase(Phase.WAIT_SCHEDULING))
    hidden = _Waits(process.phase(Phase.WAIT_HIDDEN))
    before = stages.get((index - 1, rank)) or stages.get((index - 1, 0))
    made, sent = _handed_on(before)

    marks = [np.array([start, end]), device["start_ns"], device["end_ns"], *pipeline.changes]
    for union in (sampling, handover, sending, preparing):
        marks += [union.starts, union.ends]
    for times in (awaited.begun, awaited.ended, hidden.begun, hidden.ended):
        marks.append(times.times)
    marks += [pipeline.dispatched.times, made.times, sent.times]
    edges = np.unique(np.concatenate(marks))
    edges = edges[(edges >= start) & (edges <= end)]
    at = edges[:-1]

    following = np.searchsorted(device["start_ns"], at, side="right")
    coming = np.append(device["iteration"].astype(np.int64), -1)  # -1: nothing follows
    iterations = coming[following]

    full = pipeline.full(at)
    undispatched = at < pipeline.dispatched.at(iterations)
    unknown = iterations < 0
    on_its_way = awaited.covers(iterations, at)
    if len(pipeline.dispatched):
        undispatched |= unknown
    else:  # without the executor's record, the stage's own wait says when nothing was scheduled
        undispatched, on_its_way = unknown | on_its_way, np.zeros(len(at), bool)
    unfinished = at < made.at(iterations)
    under_way = (at < sent.at(iterations)) | hidden.covers(iterations, at)

    # The first that holds decides.
    rules: list[tuple[npt.NDArray[np.bool_], Cause]] = [
        (busy.covers(at), Cause.BUSY),
        (sampling.covers(at), Cause.SAMPLING),
        (handover.covers(at), Cause.HANDOVER),
        (undispatched & full, Cause.LATER_STAGE),
        (undispatched & pipeline.at_work.covers(at), Cause.SCHEDULER),
        (undispatched, Cause.NO_REQUESTS),
        (on_its_way, Cause.DISPATCHED),
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
    segments = _merge(at, edges, cause, iterations, _slots(process.records))
    spent = segments["end_ns"] - segments["start_ns"]
    sums = [int(spent[segments["cause"] == number].sum()) for number in range(len(Cause))]
    return StageAccount(index, rank, segments, tuple(sums))


class _Waits:
    """The waits of a stage for something of each iteration."""

    def __init__(self, records: Records) -> None:
        self.begun = ByIteration.of(records, "start_ns")
        self.ended = ByIteration.of(records, "end_ns")

    def covers(self, iterations: Array, times: Array) -> npt.NDArray[np.bool_]:
        """Whether each instant lies in the wait for the iteration beside it."""
        begun, ended = self.begun.at(iterations), self.ended.at(iterations)
        return np.asarray((times >= begun) & (times < ended))


def _handed_on(before: ProcessTrace | None) -> tuple[ByIteration, ByIteration]:
    """When the stage before had finished each iteration, and when it had sent it."""
    if before is None:
        return ByIteration([], []), ByIteration([], [])
    made = ByIteration.of(before.phase(Phase.FORWARD), "end_ns")
    sent = ByIteration.of(before.phase(Phase.SEND), "end_ns")
    at_least = np.maximum(sent.at(made.iterations, missing=NEVER), made.times)
    return made, ByIteration(made.iterations, at_least)


def _slots(records: Records) -> ByIteration:
    return ByIteration(records["iteration"], records["slot"])


def _merge(
    at: Array, edges: Array, cause: npt.NDArray[Any], iterations: Array, slots: ByIteration
) -> npt.NDArray[Any]:
    """Pieces to segments: neighbours of the same cause and iteration become one."""
    fresh = np.ones(len(at), bool)
    if len(at):
        fresh[1:] = (cause[1:] != cause[:-1]) | (iterations[1:] != iterations[:-1])
    first = np.flatnonzero(fresh)
    segments = np.zeros(len(first), SEGMENT)
    segments["start_ns"] = at[first]
    if len(first):
        segments["end_ns"] = np.append(at[first[1:]], edges[-1])
    segments["cause"] = cause[first]
    segments["iteration"] = iterations[first]
    segments["slot"] = slots.at(iterations[first], missing=0)
    return segments
