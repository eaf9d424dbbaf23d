"""The observations in a trace, and how well costs fitted to them predict the traced run."""

import dataclasses

import numpy as np

from benchmarks.calibration import Calibration, Observation, Run, usual
from sipipe.observe.phases import Phase
from sipipe.tools.planner.hardware import engine
from sipipe.tools.planner.pipeline import iterate
from sipipe.tools.planner.placement import place
from sipipe.tools.planner.workload import Microbatch
from sipipe.tools.report.reader import ProcessTrace, Records, Trace

_MOST = 4_000
"""Records taken of one process and phase, evenly over the run: enough for a mean."""
_FEWEST = 20
"""Times between tokens below which a microbatch size is not compared."""
_WARM_UP = 0.05
"""Share of the iterations at the start that is left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoopCheck:
    """The whole loop of one traced run, at one microbatch size: measured and predicted."""

    engine: str
    p: int
    t: int
    inflight: int
    batch: int
    """Sequences of a microbatch."""
    count: int
    """Times between two tokens of a slot that were measured."""
    measured: float
    """Their mean, seconds."""
    predicted: float
    """The calibrated model's time per output token, seconds."""
    limit: str
    """What the prediction spends its time on."""
    error: float
    """Predicted over measured, less 1."""


def whole(process: ProcessTrace, *phases: int) -> Records:
    """As :meth:`ProcessTrace.phase`, with one record of each phase and iteration: the first,
    prolonged by the time of the others (a product that forward passes interrupt comes in pieces)."""
    records = process.phase(*phases)
    _, first, of = np.unique(
        records[["phase", "iteration"]], return_index=True, return_inverse=True
    )
    spent = np.zeros(len(first), np.int64)
    np.add.at(spent, of, (records["end_ns"] - records["start_ns"]).astype(np.int64))
    found = records[first]
    found["end_ns"] = found["start_ns"] + spent.astype(found["end_ns"].dtype)
    return found[np.argsort(found["start_ns"], kind="stable")]


def check_loop(costs: Calibration, trace: Trace) -> list[LoopCheck]:
    """What ``costs`` predict for the run of ``trace``, beside what it took; by microbatch size.

    Empty where the run had no steady decoding, or its executor was not traced.
    """
    run = run_of(trace, cores=costs.cores)
    per_host = costs.cluster.devices_per_host
    placement = place(costs.facts.layers, run.p, run.t, per_host, run.layers, run.projections)
    samplers = max(1, len(trace.of("sampler")))
    found = []
    for (batch, formed), (seconds, count) in sorted(_steady(trace).items()):
        work = Microbatch(batch=batch, tokens=batch, context=0.0)
        predicted = iterate(
            costs, engine(run.engine), placement, work, inflight=formed, samplers=samplers
        )
        times = (seconds, predicted.delay, predicted.limit, predicted.delay / seconds - 1.0)
        found.append(LoopCheck(trace.label, run.p, run.t, formed, batch, count, *times))
    return found


def _steady(trace: Trace) -> dict[tuple[int, int], tuple[float, int]]:
    """Mean seconds between two tokens of a slot, and how many, by the microbatch's size and by the
    microbatches in flight: the scheduler forms as many as pay, up to the trace's.

    Only steady decoding counts: every microbatch between the two has as many sequences, give or
    take one, and none carries a prompt (it would draw fewer tokens than it has sequences).
    """
    if trace.executor is None:
        return {}
    records = trace.executor.phase(Phase.GATHER)
    records = records[np.argsort(records["iteration"], kind="stable")]
    gaps: dict[tuple[int, int], list[float]] = {}
    latest: dict[int, int] = {}
    for position, now in enumerate(records):
        before = latest.get(int(now["slot"]))
        latest[int(now["slot"])] = position
        if before is None or not 1 <= (formed := position - before) <= trace.inflight:
            continue
        between = records[before : position + 1]
        if np.ptp(between["batch"]) <= 1 and (between["batch"] == between["tokens"]).all():
            gap = (int(now["end_ns"]) - int(records[before]["end_ns"])) * 1e-9
            gaps.setdefault((int(now["batch"]), formed), []).append(gap)
    kept = {key: usual(values) for key, values in gaps.items()}
    return {key: (float(k.mean()), len(k)) for key, k in kept.items() if len(k) >= _FEWEST}


def run_of(trace: Trace, *, cores: int = 1) -> Run:
    """The observations of a trace: one tensor-parallel rank per stage, waits left out."""
    stages, found = trace.of("stage"), []
    first = [process for process in stages if process.header.rank == 0]
    for process in trace.processes:
        if process in first:
            found += _observations(whole(process), process.header.index, "device_sample")
        elif process.header.role != "stage":
            found += _observations(whole(process), -1, "sample")
    found += _turnarounds(trace)
    counts = {process.header.index: process.header.layers for process in stages}
    layers = tuple(counts[stage] for stage in sorted(counts))
    # A part of a shared projection is as large as the time that it takes.
    projections = {
        process.header.index: float(np.median(seen["end_ns"] - seen["start_ns"]))
        for process in first
        if len(seen := whole(process, Phase.LOGITS))
    }
    shares = tuple(
        projections.get(s, 0.0) / sum(projections.values())
        for s in range(trace.stages)
        if projections
    )
    return Run(
        p=trace.stages,
        t=1 + max((process.header.rank for process in stages), default=0),
        observations=found,
        engine="vllm" if "stock" in trace.label.lower() else "sipipe",
        cores=cores,
        layers=layers if len(layers) == trace.stages and all(layers) else None,
        projections=shares,
    )


def _turnarounds(trace: Trace) -> list[Observation]:
    """A stage's time from the end of one microbatch to the start of the next, where the next one's
    inputs were prepared and its hidden states were sent before that: no process waits for
    another, but the stage loses the time."""

    def ends(records: Records, *phases: Phase) -> dict[int, int]:
        chosen = records[np.isin(records["phase"], phases)]
        return dict(zip(chosen["iteration"].tolist(), chosen["end_ns"].tolist(), strict=True))

    found = []
    sent: dict[int, int] | None = None
    for process in trace.of("stage"):
        if process.header.rank:
            continue
        records = process.records
        prepared = ends(records, Phase.PREPARE)
        # sorted by start: a later phase of the same iteration replaces an earlier one
        done = ends(records, Phase.FORWARD, Phase.LOGITS, Phase.SAMPLE)
        for row in records[records["phase"] == Phase.FORWARD]:
            iteration, start = int(row["iteration"]), int(row["start_ns"])
            free = done.get(iteration - 1)
            if free is None or free > start or prepared.get(iteration, free) >= free:
                continue
            if sent is None or sent.get(iteration, free) < free:
                size = int(row["batch"]), int(row["tokens"])
                seconds = (start - free) * 1e-9
                found.append(Observation(process.header.index, "turnaround", *size, seconds))
        sent = ends(records, Phase.SEND)
    return found[-_MOST:]


def _observations(records: Records, stage: int, sample_name: str) -> list[Observation]:
    if not len(records):
        return []
    first, found = np.quantile(records["iteration"], _WARM_UP), []
    for phase in Phase:
        name = sample_name if phase is Phase.SAMPLE else phase.name.lower()
        kept = records[(records["phase"] == phase) & (records["iteration"] >= first)]
        if len(kept) > _MOST:
            kept = kept[np.linspace(0, len(kept) - 1, _MOST).astype(int)]
        for batch, tokens, start, end in kept[["batch", "tokens", "start_ns", "end_ns"]].tolist():
            found.append(Observation(stage, name, batch, tokens, (end - start) * 1e-9))
    return found
