"""Reading traces for ``sipipe plan --calibrate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sipipe.errors import ConfigError

if TYPE_CHECKING:
    from sipipe.planner import Cluster, ModelFacts, Workload
    from sipipe.planner.calibration import Calibration, Observation, Run
    from sipipe.trace import Trace

__all__ = ["calibrate_from_traces", "run_of"]

_MOST = 4_000
"""Records taken of one process and phase, evenly over the run: enough for a mean."""
_WARM_UP = 0.05
"""Share of the iterations at the start that is left out."""


def calibrate_from_traces(
    directories: Sequence[str], facts: ModelFacts, cluster: Cluster, workload: Workload
) -> Calibration:
    """Costs fitted to the traces in ``directories``.

    Raises:
        ConfigError: a directory holds no usable trace; names it.
    """
    from sipipe.planner.calibration import calibrate
    from sipipe.planner.costs import DatasheetCosts
    from sipipe.planner.hardware import efficiency, sampling

    sheet = DatasheetCosts(
        facts=facts,
        cluster=cluster,
        efficiency=efficiency(),
        sampling=sampling(workload.sampling),
        kv_element_bytes=workload.kv_element_bytes or float(facts.activation_bytes),
    )
    return calibrate(sheet, [_read(directory, cluster) for directory in directories])


def _read(directory: str, cluster: Cluster) -> Run:
    from sipipe.trace import TraceError, read_trace

    try:
        trace = read_trace(directory)
    except TraceError as error:
        raise ConfigError(f"--calibrate: {error}") from None
    return run_of(trace, cores=max(1, cluster.device.cores))


def run_of(trace: Trace, *, cores: int = 1) -> Run:
    """The observations of a trace: one tensor-parallel rank per stage, waits left out."""
    from sipipe.planner.calibration import Run

    stages = trace.of("stage")
    found: list[Observation] = []
    for process in trace.processes:
        if process.header.role == "stage" and process.header.rank == 0:
            found += _observations(process.records, process.header.index, "device_sample")
        elif process.header.role != "stage":
            found += _observations(process.records, -1, "sample")
    return Run(
        p=trace.stages,
        t=1 + max((process.header.rank for process in stages), default=0),
        observations=found,
        engine="sipipe" if trace.label == "sipipe" else "vllm",
        cores=cores,
    )


def _observations(records: np.ndarray, stage: int, sample_name: str) -> list[Observation]:
    from sipipe.planner.calibration import Observation
    from sipipe.trace import Phase

    if not len(records):
        return []
    first = np.quantile(records["iteration"], _WARM_UP)
    found = []
    for phase in Phase:
        name = sample_name if phase is Phase.SAMPLE else phase.name.lower()
        kept = records[(records["phase"] == phase) & (records["iteration"] >= first)]
        if len(kept) > _MOST:
            kept = kept[np.linspace(0, len(kept) - 1, _MOST).astype(int)]
        seconds = (kept["end_ns"] - kept["start_ns"]) * 1e-9
        found += [
            Observation(stage, name, int(batch), int(tokens), float(duration))
            for batch, tokens, duration in zip(kept["batch"], kept["tokens"], seconds, strict=True)
        ]
    return found
