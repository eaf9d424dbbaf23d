"""Traces for other programs: Chrome's trace format, which Perfetto opens."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.observe.format import TraceError
from sipipe.observe.phases import Phase
from sipipe.tools.report.accounting import Cause
from sipipe.tools.report.summary import Run

_BATCH = 20_000


def write_perfetto(run: Run, path: Path) -> int:
    """Write the window of a run as Chrome trace JSON, compressed where the name ends in ``.gz``.

    Each process is one of Perfetto's processes; each of its recording threads has a track a slot,
    and stages one more with what the accounting makes of the device's time. Returns the number of
    slices.

    Raises:
        TraceError: the file cannot be written.
    """
    count = 0
    try:
        packed = path.suffix == ".gz"
        with (
            gzip.open(path, "wt", 3, "ascii")
            if packed
            else path.open("w", encoding="ascii") as file
        ):
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for number, block in enumerate(_blocks(run)):
                count += sum(event["ph"] == "X" for event in block)
                text = ",\n".join(json.dumps(event) for event in block)
                file.write((",\n" if number else "") + text)
            file.write("\n]}\n")
    except OSError as error:
        raise TraceError(f"--perfetto {path}: {error.strerror}") from None
    return count


def _blocks(run: Run) -> Iterator[list[dict[str, Any]]]:
    """Events, some thousands at a time."""
    causes = list(Cause)
    stages = iter(run.account.stages)
    track = 1  # Perfetto takes the same number in two processes for one thread that has moved
    for pid, process in enumerate(run.trace.processes, 1):
        header = process.header
        name = f"{header.name} ({header.host}, pid {header.pid})"
        yield [_named(pid, track, "process", name), _sorted(pid)]
        if header.role == "stage":
            yield [_named(pid, track, "thread", "device: busy and bubbles")]
            for rows in _batches(next(stages).segments):
                yield [
                    _slice(run, pid, track, began, ended, causes[cause].text, iteration=iteration)
                    | {"cat": causes[cause].kind}
                    for began, ended, iteration, cause, _ in rows
                ]
            track += 1
        records = process.phase(window=run.window)
        for thread in np.unique(records["thread"]):
            own = records[records["thread"] == thread]
            does = ", ".join(Phase(phase).name.lower() for phase in np.unique(own["phase"]))
            for slot in np.unique(own["slot"]):
                tracks = _Tracks(run, pid, track)
                for rows in _batches(own[own["slot"] == slot]):
                    yield [tracks.place(row) for row in rows]
                names = range(track, track + len(tracks.open))
                yield [_named(pid, tid, "thread", f"slot {slot}: {does}") for tid in names]
                track += len(names)


class _Tracks:
    """The tracks of one thread's work for one slot.

    Perfetto drops a slice that begins within another one of its track and ends behind it, so such a
    slice goes to one more track.
    """

    def __init__(self, run: Run, pid: int, first: int) -> None:
        self._run, self._pid, self._first = run, pid, first
        self.open: list[list[int]] = []
        """For each track the ends of the slices that the next one may lie in."""

    def place(self, record: tuple[int, ...]) -> dict[str, Any]:
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
        name, tid = Phase(phase).name.lower(), self._first + index
        args = {"iteration": iteration, "slot": slot, "sequences": sequences, "tokens": tokens}
        return _slice(self._run, self._pid, tid, began, ended, name, **args)


def _named(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": name}}


def _sorted(pid: int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}


def _slice(
    run: Run, pid: int, tid: int, began: int, ended: int, name: str, **args: int
) -> dict[str, Any]:
    """From ``began`` to ``ended`` as far as that lies in the window, in us from its begin."""
    start, end = run.window
    began, ended = max(began, start), min(ended, end)
    times = {"ts": _microseconds(began - start), "dur": _microseconds(ended - began)}
    return {"ph": "X", "pid": pid, "tid": tid, **times, "name": name, "args": args}


def _microseconds(ns: int) -> float:
    """A tenth of a nanosecond more: Perfetto cuts off what is below one, and reads decimals loosely.

    Without it some slices begin before the one before them ends, and are dropped.
    """
    return round((ns + 0.1) / 1000, 4)


def _batches(records: npt.NDArray[Any]) -> Iterator[list[tuple[Any, ...]]]:
    for first in range(0, len(records), _BATCH):
        yield records[first : first + _BATCH].tolist()
