"""README's picture: half a second of stock vLLM and of SiPipe at the same work, from traces of both.

    python -m benchmarks.timeline [MODEL] [--quick]    # make bench-timeline: measures
    python -m benchmarks.results --keep timeline       # keeps what was measured, and draws it
    python -m benchmarks.results                       # draws it anew from what is kept

Each engine has two stages on CPUs and answers the same requests in rounds. The speed is that of the
median round, and the picture shows the middle of that round: the same number of milliseconds of both
engines. A lane is blank where its process waits, or does something that is not drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from benchmarks.harness import alone, of_the_checkout, report, served_dtype
from benchmarks.make_model.checkpoint import make_model
from sipipe.observe.phases import DEVICE_PHASES, Phase
from sipipe.tools.report.reader import ProcessTrace, Trace, read_trace

REQUESTS, PROMPT, TOKENS, STAGES, SAMPLING = 64, 16, 64, 2, "chat"
WINDOW_MS = 500
DRAWN = {
    Phase.FORWARD: "forward",
    Phase.LOGITS: "output projection",
    Phase.SAMPLE: "sampling",
}
COLOURS = {
    "forward": 'fill="#4477aa"',
    "output projection": 'fill="#ccbb44"',
    "sampling": 'fill="#ee6677"',
}
TRACK = 'fill-opacity=".08"'
INKS = {"light": "#1f2328", "dark": "#e6edf3"}
"""Text and lines by colour scheme of the page; the background is the page's."""
WIDTH, LEFT, RIGHT = 840, 104, 824
"""Of the picture; from LEFT to RIGHT is the window."""
LEAST = 2.0
"""Width of a bar at least, however short the work was: thinner ones are not seen."""
ENGINES = ("stock vLLM", "SiPipe")

