"""Hand-made timelines as traces, without files."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sipipe.observe.format import RECORD, Header
from sipipe.observe.phases import Phase
from sipipe.tools.report.reader import ProcessTrace, Trace

Row = tuple[Phase, int, int, int]
"""Phase, iteration, start, end."""


def process(role: str, index: int, rows: Iterable[Row], *, stages: int, inflight: int, rank=0):
    """A process trace of these records; slot = iteration % inflight, 4 sequences, 8 tokens."""
    rows = sorted(rows, key=lambda row: row[2])
    records = np.zeros(len(rows), RECORD)
    for record, (phase, iteration, start, end) in zip(records, rows, strict=True):
        record["phase"], record["iteration"] = phase, iteration
        record["start_ns"], record["end_ns"] = start, end
        record["slot"], record["batch"], record["tokens"] = iteration % inflight, 4, 8
    header = Header(role=role, index=index, rank=rank, stages=stages, inflight=inflight)
    return ProcessTrace(header, records)


def pipeline(stages: list[list[Row]], executor: list[Row] | None = None, *, inflight: int) -> Trace:
    """A trace of stages by index and, where given, an executor."""
    p = len(stages)
    processes = [
        process("stage", index, rows, stages=p, inflight=inflight)
        for index, rows in enumerate(stages)
    ]
    if executor is not None:
        processes.insert(0, process("executor", 0, executor, stages=p, inflight=inflight))
    return Trace(tuple(processes), (), "hand-made")
