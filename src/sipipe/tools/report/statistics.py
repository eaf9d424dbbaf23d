"""Figures of a trace besides its bubbles: rates, distributions, phases, utilization over time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.observe.phases import DEVICE_PHASES, Phase
from sipipe.tools.report.inflight import Pipeline
from sipipe.tools.report.intervals import Array, Union
from sipipe.tools.report.reader import ProcessTrace, Trace

Floats = npt.NDArray[np.float64]
QUANTILES = (50, 90, 99)


def iteration_times(pipeline: Pipeline, window: tuple[int, int]) -> Floats:
    """Milliseconds between the ends of successive iterations, pauses left out."""
    ends = np.sort(pipeline.left.times)
    return _steps(ends, pipeline, window)


def tpot(trace: Trace, pipeline: Pipeline, window: tuple[int, int]) -> Floats:
    """Time per output token in ms: from one iteration of a slot to the slot's next.

    That is what each sequence of the microbatch waits for its next token. Pauses are left out.
    """
    ends, iterations = pipeline.left.times, pipeline.left.iterations
    slots = slot_of(trace).get(iterations)
    found = [_steps(np.sort(ends[slots == slot]), pipeline, window) for slot in np.unique(slots)]
    return np.concatenate(found) if found else np.zeros(0)


class SlotMap:
    """The slot of each iteration, as the executor or else the first stage recorded it."""

    def __init__(self, iterations: Array, slots: Array) -> None:
        """Pairs in any order; of repeated iterations the first counts."""
        self._iterations, first = np.unique(iterations, return_index=True)
        self._slots = slots[first]

    def get(self, iterations: Array) -> Array:
        """The slots; 0 where unknown."""
        if not len(self._iterations):
            return np.zeros(len(iterations), np.int64)
        index = np.minimum(np.searchsorted(self._iterations, iterations), len(self._iterations) - 1)
        return np.where(self._iterations[index] == iterations, self._slots[index], 0)


def slot_of(trace: Trace) -> SlotMap:
    """The slot of each iteration."""
    source = next(
        (p for p in (trace.executor, *trace.of("stage")) if p is not None and len(p.records)), None
    )
    if source is None:
        return SlotMap(np.zeros(0, np.int64), np.zeros(0, np.int64))
    records = source.records
    return SlotMap(records["iteration"].astype(np.int64), records["slot"].astype(np.int64))


def _steps(ends: Array, pipeline: Pipeline, window: tuple[int, int]) -> Floats:
    ends = ends[(ends >= window[0]) & (ends <= window[1])]
    if len(ends) < 2:
        return np.zeros(0)
    # A step that begins before a pause and ends after it waited for requests, not for SiPipe.
    pauses = np.searchsorted(pipeline.pauses().starts, ends, side="left")
    return np.asarray(np.diff(ends)[np.diff(pauses) == 0] / 1e6)


def quantiles(values: Floats) -> dict[str, float]:
    """Mean and percentiles; empty where there are no values."""
    if not len(values):
        return {}
    found = {"mean": float(values.mean())}
    for q in QUANTILES:
        found[f"p{q}"] = float(np.percentile(values, q))
    return found


def cdf(values: Floats, points: int = 400) -> dict[str, list[float]]:
    """A cumulative distribution: at each of ``points`` levels from 0 to 1, the value."""
    if not len(values):
        return {"x": [], "y": []}
    # Finer towards the end: the tail is what one looks for.
    levels = 1 - (1 - np.linspace(0, 1, points)) ** 2
    return {
        "x": [round(float(x), 4) for x in np.quantile(values, levels)],
        "y": [round(float(y), 5) for y in levels],
    }


def phase_table(trace: Trace, window: tuple[int, int]) -> list[dict[str, Any]]:
    """One row per process and phase: how often, how long."""
    rows = []
    wall = window[1] - window[0]
    for process in trace.processes:
        records = _within(process, window)
        spans = (records["end_ns"] - records["start_ns"]).astype(np.float64)
        for phase in Phase:
            own = spans[records["phase"] == phase]
            if len(own):
                rows.append(
                    {
                        "process": process.header.name,
                        "phase": phase.name.lower(),
                        "count": len(own),
                        "mean_ms": float(own.mean() / 1e6),
                        "p50_ms": float(np.percentile(own, 50) / 1e6),
                        "p99_ms": float(np.percentile(own, 99) / 1e6),
                        "total_s": float(own.sum() / 1e9),
                        "share": float(own.sum() / wall) if wall else 0.0,
                    }
                )
    return rows


def sampler_ms_per_sequence(trace: Trace, window: tuple[int, int]) -> float | None:
    """Sampler time per sequence drawn, in ms; None without samplers."""
    spent = drawn = 0
    for process in trace.of("sampler"):
        records = _within(process, window)
        records = records[records["phase"] == Phase.SAMPLE]
        spent += int((records["end_ns"] - records["start_ns"]).sum())
        drawn += int(records["batch"].sum())
    return spent / drawn / 1e6 if drawn else None


def tokens_drawn(trace: Trace, window: tuple[int, int]) -> int:
    """Tokens that iterations of the window brought."""
    executor = trace.executor
    if executor is not None and executor.phase(Phase.GATHER)["tokens"].any():
        records = executor.phase(Phase.GATHER)
    else:
        last = [p for p in trace.of("stage") if p.header.index == trace.stages - 1][:1]
        records = trace.of("stage")[0].records[:0]
        for process in (*trace.of("sampler"), *last):
            drawn = process.phase(Phase.SAMPLE)
            if len(drawn):
                records = np.concatenate([records, drawn])
        if not len(records) and last:
            forward = last[0].phase(Phase.FORWARD)
            ends = forward["end_ns"]
            return int(forward["batch"][(ends > window[0]) & (ends <= window[1])].sum())
    ends = records["end_ns"]
    return int(records["tokens"][(ends > window[0]) & (ends <= window[1])].sum())


def utilization(
    trace: Trace, window: tuple[int, int], points: int = 300
) -> dict[str, list[float] | dict[str, list[float]]]:
    """Device busy share by stage, and cores in use by process, over time (seconds from start)."""
    start, end = window
    edges = np.linspace(start, end, min(points, max(2, (end - start) // 1_000_000)) + 1)
    device: dict[str, list[float]] = {}
    cores: dict[str, list[float]] = {}
    for process in trace.of("stage"):
        records = process.phase(*DEVICE_PHASES)
        union = Union(records["start_ns"], records["end_ns"])
        device[process.header.name] = _rate(
            union.starts, union.ends, (union.ends - union.starts).astype(np.float64), edges
        )
    for process in trace.processes:
        if len(process.cpu):
            cpu = process.cpu
            cores[process.header.name] = _rate(
                cpu["start_ns"], cpu["end_ns"], cpu["cpu_ns"].astype(np.float64), edges
            )
    middle = ((edges[:-1] + edges[1:]) / 2 - start) / 1e9
    return {"t": [round(float(t), 5) for t in middle], "device": device, "cores": cores}


def _rate(starts: Array, ends: Array, amount: Floats, edges: Floats) -> list[float]:
    """Amount per ns in each bin, each interval's amount spread evenly over it."""
    if not len(starts):
        return [0.0] * (len(edges) - 1)
    times = np.column_stack([starts, ends]).ravel().astype(np.float64)
    total = np.concatenate([[0.0], np.cumsum(amount)])
    heights = np.column_stack([total[:-1], total[1:]]).ravel()
    at = np.interp(edges, np.maximum.accumulate(times), heights)
    return [round(float(v), 4) for v in np.diff(at) / np.diff(edges)]


def _within(process: ProcessTrace, window: tuple[int, int]) -> npt.NDArray[Any]:
    records = process.records
    return records[(records["end_ns"] > window[0]) & (records["start_ns"] < window[1])]
