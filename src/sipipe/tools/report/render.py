"""The report, and the page of a load: one HTML file that needs nothing else, not even a network."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from sipipe._version import __version__
from sipipe.observe.phases import Phase
from sipipe.tools.report import statistics
from sipipe.tools.report.accounting import KIND_OF, KINDS, Cause
from sipipe.tools.report.encode import DETAIL, QUANTUM_NS, lanes
from sipipe.tools.report.summary import Run

SCRIPTS = ("decode.js", "lanes.js", "timeline.js", "charts.js", "tables.js", "main.js")
"""In the order in which they are put into the page."""
LOAD_SCRIPTS = ("decode.js", "lanes.js", "charts.js", "tables.js", "load.js")


def page_data(runs: Sequence[Run], detail: int = DETAIL) -> dict[str, Any]:
    """What the page shows, ready for JSON."""
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
    title = " against ".join(run.trace.label for run in runs)
    return _page("report.html", title, page_data(runs, detail), SCRIPTS)


def render_load(result: Mapping[str, Any]) -> str:
    """The page for what ``sipipe bench --json`` prints: its figures over the load that varies."""
    shown = {key: result[key] for key in ("title", "note", "command", "machine", "rows")}
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
    return re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], part(template))
