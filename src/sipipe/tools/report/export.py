"""Traces for other programs: Chrome's trace format, which Perfetto opens, and CSV."""

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy.typing as npt

from sipipe.observe.format import TraceError
from sipipe.observe.phases import Phase
from sipipe.tools.report.accounting import Cause
from sipipe.tools.report.summary import Run

_BATCH = 20_000


def write_perfetto(run: Run, path: Path) -> int:
    """Write the window of a run as Chrome trace JSON, compressed where the name ends in ``.gz``.

    Each process is one of Perfetto's processes, each recording thread a track; stages have one more
    track with what the accounting makes of the device's time. Returns the number of slices.

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
            file.write(",\n".join(json.dumps(event) for event in _names(run)))
            for block in _slices(run):
                count += len(block)
                file.write(",\n" + ",\n".join(block))
            file.write("\n]}\n")
    except OSError as error:
        raise TraceError(f"--perfetto {path}: {error.strerror}") from None
    return count


def _names(run: Run) -> Iterator[dict[str, Any]]:
    for pid, process in enumerate(run.trace.processes):
        header = process.header
        name = f"{header.name} ({header.host}, pid {header.pid})"
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        if header.role == "stage":
            device = {"name": "device: busy and bubbles"}
            yield {"ph": "M", "pid": pid, "tid": 1000, "name": "thread_name", "args": device}


def _slices(run: Run) -> Iterator[list[str]]:
    start = run.window[0]
    phases = [phase.name.lower() for phase in Phase]
    causes = list(Cause)
    stages = iter(run.account.stages)
    for pid, process in enumerate(run.trace.processes):
        for rows in _batches(process.phase(window=run.window)):
            yield [
                f'{{"ph":"X","pid":{pid},"tid":{thread},"ts":{(began - start) / 1000:.3f},'
                f'"dur":{(ended - began) / 1000:.3f},"name":"{phases[phase]}","args":'
                f'{{"iteration":{iteration},"slot":{slot},"sequences":{batch},"tokens":{tokens}}}}}'
                for began, ended, iteration, batch, tokens, phase, thread, slot in rows
            ]
        if process.header.role == "stage":
            for rows in _batches(next(stages).segments):
                yield [
                    f'{{"ph":"X","pid":{pid},"tid":1000,"ts":{(began - start) / 1000:.3f},'
                    f'"dur":{(ended - began) / 1000:.3f},"name":"{causes[cause].text}",'
                    f'"cat":"{causes[cause].kind}","args":{{"iteration":{iteration}}}}}'
                    for began, ended, iteration, cause, _ in rows
                ]


def _batches(records: npt.NDArray[Any]) -> Iterator[list[tuple[Any, ...]]]:
    for first in range(0, len(records), _BATCH):
        yield records[first : first + _BATCH].tolist()


def write_csv(runs: Sequence[Run], file: TextIO) -> None:
    """The table of bubbles: one row per run, stage process and cause."""
    rows = [row for run in runs for row in run.bubble_rows()]
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {k: round(v, 9) if isinstance(v, float) else v for k, v in row.items()} for row in rows
    )
