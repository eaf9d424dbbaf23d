"""Stage times of a run that was recorded, for ``python -m benchmarks.emulate --replay``."""

import msgspec
import numpy as np

from benchmarks.emulation.profile import Curve, Profile
from sipipe.errors import ConfigError
from sipipe.observe.phases import Phase
from sipipe.tools.report.reader import ProcessTrace, Records, Trace

_POINTS = 16


def replayed(profile: Profile, trace: Trace) -> Profile:
    """``profile`` with the stage times of ``trace``: medians of forward passes over tokens and of
    the output projection over rows. Hops, copies and the KV cache stay the profile's.

    Raises:
        ConfigError: another number of stages, or too little recorded.
    """
    stages = [process for process in trace.of("stage") if process.header.rank == 0]
    if len(stages) != len(profile.stages):
        raise ConfigError(
            f"--replay {trace.directory}: recorded with {len(stages)} stages, "
            f"not the {len(profile.stages)} of --pp"
        )
    found, projections = [], []
    for stage, process in zip(profile.stages, stages, strict=True):
        layers = _curve(whole(process, Phase.FORWARD), "tokens")
        if layers is None:
            raise ConfigError(
                f"--replay {trace.directory}: no forward passes of {process.header.name}"
            )
        # Attention is in the recorded times, at the contexts that the run had.
        times = {"layers": layers, "decode_context": 0.0, "prompt_context": 0.0}
        if projection := _curve(whole(process, Phase.LOGITS), "batch"):
            projections.append(projection)
        found.append(msgspec.structs.replace(stage, **times))
    if projections:  # of all stages where the projection was shared out
        at = projections[-1].at
        total = Curve(at=at, seconds=tuple(sum(each(rows) for each in projections) for rows in at))
        found[-1] = msgspec.structs.replace(found[-1], projection=total)
    return msgspec.structs.replace(
        profile,
        name=f"{profile.name}, stage times of {trace.directory}",
        stages=tuple(found),
    )


def _curve(records: Records, by: str) -> Curve | None:
    """Median seconds over the field ``by``; None: nothing recorded."""
    if not len(records):
        return None
    sizes = records[by].astype(float)
    seconds = (records["end_ns"] - records["start_ns"]) / 1e9
    edges = np.unique(np.quantile(sizes, np.linspace(0, 1, _POINTS), method="nearest"))
    near = edges[np.abs(sizes[:, None] - edges).argmin(axis=1)]
    points = {edge: float(np.median(seconds[near == edge])) for edge in edges}
    if len(points) == 1:
        points = {0.0: next(iter(points.values()))} | points
    return Curve(at=tuple(points), seconds=tuple(points.values()))


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
