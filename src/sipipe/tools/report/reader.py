"""Reading a trace directory back: one structured array per process, on one clock."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sipipe.observe.format import CPU, DROPPED, SUFFIX, Header, TraceError, read_file
from sipipe.observe.phases import WAIT_PHASES, Phase

Records = npt.NDArray[Any]
CPU_SAMPLE = np.dtype([("start_ns", "<i8"), ("end_ns", "<i8"), ("cpu_ns", "<i8")])


@dataclass(frozen=True, slots=True)
class ProcessTrace:
    """Records of one process, on the clock of the executor's host."""

    header: Header
    records: Records
    """dtype ``RECORD``, sorted by start; times in ns of the reference host's monotonic clock."""
    cpu: Records = field(default_factory=lambda: np.zeros(0, CPU_SAMPLE))
    """CPU time used between two instants, in ns."""
    dropped: int = 0
    """Records lost because the disk did not keep up."""
    since_ns: int | None = None
    """From when on all records are there, where older ones gave way; None: from the begin on."""

    def phase(self, *phases: int, window: tuple[int, int] | None = None) -> Records:
        """The records of these phases (of all, where none is named), sorted by start. With a
        ``window`` only those that lie in it, in whole or in part."""
        records = self.records
        if phases:
            records = records[np.isin(records["phase"], phases)]
        if window is not None:
            start, end = window
            records = records[(records["end_ns"] > start) & (records["start_ns"] < end)]
        return records


@dataclass(frozen=True, slots=True)
class Trace:
    """All processes of one run: executor, stages by index and rank, samplers."""

    processes: tuple[ProcessTrace, ...]
    warnings: tuple[str, ...] = ()
    """One line for each thing that could not be used as it is."""
    directory: str = ""

    @property
    def stages(self) -> int:
        """The pipeline size p."""
        stated = max((p.header.stages for p in self.processes), default=0)
        return max(stated, 1 + max((p.header.index for p in self.of("stage")), default=-1))

    @property
    def inflight(self) -> int:
        """Microbatches in flight at most (p where no process was told)."""
        return max((p.header.inflight for p in self.processes), default=0) or self.stages

    @property
    def label(self) -> str:
        """The engine that was recorded."""
        return self.processes[0].header.label if self.processes else ""

    def of(self, role: str) -> tuple[ProcessTrace, ...]:
        return tuple(p for p in self.processes if p.header.role == role)

    @property
    def executor(self) -> ProcessTrace | None:
        """The executor's records, where it recorded."""
        return next(iter(self.of("executor")), None)

    def window(self) -> tuple[int, int]:
        """The trace's wall time in ns: from the first work of any stage to the last record of a stage
        or the last gather; without what a process has no records of any more."""
        spans = []
        for process in self.of("stage"):
            if len(records := process.records):
                works = records[~np.isin(records["phase"], WAIT_PHASES)]
                first = works if len(works) else records
                spans.append((int(first["start_ns"].min()), int(records["end_ns"].max())))
        if not spans:
            raise TraceError(f"{self.directory}: no stage recorded anything; nothing to report")
        end = max(e for _, e in spans)
        if self.executor is not None:
            gathered = self.executor.phase(Phase.GATHER)["end_ns"]
            end = max(end, int(gathered.max(initial=end)))
        start = max([min(s for s, _ in spans), *filter(None, (p.since_ns for p in self.processes))])
        return (start if start < end else min(s for s, _ in spans)), end


def read_trace(directory: str | os.PathLike[str]) -> Trace:
    """Read all trace files of a directory. Files that are not traces, damaged or of an earlier run
    are left out, each with one line in ``warnings``. TraceError: it holds nothing usable."""
    path = Path(directory)
    try:
        files = sorted(path.iterdir())
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        wrong = "no such directory" if gone else f"{error.strerror}".lower()
        raise TraceError(f"{directory}: {wrong}; give the one named by --trace") from None
    found: list[tuple[Header, Records]] = []
    warnings: list[str] = []
    for file in files:
        if file.suffix != SUFFIX:
            if file.is_file() and file.suffix not in (".html", ".json", ".csv"):
                warnings.append(f"{file}: not a SiPipe trace file, left out")
            continue
        try:
            header, records, warning = read_file(file)
        except TraceError as error:
            warning = str(error)
        else:
            found.append((header, records))
        if warning:
            warnings.append(warning)
    if not found:
        hint = f" ({warnings[0]})" if warnings else ""
        if inner := [str(file) for file in files if any(file.glob(f"*{SUFFIX}"))]:
            hint = f"; did you mean {' or '.join(inner)}?"
        raise TraceError(f"{directory}: no trace files (*{SUFFIX}){hint}")
    run = max((header for header, _ in found), key=lambda header: header.realtime_ns).run
    of_run = [one for one in found if one[0].run == run]
    if len(of_run) < len(found):
        warnings.append(f"{directory}: {len(found) - len(of_run)} files of earlier runs left out")
    reference = next((h for h, _ in of_run if h.role == "executor"), of_run[0][0])
    parts: dict[Header, list[tuple[Header, Records]]] = {}
    for header, records in sorted(of_run, key=lambda one: one[0].since_ns):
        parts.setdefault(msgspec.structs.replace(header, since_ns=0), []).append((header, records))
    processes = [_process(files, reference) for files in parts.values()]
    if any(p.since_ns for p in processes):
        warnings.append(f"{directory}: the begin gave way to newer records (trace_limit)")
    warnings.extend(
        f"{p.header.name}: {p.dropped} records dropped, the disk did not keep up"
        for p in processes
        if p.dropped
    )
    seats = [(h.role, h.index, h.rank) for h in parts if h.role != "sampler"]
    if len(set(seats)) < len(seats):
        raise TraceError(f"{directory}: files of several engines; give each its own --trace")
    order = {"executor": 0, "stage": 1, "sampler": 2}
    processes.sort(key=lambda p: (order[p.header.role], p.header.index, p.header.rank))
    return Trace(tuple(processes), tuple(warnings), str(directory))


def _process(files: list[tuple[Header, Records]], reference: Header) -> ProcessTrace:
    """Put a process's files, the older one first, on the clock of ``reference``'s host: by the wall
    clocks, as both files noted them, for hosts share no monotonic clock."""
    header = files[0][0]
    raw = np.concatenate([records for _, records in files])
    offset = 0
    if (header.host, header.boot) != (reference.host, reference.boot):
        offset = header.realtime_ns - header.monotonic_ns
        offset -= reference.realtime_ns - reference.monotonic_ns
    since = header.since_ns + offset if header.since_ns else None
    samples = raw[raw["phase"] == CPU]
    cpu = np.zeros(len(samples), CPU_SAMPLE)
    cpu["cpu_ns"] = samples["iteration"].astype(np.int64) * 1000
    records = raw[raw["phase"] < CPU]
    for name in ("start_ns", "end_ns"):
        cpu[name] = samples[name] + offset
        records[name] += offset
    records = records[np.argsort(records["start_ns"], kind="stable")]
    dropped = int(raw["iteration"][raw["phase"] == DROPPED].sum())
    return ProcessTrace(header, records, cpu, dropped, since)
