"""The machine-readable report: one dictionary per run."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from sipipe.observe.format import TraceError
from sipipe.observe.phases import Phase
from sipipe.tools.report import statistics
from sipipe.tools.report.accounting import KINDS, Cause, Pipeline, account, shares, total
from sipipe.tools.report.reader import Trace

_UNEVEN = (
    'compare the stages below. If one is busier, cut the layers by --layers: with "auto", the engine\'s '
    "log names a cut that is quicker for what it has served. If samplers are late, raise --samplers."
)
_FAR = (
    "look at the start's log for the transport of the links (docs/transfer.md), and place stages that "
    "follow one another on devices or hosts that are close."
)
_FEW = (
    "send more requests at once. If many wait already, raise --max-num-seqs or --inflight; with few "
    "requests, fewer stages are quicker (--pp)."
)
_HOST = "give each stage a core that nothing else runs on (cores in docs/configuration.md)."
NEXT = {
    "load_imbalance": ("one stage, or the sampling, takes longer than the others", _UNEVEN),
    "intra_stage": ("stages wait for their process to prepare inputs or to start the model", _HOST),
    "inter_stage": ("hidden states take long from stage to stage", _FAR),
    "unscheduled": ("there are too few microbatches to fill the pipeline", _FEW),
}
"""Meaning of a kind of bubble, and advice, by the kind."""
SCHEDULING = (
    "the scheduler, or the way of its output to the stages, takes long",
    "give the scheduler a core of its own (cores in docs/configuration.md), or take fewer stages.",
)
"""Meaning and advice for unscheduled time in which the scheduler was at work."""
LITTLE = 0.05
"""Share of a kind of bubble below which there is nothing worth changing."""


def next_step(share: Mapping[str, float], scheduling: float = 0.0) -> str:
    """One line on the largest kind of bubble, and what to do about it.

    Args:
        share: that of each kind in the time with requests.
        scheduling: part of the unscheduled time in which the scheduler was at work.
    """
    kind = max(NEXT, key=lambda name: share[name])
    busy = f"The devices are busy {share['busy']:.0%} of the time with requests."
    if share[kind] < LITTLE:
        return f"{busy} No kind of bubble takes {LITTLE:.0%} of it: only faster stages help."
    at_work = kind == "unscheduled" and scheduling > 0.5
    reason, advice = SCHEDULING if at_work else NEXT[kind]
    name = kind.replace("_", "-") if kind != "load_imbalance" else "load imbalance"
    return (
        f"{busy} They lose most to {name} ({share[kind]:.0%}): {reason}. "
        f"{advice[0].upper()}{advice[1:]}"
    )


class Run:
    """A trace with its account, within a window."""

    def __init__(self, trace: Trace, begin_s: float | None = None, end_s: float | None = None):
        """Seconds from the start of the trace bound the window; TraceError: nothing is in it."""
        start, end = trace.window()
        self.window = (
            start if begin_s is None else start + round(begin_s * 1e9),
            end if end_s is None else min(end, start + round(end_s * 1e9)),
        )
        self.wall_ns = self.window[1] - self.window[0]
        if self.wall_ns <= 0:
            raise TraceError(
                f"{trace.directory}: nothing between --from and --to; the trace is "
                f"{(end - start) / 1e9:.3f} s long"
            )
        self.trace = trace
        self.label = trace.label
        self.account = account(trace, self.window)
        pipeline = Pipeline(trace)
        self._ends = pipeline.left.values
        self.iteration_ms = statistics.steps(self._ends, pipeline.pauses(), self.window)
        self.tpot_ms = statistics.tpot(trace, pipeline, self.window)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Everything but the curves; times in the units that the names end with."""
        trace = self.trace
        window = self.window
        wall = self.wall_ns
        tokens = statistics.tokens_drawn(trace, window)
        # That of each stage, but for the end of what it did for the last request.
        idle = max(stage.by_cause[Cause.IDLE] for stage in self.account)
        share = shares(total(self.account))
        causes = np.sum([stage.by_cause for stage in self.account], axis=0)
        unscheduled = sum(causes[cause] for cause in Cause if cause.kind == "unscheduled")
        scheduling = (causes[Cause.SCHEDULER] + causes[Cause.DISPATCHED]) / max(1, unscheduled)
        return {
            "directory": trace.directory,
            "label": self.label,
            "model": next((p.header.model for p in trace.processes if p.header.model), ""),
            "stages": trace.stages,
            "inflight": trace.inflight,
            "samplers": len({process.header.index for process in trace.of("sampler")}),
            "hosts": sorted({p.header.host for p in trace.processes}),
            "processes": len(trace.processes),
            "wall_s": wall / 1e9,
            "iterations": int(((self._ends > window[0]) & (self._ends <= window[1])).sum()),
            "tokens": tokens,
            "idle_s": idle / 1e9,
            "tokens_per_s": tokens / (max(1, wall - idle) / 1e9),
            "share": share,
            "next": next_step(share, scheduling),
            "iteration_ms": statistics.quantiles(self.iteration_ms),
            "tpot_ms": statistics.quantiles(self.tpot_ms),
            "prefill_efficiency": statistics.prefill_efficiency(trace, window),
            "drafts": statistics.drafts(trace, window),
            "sampler_ms_per_sequence": statistics.sampler_ms_per_sequence(trace, window),
            "stage_table": [self._stage(number) for number in range(len(self.account))],
            "phase_table": statistics.phase_table(trace, window),
            "warnings": list(trace.warnings),
        }

    def _stage(self, number: int) -> dict[str, Any]:
        stage = self.account[number]
        process = self.trace.of("stage")[number]
        return {
            "stage": stage.index,
            "rank": stage.rank,
            "host": process.header.host,
            "iterations": len(process.phase(Phase.FORWARD, window=self.window)),
            "wall_ns": self.wall_ns,
            "ns": dict(zip(KINDS, stage.by_kind, strict=True)),
            "share": shares(stage.by_kind),
            "cause_ns": {
                cause.name.lower(): stage.by_cause[cause]
                for cause in Cause
                if stage.by_cause[cause]
            },
        }

    def busiest(self, iterations: int = 12) -> tuple[float, float]:
        """The part in which the devices are busiest, as long as so many iterations, in seconds."""
        served = self.wall_ns - self.summary["idle_s"] * 1e9
        seconds_each = served / max(iterations, self.summary["iterations"])
        span = max(1, min(self.wall_ns, round(iterations * seconds_each)))
        begin = statistics.busiest(self.trace, self.window, span) - self.window[0]
        return begin / 1e9, (begin + span) / 1e9
