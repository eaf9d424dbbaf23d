"""Figures of a trace besides its bubbles: rates, distributions, phases, utilization over time."""

from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.observe.phases import DEVICE_PHASES, Phase
from sipipe.tools.report.accounting import Array, ByIteration, Intervals, Pipeline
from sipipe.tools.report.reader import Records, Trace

Floats = npt.NDArray[np.float64]
Window = tuple[int, int]
QUANTILES = (50, 90, 99)


def tpot(trace: Trace, pipeline: Pipeline, window: Window) -> Floats:
    """Time per output token in ms: from one iteration of a slot to the slot's next, without pauses."""
    left = pipeline.left
    pauses = pipeline.pauses()
    # The executor knows the slot of every iteration; without its file, the first stage does.
    recorded = [p.records for p in (*trace.of("executor"), *trace.of("stage")) if len(p.records)]
    slots = ByIteration.of(recorded[0], "slot").at(left.iterations, missing=0)
    by_slot = [steps(left.values[slots == slot], pauses, window) for slot in np.unique(slots)]
    return np.concatenate([np.zeros(0), *by_slot])


def steps(ends: Array, pauses: Intervals, window: Window) -> Floats:
    """Milliseconds between the successive ends that lie in the window, pauses left out."""
    ends = np.sort(ends[(ends >= window[0]) & (ends <= window[1])])
    # A step that begins before a pause and ends after it waited for requests, not for SiPipe.
    before = np.searchsorted(pauses.starts, ends, side="left")
    return np.asarray(np.diff(ends)[np.diff(before) == 0] / 1e6)


def ended(records: Records, window: Window) -> Records:
    return records[(records["end_ns"] > window[0]) & (records["end_ns"] <= window[1])]


def quantiles(values: Floats) -> dict[str, float]:
    """Mean and percentiles; empty where there are no values."""
    if not len(values):
        return {}
    percentiles = {f"p{q}": float(np.percentile(values, q)) for q in QUANTILES}
    return {"mean": float(values.mean()), **percentiles}


def cdf(values: Floats, points: int = 400) -> dict[str, list[float]]:
    """A cumulative distribution: at each of ``points`` levels from 0 to 1, the value."""
    if not len(values):
        return {"x": [], "y": []}
    # Finer towards the end: the tail is what one looks for.
    levels = 1 - (1 - np.linspace(0, 1, points)) ** 2
    return {"x": np.quantile(values, levels).round(4).tolist(), "y": levels.round(5).tolist()}


def phase_table(trace: Trace, window: Window) -> list[dict[str, Any]]:
    """One row per process and phase: how often, how long; total and share of the window alone."""
    rows = []
    for process in trace.processes:
        records = process.phase(window=window)
        spans = (records["end_ns"] - records["start_ns"]).astype(np.float64)
        inside = np.clip(records["end_ns"], *window) - np.clip(records["start_ns"], *window)
        for phase in Phase:
            if len(own := spans[chosen := records["phase"] == phase]):
                spent = int(inside[chosen].sum())
                rows.append(
                    {
                        "process": process.header.name,
                        "phase": phase.name.lower(),
                        "count": len(own),
                        "mean_ms": float(own.mean() / 1e6),
                        "p50_ms": float(np.percentile(own, 50) / 1e6),
                        "p99_ms": float(np.percentile(own, 99) / 1e6),
                        "total_s": spent / 1e9,
                        "share": spent / (window[1] - window[0]),
                    }
                )
    return rows


def sampler_ms_per_sequence(trace: Trace, window: Window) -> float | None:
    """Sampler time per sequence drawn, in ms; None without samplers."""
    spent = drawn = 0
    for process in trace.of("sampler"):
        records = process.phase(Phase.SAMPLE, window=window)
        spent += int((records["end_ns"] - records["start_ns"]).sum())
        drawn += int(records["batch"].sum())
    return spent / drawn / 1e6 if drawn else None


def prefill_efficiency(trace: Trace, window: Window) -> float | None:
    """Ideal over measured: of the time in which there were prompts in the pipeline, the share in
    which devices worked; None without prompts."""
    first, *_, last = [p.phase(Phase.FORWARD, window=window) for p in trace.of("stage")] * 2
    prompts = first[first["tokens"] > first["batch"]]
    ends = ByIteration.of(last, "end_ns").at(prompts["iteration"], missing=0)
    through = ends > prompts["start_ns"]
    begins, ends = Intervals(prompts["start_ns"][through], ends[through]).merged()
    if not len(begins):
        return None
    worked = 0.0
    for process in trace.of("stage"):
        starts, stops = Intervals.of(process.phase(*DEVICE_PHASES)).merged()
        until = _until(starts, stops, stops - starts, np.concatenate([begins, ends]))
        worked += float((until[len(begins) :] - until[: len(begins)]).sum())
    return worked / (len(trace.of("stage")) * float((ends - begins).sum()))


