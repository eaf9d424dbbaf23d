"""The report, and the page of a load: one HTML file that needs nothing else, not even a network.

Its timeline is in compact columns. A *lane* is a band of it: a stage's device (its segments), a
stage's host (its records), a sampler, or the executor. It has a few columns of equal length:
little-endian integers, split into byte planes (all lowest bytes first: neighbours are alike, which
compresses), deflated, base64. Times count in quanta of 100 ns from the start of the window.

Column names: ``gap`` from the start of the interval before (none in device lanes, whose intervals
follow one another), ``span``, ``what`` (cause or phase), ``step`` of the iteration from the interval
before, ``slot``, ``batch``, ``tokens``.
"""

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe._version import __version__
from sipipe.observe.phases import DEVICE_PHASES, Phase
from sipipe.tools.report import statistics
from sipipe.tools.report.accounting import KIND_OF, KINDS, Cause
from sipipe.tools.report.reader import Records
from sipipe.tools.report.summary import Run

QUANTUM_NS = 100
DETAIL = 4_000_000
"""Intervals that a page holds at most; beyond, lanes of records are left out (devices stay)."""
_HOST_PHASES = [phase for phase in Phase if phase not in DEVICE_PHASES]


def column(values: npt.ArrayLike) -> dict[str, Any]:
    """Encode integers, in the narrowest of 1, 2, 4 or 8 bytes that holds them, signed. JavaScript's
    numbers are exact up to 2^53: 28 years of quanta."""
    array = np.asarray(values, np.int64)
    low, high = (int(array.min()), int(array.max())) if len(array) else (0, 0)
    size = next(n for n in (1, 2, 4, 8) if -(1 << (8 * n - 1)) <= low and high < 1 << (8 * n - 1))
    planes = array.astype(f"<i{size}").view(np.uint8).reshape(len(array), size).T
    packed = zlib.compress(np.ascontiguousarray(planes).tobytes(), 6)
    return {"size": size, "data": base64.b64encode(packed).decode()}


