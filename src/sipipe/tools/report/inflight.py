"""What is in flight when: which iterations the executor has dispatched and not yet gathered."""

from __future__ import annotations

import numpy as np

from sipipe.observe.phases import DEVICE_PHASES, Phase
from sipipe.tools.report.intervals import Array, ByIteration, Intervals
from sipipe.tools.report.reader import Trace

PAUSE_NS = 20_000_000
"""Nothing in flight for this long is a pause of the service, not a slow iteration."""
_STILL = np.iinfo(np.int64).max
"""When an iteration leaves whose end was not recorded."""


class Pipeline:
    """What a stage must know of the rest of the pipeline."""

    def __init__(self, trace: Trace) -> None:
        executor, stages = trace.executor, trace.of("stage")
        drained = stages[-1].phase(*DEVICE_PHASES, Phase.SAMPLE, Phase.HANDOVER)
        self.limit = trace.inflight
        if executor is not None and len(executor.phase(Phase.DISPATCH)):
            self.dispatched = ByIteration.of(executor.phase(Phase.DISPATCH), "end_ns")
            """When each iteration's scheduling output was out; empty without the executor's file."""
            gathered = executor.phase(Phase.GATHER)
            left = gathered if len(gathered) else drained
            at_work = executor.phase(Phase.SCHEDULE, Phase.DISPATCH, Phase.UPDATE)
            iterations, entered = self.dispatched.iterations, self.dispatched.values
        else:
            self.dispatched = ByIteration([], [])
            left, at_work = drained, drained[:0]
            began = stages[0].phase(Phase.PREPARE, *DEVICE_PHASES)  # sorted by start
            iterations, first = np.unique(began["iteration"].astype(np.int64), return_index=True)
            entered = began["start_ns"][first]
        self.left = ByIteration.of(left, "end_ns")
        """When each iteration's tokens were there."""
        self.at_work = Intervals.of(at_work)
        """When the scheduler or the executor worked."""
        gone = np.maximum(self.left.at(iterations, missing=_STILL), entered)
        self.flying = Intervals(entered, gone)
        """The iterations in flight."""

    def pauses(self) -> Intervals:
        """When nothing was in flight for at least ``PAUSE_NS``."""
        entered, left = self.flying.merged()
        begins, ends = left[:-1], entered[1:]
        long = ends - begins >= PAUSE_NS
        return Intervals(begins[long], ends[long])

    @property
    def changes(self) -> list[Array]:
        """All instants at which an answer of this object may change."""
        return [
            self.flying.starts, self.flying.ends, self.at_work.starts, self.at_work.ends,
            self.dispatched.values,
        ]  # fmt: skip
