"""The timeline as compact columns for the page.

A *lane* is a row of the timeline: a stage's device (its segments, from the accounting), a stage's
host (its records), a sampler, or the executor. A lane is a few columns of equal length. A column is
little-endian integers, split into byte planes (all lowest bytes first: neighbours are alike, which
compresses), deflated, base64. Times count in quanta of 100 ns from the start of the window.

Column names: ``gap`` from the end of the interval before (from the start of it in record lanes,
where intervals may overlap), ``span``, ``what`` (cause or phase), ``step`` of the iteration from the
interval before, ``slot``, ``batch``, ``tokens``.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.observe.phases import DEVICE_PHASES, Phase
from sipipe.tools.report.accounting import SEGMENT
from sipipe.tools.report.summary import Run

QUANTUM_NS = 100
DETAIL = 4_000_000
"""Intervals that a page holds at most; beyond, lanes of records are left out (devices stay)."""


def column(values: npt.ArrayLike) -> dict[str, Any]:
    """Encode integers: the narrowest of 1, 2 or 4 bytes that holds them, signed."""
    array = np.asarray(values, np.int64)
    low, high = (int(array.min()), int(array.max())) if len(array) else (0, 0)
    for size in (1, 2, 4):
        if -(1 << (8 * size - 1)) <= low and high < 1 << (8 * size - 1):
            break
    else:
        array = np.clip(array, -(1 << 31), (1 << 31) - 1)
    planes = array.astype(f"<i{size}").view(np.uint8).reshape(len(array), size).T
    packed = zlib.compress(np.ascontiguousarray(planes).tobytes(), 6)
    return {"size": size, "data": base64.b64encode(packed).decode()}


def _quanta(times: npt.ArrayLike, start: int) -> npt.NDArray[np.int64]:
    return (np.asarray(times, np.int64) - start + QUANTUM_NS // 2) // QUANTUM_NS


def segment_lane(name: str, group: str, segments: npt.NDArray[Any], start: int) -> dict[str, Any]:
    """A stage's device: segments without gaps."""
    assert segments.dtype == SEGMENT
    edges = _quanta(np.append(segments["start_ns"], segments["end_ns"][-1:]), start)
    spans = np.diff(edges)
    # A page column holds 31 bits (215 s): a longer idle stretch becomes several intervals.
    pieces = np.maximum(1, -(-spans // (1 << 30)))
    index = np.repeat(np.arange(len(segments)), pieces)
    parts = spans[index] // pieces[index]
    last = np.cumsum(pieces) - 1
    parts[last] += spans - parts[last] * pieces
    return {
        "name": name,
        "group": group,
        "kind": "device",
        "count": len(parts),
        "first": 0,
        "columns": {
            "span": column(parts),
            "what": column(segments["cause"][index]),
            "step": column(np.diff(segments["iteration"][index], prepend=0)),
            "slot": column(segments["slot"][index]),
        },
    }


def record_lane(
    name: str, group: str, records: npt.NDArray[Any], window: tuple[int, int]
) -> dict[str, Any]:
    """Records of one process, which may overlap."""
    start, end = window
    records = records[(records["end_ns"] > start) & (records["start_ns"] < end)]
    begins = _quanta(np.clip(records["start_ns"], start, end), start)
    ends = _quanta(np.clip(records["end_ns"], start, end), start)
    iterations = records["iteration"].astype(np.int64)
    return {
        "name": name,
        "group": group,
        "kind": "records",
        "count": len(records),
        "columns": {
            "gap": column(np.diff(begins, prepend=0)),
            "span": column(ends - begins),
            "what": column(records["phase"]),
            "step": column(np.diff(iterations, prepend=0)),
            "slot": column(records["slot"]),
            "batch": column(records["batch"]),
            "tokens": column(records["tokens"]),
        },
    }


def lanes(run: Run, detail: int = DETAIL) -> tuple[list[dict[str, Any]], list[str]]:
    """All lanes of a run from top to bottom, and the names of those left out for size."""
    trace, window = run.trace, run.window
    found: list[tuple[int, dict[str, Any]]] = []
    left = detail - sum(len(stage.segments) for stage in run.account.stages)
    dropped: list[str] = []
    # The executor is above the stages, the samplers below; what matters most is granted first.
    wanted: list[tuple[int, str, str, npt.NDArray[Any]]] = []
    for number, process in enumerate(trace.of("stage")):
        name = process.header.name
        account = run.account.stages[number]
        found.append((10 + 2 * number, segment_lane("device", name, account.segments, window[0])))
        host = [phase for phase in Phase if phase not in DEVICE_PHASES]
        wanted.append((11 + 2 * number, "host", name, process.phase(*host)))
    for number, process in enumerate(trace.of("sampler")):
        rows = process.phase(Phase.SAMPLE)
        wanted.append((100_000 + number, process.header.name, "", rows))
    if trace.executor is not None:
        wanted.append((0, "executor", "", trace.executor.records))
    wanted.sort(key=lambda lane: lane[0] < 100_000)
    for place, name, group, records in wanted:
        if len(records) > left:
            dropped.append(f"{group} {name}".strip())
            continue
        left -= len(records)
        found.append((place, record_lane(name, group, records, window)))
    found.sort(key=lambda lane: lane[0])
    return [lane for _, lane in found], dropped
