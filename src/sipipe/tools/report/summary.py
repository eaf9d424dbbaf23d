"""The machine-readable report: one dictionary per run, and the bubbles as rows."""

from __future__ import annotations

from typing import Any

from sipipe.observe.format import TraceError
from sipipe.observe.phases import Phase
from sipipe.tools.report import statistics
from sipipe.tools.report.accounting import CAUSE_TEXT, KIND_OF, KINDS, Account, Cause, account
from sipipe.tools.report.inflight import Pipeline
from sipipe.tools.report.reader import Trace


class Run:
    """A trace with its account, within a window."""

    def __init__(self, trace: Trace, begin_s: float | None = None, end_s: float | None = None):
        """Seconds from the start of the trace bound the window; None for its ends.

        Raises:
            TraceError: there is nothing in the window.
        """
        start, end = trace.window()
        self.window = (
            start if begin_s is None else start + round(begin_s * 1e9),
            end if end_s is None else min(end, start + round(end_s * 1e9)),
        )
        if self.window[0] >= self.window[1]:
            raise TraceError(
                f"{trace.directory}: nothing between --from and --to; the trace is "
                f"{(end - start) / 1e9:.3f} s long"
            )
        self.trace = trace
        self.account: Account = account(trace, self.window)
        self.pipeline = Pipeline(trace, end)
        self.iteration_ms = statistics.iteration_times(self.pipeline, self.window)
        self.tpot_ms = statistics.tpot(trace, self.pipeline, self.window)
        self._summary: dict[str, Any] | None = None

    def summary(self) -> dict[str, Any]:
        """Everything but the curves; times in the units that the names end with."""
        if self._summary is None:
            self._summary = self._summarize()
        return self._summary

    def _summarize(self) -> dict[str, Any]:
        trace, wall = self.trace, self.account.wall_ns
        total = self.account.total()
        tokens = statistics.tokens_drawn(trace, self.window)
        return {
            "directory": trace.directory,
            "label": trace.label,
            "model": next((p.header.model for p in trace.processes if p.header.model), ""),
            "stages": trace.stages,
            "inflight": trace.inflight,
            "samplers": len(trace.of("sampler")),
            "hosts": sorted({p.header.host for p in trace.processes}),
            "processes": len(trace.processes),
            "wall_s": wall / 1e9,
            "iterations": self._iterations(),
            "tokens": tokens,
            "tokens_per_s": tokens / (wall / 1e9),
            "share": {
                kind: spent / (wall * len(self.account.stages))
                for kind, spent in zip(KINDS, total, strict=True)
            },
            "iteration_ms": statistics.quantiles(self.iteration_ms),
            "tpot_ms": statistics.quantiles(self.tpot_ms),
            "sampler_ms_per_sequence": statistics.sampler_ms_per_sequence(trace, self.window),
            "stage_table": [self._stage(number) for number in range(len(self.account.stages))],
            "phase_table": statistics.phase_table(trace, self.window),
            "clock_error_us": max(
                (p.clock_error_ns / 1e3 for p in trace.processes if p.clock_error_ns > 0),
                default=0.0,
            ),
            "warnings": list(trace.warnings),
        }

    def _iterations(self) -> int:
        ends = self.pipeline.left.times
        return int(((ends > self.window[0]) & (ends <= self.window[1])).sum())

    def _stage(self, number: int) -> dict[str, Any]:
        stage = self.account.stages[number]
        process = self.trace.of("stage")[number]
        forwards = process.phase(Phase.FORWARD)
        inside = (forwards["end_ns"] > self.window[0]) & (forwards["start_ns"] < self.window[1])
        count = int(inside.sum())
        wall = self.account.wall_ns
        return {
            "stage": stage.index,
            "rank": stage.rank,
            "host": process.header.host,
            "iterations": count,
            "wall_ns": wall,
            "ns": dict(zip(KINDS, stage.by_kind, strict=True)),
            "share": {k: ns / wall for k, ns in zip(KINDS, stage.by_kind, strict=True)},
            "cause_ns": {
                cause.name.lower(): stage.by_cause[cause]
                for cause in Cause
                if stage.by_cause[cause]
            },
        }


def bubble_rows(run: Run) -> list[dict[str, Any]]:
    """One row per stage process and cause: for the CSV file and the report's table."""
    rows = []
    stages = run.summary()["stage_table"]
    for stage, entry in zip(run.account.stages, stages, strict=True):
        for cause in Cause:
            spent = stage.by_cause[cause]
            if spent or cause == Cause.BUSY:
                rows.append(
                    {
                        "run": run.trace.label,
                        "stage": stage.index,
                        "rank": stage.rank,
                        "kind": KINDS[KIND_OF[cause]],
                        "cause": cause.name.lower(),
                        "meaning": CAUSE_TEXT[cause],
                        "seconds": spent / 1e9,
                        "share": spent / run.account.wall_ns,
                        "ms_per_iteration": spent / 1e6 / max(1, entry["iterations"]),
                    }
                )
    return rows