def _quanta(times: npt.ArrayLike, start: int) -> npt.NDArray[np.int64]:
    return (np.asarray(times, np.int64) - start + QUANTUM_NS // 2) // QUANTUM_NS


def _lane(name: str, group: str, kind: str, columns: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "group": group,
        "kind": kind,
        "count": len(columns["span"]),
        "columns": {name: column(values) for name, values in columns.items()},
    }


def segment_lane(name: str, group: str, segments: npt.NDArray[Any], start: int) -> dict[str, Any]:
    """A stage's device: ``segments`` of dtype ``SEGMENT``, which leave no gaps."""
    edges = _quanta(np.append(segments["start_ns"], segments["end_ns"][-1:]), start)
    columns = {
        "span": np.diff(edges),
        "what": segments["cause"],
        "step": np.diff(segments["iteration"], prepend=0),
        "slot": segments["slot"],
    }
    return _lane(name, group, "device", columns)


def record_lane(name: str, group: str, records: Records, window: tuple[int, int]) -> dict[str, Any]:
    """Records of one process, sorted by start, cut to the window; they may overlap."""
    begins = _quanta(np.clip(records["start_ns"], *window), window[0])
    ends = _quanta(np.clip(records["end_ns"], *window), window[0])
    columns = {
        "gap": np.diff(begins, prepend=0),
        "span": ends - begins,
        "what": records["phase"],
        "step": np.diff(records["iteration"].astype(np.int64), prepend=0),
        "slot": records["slot"],
        "batch": records["batch"],
        "tokens": records["tokens"],
    }
    return _lane(name, group, "records", columns)


def lanes(run: Run, detail: int = DETAIL) -> tuple[list[dict[str, Any]], list[str]]:
    """All lanes of a run from top to bottom, and the names of those left out for size."""
    trace = run.trace
    window = run.window
    left = detail - sum(len(stage.segments) for stage in run.account)
    dropped: list[str] = []

    def fitting(name: str, group: str, records: Records) -> list[dict[str, Any]]:
        """The lane of these records, where there is room for it."""
        nonlocal left
        if len(records) > left:
            dropped.append(f"{group} {name}".strip())
            return []
        left -= len(records)
        return [record_lane(name, group, records, window)]

    # What matters most gets its room first.
    samplers = []
    stages = []
    executors = []
    for p in trace.of("sampler"):
        samplers += fitting(p.header.name, "", p.phase(Phase.SAMPLE, window=window))
    for p, account in zip(trace.of("stage"), run.account, strict=True):
        stages.append(segment_lane("device", p.header.name, account.segments, window[0]))
        stages += fitting("host", p.header.name, p.phase(*_HOST_PHASES, window=window))
    for p in trace.of("executor"):
        executors += fitting("executor", "", p.phase(window=window))
    return [*executors, *stages, *samplers], dropped


SCRIPTS = ("decode.js", "lanes.js", "timeline.js", "charts.js", "tables.js", "main.js")
"""Scripts in the order in which they are put into the page."""
LOAD_SCRIPTS = ("decode.js", "lanes.js", "charts.js", "tables.js", "load.js")


def page_data(runs: Sequence[Run], detail: int = DETAIL) -> dict[str, Any]:
    """Data that the page shows, ready for JSON."""
    return {
        "version": __version__,
        "quantum_ns": QUANTUM_NS,
        "kinds": list(KINDS),
        "kind_of": KIND_OF.tolist(),
        "causes": [cause.name.lower() for cause in Cause],
        "cause_text": [cause.text for cause in Cause],
        "phases": [phase.name.lower() for phase in Phase],
        "runs": [_run_data(run, detail) for run in runs],
    }


def _run_data(run: Run, detail: int) -> dict[str, Any]:
    timeline, dropped = lanes(run, detail)
    forwards = {}
    for process in run.trace.of("stage"):
        records = process.phase(Phase.FORWARD)
        spans = np.asarray((records["end_ns"] - records["start_ns"]) / 1e6)
        forwards[process.header.name] = statistics.cdf(spans, 200)
    return {
        "summary": run.summary,
        "busiest": run.busiest(),
        "lanes": timeline,
        "left_out": dropped,
        "cdf": {
            "iteration": statistics.cdf(run.iteration_ms),
            "tpot": statistics.cdf(run.tpot_ms),
            "forward": forwards,
        },
        "utilization": statistics.utilization(run.trace, run.window),
    }


def render(runs: Sequence[Run], detail: int = DETAIL) -> str:
    """The page for one run, or for two side by side (the first is the one in question)."""
    title = " against ".join(run.label for run in runs)
    return _page("report.html", title, page_data(runs, detail), SCRIPTS)


def render_load(result: Mapping[str, Any]) -> str:
    """The page for what ``sipipe bench --json`` prints: its figures over the load that varies."""
    shown = {key: result[key] for key in ("title", "note", "command", "machine", "rows")}
    shown |= {key: result[key] for key in ("model", "answers") if key in result}
    # What the scripts expect of a trace, of which there is none.
    data = shown | {"version": __version__, "runs": [], "kinds": [], "phases": []}
    return _page("load.html", result["command"], data, LOAD_SCRIPTS)


def _page(template: str, title: str, data: Mapping[str, Any], scripts: Sequence[str]) -> str:
    page = files("sipipe.tools.report") / "page"

    def part(name: str) -> str:
        return (page / name).read_text(encoding="utf-8")

    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        "TITLE": title.replace("&", "&amp;").replace("<", "&lt;"),
        "STYLE": part("uPlot.min.css") + part("style.css"),
        "LICENSE": part("uPlot.LICENSE"),
        "LIBRARY": part("uPlot.iife.min.js"),
        # "</" would end the script element wherever it stands, in a model's name for instance.
        "DATA": text.replace("</", "<\\/").replace("<!--", "<\\u0021--"),
        "SCRIPT": "\n".join(part(name) for name in scripts),
    }
    text = part(template) + part("end.html")
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], text)
