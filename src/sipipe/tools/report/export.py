"""Traces for other programs: Chrome's trace format, which Perfetto opens."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sipipe.observe.format import TraceError
from sipipe.observe.phases import Phase
from sipipe.tools.report.accounting import Cause
from sipipe.tools.report.summary import Run

Event = dict[str, Any]


def write_perfetto(run: Run, path: Path) -> int:
    """Write the window of a run as Chrome trace JSON, compressed where the name ends in ``.gz``.

    Each recording thread has a track a slot, and stages one more with what the accounting makes of
    the device's time. Returns the number of slices. Raises TraceError: the file cannot be written.
    """
    count = 0
    try:
        gz = path.suffix == ".gz"
        with gzip.open(path, "wt", 3, "ascii") if gz else path.open("w", encoding="ascii") as file:
            before = '{"displayTimeUnit":"ms","traceEvents":[\n'
            for event in _events(run):
                count += event["ph"] == "X"
                file.write(before + json.dumps(event))
                before = ",\n"
            file.write("\n]}\n")
    except OSError as error:
        raise TraceError(f"--perfetto {path}: {error.strerror}") from None
    return count


def _events(run: Run) -> Iterator[Event]:
    causes = list(Cause)
    stages = iter(run.account)
    track = 1  # Perfetto takes the same number in two processes for one thread that has moved
    for pid, process in enumerate(run.trace.processes, 1):
        header = process.header
        name = f"{header.name} ({header.host}, pid {header.pid})"
        yield _about(pid, track, "process_name", name=name)
        yield _about(pid, track, "process_sort_index", sort_index=pid)
        if header.role == "stage":
            yield _about(pid, track, "thread_name", name="device: busy and bubbles")
            for segment in next(stages).segments:
                began, ended, iteration, number, _ = segment.item()
                cause = causes[number]
                event = _slice(run, pid, track, began, ended, cause.text, iteration=iteration)
                yield event | {"cat": cause.kind}
            track += 1
        records = process.phase(window=run.window)
        for thread in np.unique(records["thread"]):
            recorded = records[records["thread"] == thread]
            does = ", ".join(Phase(phase).name.lower() for phase in np.unique(recorded["phase"]))
            for slot in np.unique(recorded["slot"]):
                tracks = _Tracks(run, pid, track)
                for record in recorded[recorded["slot"] == slot]:
                    yield tracks.place(record.item())
                names = range(track, track + len(tracks.open))
                for tid in names:
                    yield _about(pid, tid, "thread_name", name=f"slot {slot}: {does}")
                track += len(names)


@dataclass
class _Tracks:
    """The tracks of one thread's work for one slot. Perfetto drops a slice that begins within
    another one of its track and ends behind it, so such a slice goes to one more track."""

    _run: Run
    _pid: int
    _first: int
    open: list[list[int]] = field(default_factory=list)
    """For each track the ends of the slices that the next one may lie in."""

    def place(self, record: tuple[int, ...]) -> Event:
        """The event of a record; records come in the order of their begin."""
        began, ended, iteration, sequences, tokens, phase, _, slot = record
        index = 0
        for ends in self.open:
            while ends and ends[-1] <= began:
                ends.pop()
            if not ends or ended <= ends[-1]:
                break
            index += 1
        else:
            self.open.append([])
        self.open[index].append(ended)
        name = Phase(phase).name.lower()
        tid = self._first + index
        args = {"iteration": iteration, "slot": slot, "sequences": sequences, "tokens": tokens}
        return _slice(self._run, self._pid, tid, began, ended, name, **args)


def _about(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _slice(run: Run, pid: int, tid: int, began: int, ended: int, name: str, **args: int) -> Event:
    """From ``began`` to ``ended`` as far as that lies in the window, in us from its begin."""
    start, end = run.window
    began = max(began, start)
    ended = min(ended, end)
    times = {"ts": _microseconds(began - start), "dur": _microseconds(ended - began)}
    return {"ph": "X", "pid": pid, "tid": tid, **times, "name": name, "args": args}


def _microseconds(ns: int) -> float:
    """A tenth of a nanosecond more: Perfetto cuts off what is below one, reads decimals loosely, and
    would drop slices that then begin before the one before them ends."""
    return round((ns + 0.1) / 1000, 4)