def tokens_drawn(trace: Trace, window: Window) -> int:
    """Tokens that iterations of the window brought."""
    last = [p for p in trace.of("stage") if p.header.index == trace.stages - 1][:1]
    gathered = [p.phase(Phase.GATHER) for p in trace.of("executor")]
    sampled = [p.phase(Phase.SAMPLE) for p in (*trace.of("sampler"), *last)]
    forwarded = [p.phase(Phase.FORWARD) for p in last]
    # The executor's word, or else that of those who drew, or else one token a sequence.
    for sources, field in ((gathered, "tokens"), (sampled, "tokens"), (forwarded, "batch")):
        if any(records[field].any() for records in sources):
            return sum(int(ended(records, window)[field].sum()) for records in sources)
    return 0


def drafts(trace: Trace, window: Window) -> dict[str, float] | None:
    """Figures of drafts: number ``verified``, share of them ``accepted``, and tokens of a sequence in
    ``a_pass``; None without drafts. Iterations with prompts are left out."""
    if trace.executor is None:
        return None
    first = trace.of("stage")[0].phase(Phase.FORWARD)
    prompts = first["iteration"][first["tokens"] > first["batch"]]
    gathered = ended(trace.executor.phase(Phase.GATHER), window)
    gathered = gathered[~np.isin(gathered["iteration"], prompts)]
    requests_asked = ByIteration.of(trace.executor.phase(Phase.UPDATE), "batch").at(
        gathered["iteration"], 0
    )
    requests = int(requests_asked.sum())
    rows, tokens = (
        int(gathered[name][requests_asked > 0].sum()) - requests for name in ("batch", "tokens")
    )
    if rows <= 0:
        return None
    return {"verified": rows, "accepted": tokens / rows, "a_pass": 1 + tokens / requests}


def utilization(trace: Trace, window: Window) -> dict[str, list[float] | dict[str, list[float]]]:
    """Device busy share by stage, and cores in use by process, over time (seconds from start)."""
    start, end = window
    edges = np.linspace(start, end, min(300, max(2, (end - start) // 1_000_000)) + 1)
    device: dict[str, list[float]] = {}
    cores: dict[str, list[float]] = {}
    for process in trace.of("stage"):
        starts, ends = Intervals.of(process.phase(*DEVICE_PHASES)).merged()
        device[process.header.name] = _rate(starts, ends, ends - starts, edges)
    for process in trace.processes:
        if len(process.cpu):
            cpu = process.cpu
            name = process.header.name  # a sampler that took another's place has its name too
            used = _rate(cpu["start_ns"], cpu["end_ns"], cpu["cpu_ns"], edges)
            cores[name] = np.add(used, cores.get(name, 0.0)).tolist()
    middle = ((edges[:-1] + edges[1:]) / 2 - start) / 1e9
    return {"t": middle.round(5).tolist(), "device": device, "cores": cores}


def busiest(trace: Trace, window: Window, span: int) -> int:
    """When the ``span`` ns begin in which the devices work most; of equals, those in the middle."""
    start, end = window
    devices = [Intervals.of(p.phase(*DEVICE_PHASES)).merged() for p in trace.of("stage")]
    middle = (start + end - span) // 2
    begins = np.concatenate([[middle], *(starts for starts, _ in devices)])
    begins = np.clip(begins, start, end - span)
    worked = np.zeros(len(begins))
    for starts, ends in devices:
        until = _until(starts, ends, ends - starts, np.append(begins, begins + span))
        worked += until[len(begins) :] - until[: len(begins)]
    most = begins[worked >= 0.99 * worked.max()]
    return int(most[np.abs(most - middle).argmin()])


def _rate(starts: Array, ends: Array, amount: Array, edges: Floats) -> list[float]:
    """Amount per ns in each bin, each interval's amount spread evenly over it."""
    at = _until(starts, ends, amount, edges)
    return [round(float(rate), 4) for rate in np.diff(at) / np.diff(edges)]


def _until(starts: Array, ends: Array, amount: Array, times: Array | Floats) -> Floats:
    """The amount up to each time, each interval's spread evenly over it."""
    if not len(starts):
        return np.zeros(len(times))
    edges = np.column_stack([starts, ends]).ravel().astype(np.float64)
    total = np.concatenate([[0], np.cumsum(amount)]).astype(np.float64)
    heights = np.column_stack([total[:-1], total[1:]]).ravel()
    return np.asarray(np.interp(times, np.maximum.accumulate(edges), heights))
