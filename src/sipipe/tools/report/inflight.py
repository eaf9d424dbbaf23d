"""What is in flight when: which iterations the executor has dispatched and not yet gathered."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sipipe.observe.phases import DEVICE_PHASES, Phase
from sipipe.tools.report.intervals import Array, ByIteration, Union
from sipipe.tools.report.reader import Trace

PAUSE_NS = 20_000_000
"""Nothing in flight for this long is a pause of the service, not a slow iteration."""


class Pipeline:
    """What a stage must know of the rest: what is in flight when, what the executor does when."""

    def __init__(self, trace: Trace, end: int) -> None:
        executor = trace.executor
        self.limit = trace.inflight
        if executor is not None and len(executor.phase(Phase.DISPATCH)):
            self.dispatched = ByIteration.of(executor.phase(Phase.DISPATCH), "end_ns")
            self.entered = self.dispatched
            gathered = executor.phase(Phase.GATHER)
            self.left = ByIteration.of(gathered, "end_ns") if len(gathered) else _drained(trace)
            busy = executor.phase(Phase.SCHEDULE, Phase.DISPATCH, Phase.UPDATE)
        else:
            first = trace.of("stage")[0]
            began = first.phase(Phase.PREPARE, *DEVICE_PHASES)[::-1]
            # ByIteration keeps the latest: of the negated starts, that is the earliest.
            earliest = ByIteration(began["iteration"], -began["start_ns"])
            self.dispatched = ByIteration([], [])
            self.entered = ByIteration(earliest.iterations, -earliest.times)
            self.left = _drained(trace)
            busy = first.records[:0]
        self.at_work = Union(busy["start_ns"], busy["end_ns"])
        gone = np.maximum(self.left.at(self.entered.iterations, missing=end), self.entered.times)
        self._entered, self._left = np.sort(self.entered.times), np.sort(gone)

    @property
    def changes(self) -> list[Array]:
        """All instants at which an answer of this object may change."""
        return [self._entered, self._left, self.at_work.starts, self.at_work.ends]

    def full(self, times: Array) -> npt.NDArray[np.bool_]:
        """Whether as many microbatches are in flight as may be."""
        entered = np.searchsorted(self._entered, times, side="right")
        left = np.searchsorted(self._left, times, side="right")
        return np.asarray(entered - left >= self.limit)

    def pauses(self) -> Union:
        """When nothing was in flight for at least ``PAUSE_NS``."""
        times = np.concatenate([self._entered, self._left])
        steps = np.repeat([1, -1], [len(self._entered), len(self._left)])
        order = np.argsort(times, kind="stable")
        times, flying = times[order], np.cumsum(steps[order])
        idle = np.flatnonzero(flying[:-1] <= 0)
        begins, ends = times[idle], times[idle + 1]
        long = ends - begins >= PAUSE_NS
        return Union(begins[long], ends[long])


def _drained(trace: Trace) -> ByIteration:
    """When the last stage was through with each iteration: without the executor's word, the end."""
    last = trace.of("stage")[-1]
    return ByIteration.of(last.phase(*DEVICE_PHASES, Phase.SAMPLE, Phase.HANDOVER), "end_ns")
