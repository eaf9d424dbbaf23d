"""Reading a trace directory back: one structured array per process, on one clock."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.observe.format import CLOCK, CPU, DROPPED, SUFFIX, Header, TraceError, read_file
from sipipe.observe.phases import DEVICE_PHASES, WAIT_PHASES, Phase

Records = npt.NDArray[Any]
CPU_SAMPLE = np.dtype([("start_ns", "<i8"), ("end_ns", "<i8"), ("cpu_ns", "<i8")])


@dataclass(frozen=True, slots=True)
class ProcessTrace:
    """What one process recorded, on the reference clock."""

    header: Header
    records: Records
    """dtype ``RECORD``, sorted by start; times in ns of the reference host's monotonic clock."""
    cpu: Records = field(default_factory=lambda: np.zeros(0, CPU_SAMPLE))
    """CPU time used between two instants, in ns."""
    clock_offset_ns: int = 0
    """What was added to this host's clock, at the start of the trace."""
    clock_error_ns: int = 0
    """How far the offset may be off; -1 where it is a guess from the hosts' wall clocks."""
    dropped: int = 0
    """Records lost because the disk did not keep up."""
    path: str = ""

    def phase(self, *phases: int) -> Records:
        """The records of these phases, sorted by start."""
        return self.records[np.isin(self.records["phase"], phases)]


@dataclass(frozen=True, slots=True)
class Trace:
    """All processes of one run."""

    processes: tuple[ProcessTrace, ...]
    """Executor, then stages by index and rank, then samplers."""
    warnings: tuple[str, ...] = ()
    """One line for each thing that could not be used as it is."""
    directory: str = ""

    @property
    def stages(self) -> int:
        """The pipeline size p."""
        told = max((p.header.stages for p in self.processes), default=0)
        return max(told, 1 + max((p.header.index for p in self.of("stage")), default=-1))

    @property
    def inflight(self) -> int:
        """Microbatches in flight at most (p where no process was told)."""
        return max((p.header.inflight for p in self.processes), default=0) or self.stages

    @property
    def label(self) -> str:
        """The engine that was recorded."""
        return self.processes[0].header.label if self.processes else ""

    def of(self, role: str) -> tuple[ProcessTrace, ...]:
        """The processes of one role."""
        return tuple(p for p in self.processes if p.header.role == role)

    @property
    def executor(self) -> ProcessTrace | None:
        """The executor's records, where it recorded."""
        return next(iter(self.of("executor")), None)

    def window(self) -> tuple[int, int]:
        """The trace's wall time in ns: from the first work of any stage to the last tokens.

        That is the last record of a stage or the last gather, whichever ends later. Waiting before
        there is anything to do is not part of it.
        """
        spans = []
        for process in self.of("stage"):
            records = process.records
            if len(records):
                works = records[~np.isin(records["phase"], WAIT_PHASES)]
                first = works if len(works) else records
                spans.append((int(first["start_ns"].min()), int(records["end_ns"].max())))
        if not spans:
            raise TraceError(f"{self.directory}: no stage recorded anything; nothing to report")
        end = max(e for _, e in spans)
        if self.executor is not None:
            gathered = self.executor.phase(Phase.GATHER)["end_ns"]
            end = max(end, int(gathered.max(initial=end)))
        return min(s for s, _ in spans), end


def read_trace(directory: str | os.PathLike[str]) -> Trace:
    """Read all trace files of a directory.

    Files that are not traces, damaged ones and those of an earlier run are left out, each with one
    line in ``warnings``.

    Raises:
        TraceError: the directory does not exist or holds nothing usable, in one line.
    """
    path = Path(directory)
    if not path.is_dir():
        raise TraceError(f"{directory}: no such directory; give the one named by --trace")
    found: list[tuple[Header, Records, str]] = []
    warnings: list[str] = []
    for file in sorted(path.iterdir()):
        if file.suffix != SUFFIX:
            if file.is_file() and file.suffix not in (".html", ".json", ".csv"):
                warnings.append(f"{file}: not a SiPipe trace file, left out")
            continue
        try:
            header, records, warning = read_file(file)
        except TraceError as error:
            warnings.append(str(error))
            continue
        found.append((header, records, str(file)))
        if warning:
            warnings.append(warning)
    if not found:
        hint = f" ({warnings[0]})" if warnings else ""
        raise TraceError(f"{directory}: no trace files (*{SUFFIX}){hint}")
    found, dropped_runs = _latest_run(found)
    if dropped_runs:
        warnings.append(f"{directory}: {dropped_runs} files of earlier runs left out")
    processes = [_process(h, r, f, found) for h, r, f in found]
    guessed = sorted({p.header.host for p in processes if p.clock_error_ns < 0})
    if guessed:
        warnings.append(
            f"no clock offset recorded for {', '.join(guessed)}; aligned by wall clock, "
            "which may be off by milliseconds"
        )
    warnings.extend(
        f"{p.header.name}: {p.dropped} records dropped, the disk did not keep up"
        for p in processes
        if p.dropped
    )
    order = {"executor": 0, "stage": 1, "sampler": 2}
    processes.sort(key=lambda p: (order[p.header.role], p.header.index, p.header.rank))
    return Trace(tuple(processes), tuple(warnings), str(directory))


def _latest_run(
    found: list[tuple[Header, Records, str]],
) -> tuple[list[tuple[Header, Records, str]], int]:
    newest: Counter[str] = Counter()
    for header, _, _ in found:
        newest[header.run] = max(newest[header.run], header.realtime_ns)
    run = max(newest, key=lambda name: newest[name])
    kept = [f for f in found if f[0].run == run]
    return kept, len(found) - len(kept)


def _process(
    header: Header,
    raw: Records,
    file: str,
    found: list[tuple[Header, Records, str]],
) -> ProcessTrace:
    """Put one file on the reference clock, that of the executor's host."""
    clocks = raw[raw["phase"] == CLOCK]
    reference = next((h for h, _, _ in found if h.role == "executor"), found[0][0])
    records = raw[raw["phase"] < CPU].copy()
    samples = raw[raw["phase"] == CPU]
    offset, error = 0, 0
    if len(clocks):
        offset, error = int(clocks["end_ns"][0]), int(clocks["iteration"].max()) * 1000
    elif header.host != reference.host:
        offset = (header.realtime_ns - header.monotonic_ns) - (
            reference.realtime_ns - reference.monotonic_ns
        )
        error = -1
    cpu = np.zeros(len(samples), CPU_SAMPLE)
    cpu["cpu_ns"] = samples["iteration"].astype(np.int64) * 1000
    for name in ("start_ns", "end_ns"):
        cpu[name] = samples[name]
        for array in (records, cpu):
            array[name] += _offsets(array[name], clocks, offset)
    records = records[np.argsort(records["start_ns"], kind="stable")]
    lost = int(raw["iteration"][raw["phase"] == DROPPED].sum())
    return ProcessTrace(header, records, cpu, offset, error, lost, file)


def _offsets(times: Records, clocks: Records, offset: int) -> Records:
    """Offset at each time, in ns: drift between two measurements is taken as linear."""
    if len(clocks) < 2:
        return np.full(len(times), offset, np.int64)
    base = int(clocks["start_ns"][0])
    drift = np.interp(times - base, clocks["start_ns"] - base, clocks["end_ns"] - offset)
    return np.asarray(offset + np.rint(drift).astype(np.int64))


def device_records(process: ProcessTrace) -> Records:
    """The device work of a stage process (forward and logits), sorted by start."""
    return process.phase(*DEVICE_PHASES)