Lane = dict[str, list[tuple[int, int]]]
"""By what was done: begins and ends, µs from the window's begin."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", metavar="MODEL", nargs="?", help="default: a generated one")
    parser.add_argument("--quick", action="store_true", help="one round of fewer tokens")
    options = parser.parse_args()
    model = options.model or str(
        make_model("llama", Path("build/models/llama-bench"), size="bench")
    )
    job = {
        "sampling": [SAMPLING],
        "requests": REQUESTS,
        "prompt_tokens": PROMPT,
        "tokens": TOKENS // 4 if options.quick else TOKENS,
        "repeat": 1 if options.quick else 3,
    }
    argv = [model, "-pp", str(STAGES), "--max-model-len", "2048", "--dtype", served_dtype()]
    recorder = of_the_checkout("benchmarks.stock_trace")
    stock = ["--worker-cls", f"{recorder}.TracedWorker"]
    stock += ["--scheduler-cls", f"{recorder}.TracedScheduler"]
    rows = []
    with tempfile.TemporaryDirectory(prefix="sipipe-bench-timeline-") as scratch:
        for engine in ENGINES:
            trace = {"trace": str(Path(scratch) / engine)}
            own: dict[str, Any] = {"argv": argv, "settings": trace}
            if engine == "stock vLLM":
                config = ("--additional-config", json.dumps({"sipipe": trace}))
                own = {"argv": [*argv, *stock, *config], "settings": None}
            rows.append({"engine": engine, **row(alone(engine, job | own), trace["trace"])})
    report(
        "timeline",
        f"{WINDOW_MS} ms of decoding",
        rows,
        note=f"{Path(model).name}, {served_dtype()}, {STAGES} stages, {REQUESTS} requests, "
        "temperature 0.7, top-p 0.9",
        columns=[key for key in rows[0] if key != "lanes"],
    )


def row(result: dict[str, Any], trace: str) -> dict[str, Any]:
    """What is kept of an engine: its speeds, how busy its stages' devices were, and its lanes."""
    speeds = result["tokens_per_second"][SAMPLING]
    middle = speeds.index(statistics.median_low(speeds))
    began, end = result["spans"][SAMPLING][middle]
    found = read_trace(trace)
    busy = {
        f"stage {stage.header.index} busy %": 100
        * sum(e - s for _, s, e in _intervals(stage, began, end, DEVICE_PHASES))
        / (end - began)
        for stage in found.of("stage")
    }
    return {
        "tok/s": round(speeds[middle], 1),
        "rounds": ", ".join(f"{speed:.0f}" for speed in speeds),
        **busy,
        "lanes": lanes(found, (began + end) // 2),
    }


def lanes(trace: Trace, middle: int) -> dict[str, Lane]:
    """The window of :data:`WINDOW_MS` around an instant (ns), from where stage 0 begins a forward
    pass: of each stage, and of all samplers, what they did."""
    starts = trace.of("stage")[0].phase(Phase.FORWARD)["start_ns"]
    began = int(starts[np.searchsorted(starts, middle - WINDOW_MS * 500_000)])
    end = began + WINDOW_MS * 1_000_000
    found: dict[str, Lane] = {}
    for process in (*trace.of("stage"), *trace.of("sampler")):
        header = process.header
        name = f"stage {header.index}" if header.role == "stage" else "CPU sampler"
        lane = found.setdefault(name, {})
        for phase, first, last in _intervals(process, began, end, DRAWN):
            times = ((first - began) // 1000, (last - began) // 1000)
            lane.setdefault(DRAWN[phase], []).append(times)
    return found


def _intervals(
    process: ProcessTrace, began: int, end: int, phases: Any
) -> Iterator[tuple[Phase, int, int]]:
    """What of a process's phases lies between two instants (ns)."""
    for record in process.phase(*phases, window=(began, end)):
        first, last = max(began, int(record["start_ns"])), min(end, int(record["end_ns"]))
        yield Phase(record["phase"]), first, last


def draw(rows: list[dict[str, Any]], scheme: str) -> str:
    """The picture (SVG) for a page of a colour scheme of :data:`INKS`."""
    body: list[str] = []
    y = 20
    for of in rows:
        speed = f'<tspan dx="10" font-weight="normal">{of["tok/s"]:,.0f} tokens/s</tspan>'
        title = escape(of["engine"])
        body.append(
            f'<text x="{LEFT}" y="{y}" font-size="16" font-weight="bold">{title}{speed}</text>'
        )
        y += 10
        for name, lane in of["lanes"].items():
            height = 26 if name.startswith("stage") else 12
            body += _lane(name, lane, y, height)
            y += height + 6
        y += 26
    y -= 22
    for ms in range(0, WINDOW_MS + 1, 100):
        x, unit = _x(1000 * ms), " ms" if ms == WINDOW_MS else ""
        anchor = "end" if unit else "middle"
        body.append(f'<path d="M{x} 30V{y}" stroke="{INKS[scheme]}" stroke-opacity=".25"/>')
        body.append(f'<text x="{x}" y="{y + 15}" text-anchor="{anchor}">{ms}{unit}</text>')
    x, y = LEFT, y + 40
    for name, fill in (*COLOURS.items(), ("idle", TRACK)):
        body.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" {fill}/>')
        body.append(f'<text x="{x + 18}" y="{y}">{name}</text>')
        x += 48 + 7 * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 10}" '
        f'viewBox="0 0 {WIDTH} {y + 10}" '
        f'font-family="sans-serif" font-size="13" fill="{INKS[scheme]}" stroke-width="1">'
        f"{''.join(body)}</svg>\n"
    )


def _lane(name: str, lane: Lane, y: int, height: int) -> Iterator[str]:
    """A track with its name on the left, and on it a bar for each interval."""
    low = y + height / 2 + 4.5
    right = RIGHT - LEAST
    yield f'<text x="{LEFT - 10}" y="{low}" text-anchor="end">{name}</text>'
    yield f'<rect x="{LEFT}" y="{y}" width="{RIGHT - LEFT}" height="{height}" {TRACK}/>'
    for what, times in lane.items():
        edges = [(min(_x(a), right), max(_x(b), min(_x(a), right) + LEAST)) for a, b in times]
        shape = "".join(f"M{a} {y}H{b:g}V{y + height}H{a}Z" for a, b in edges)
        yield f'<path d="{shape}" {COLOURS[what]}/>'
        for a, b in times:
            text = f"{what} {(b - a) / 1000:.0f} ms"
            if 0 < a < b < 1000 * WINDOW_MS and _x(b) - _x(a) > 8 * len(text):
                yield f'<text x="{_x(a) + 8:.1f}" y="{low}" fill="#000">{text}</text>'


def _x(us: int) -> float:
    return round(LEFT + (RIGHT - LEFT) * us / (1000 * WINDOW_MS), 1)


if __name__ == "__main__":
    main()
