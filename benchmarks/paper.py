"""The paper's figures, one command each: ``sipipe bench paper LIST|FIG|all`` in a checkout.

    python -m benchmarks.paper FIG [--scale cpu|8xh100|16xh100] [--quick] [--model PATH]

``benchmarks/figures/FIG.json`` says what a figure shows: the paper's range, what differs here, and
for each scale ``sipipe bench`` command lines, of which each is one panel. The same code runs them on
two cores and on a cluster. For each figure ``build/bench/paper`` gets its data (JSON, with machine
and commit), a picture (SVG) and a table.

Kinds of pictures: ``bars`` (output tokens/s of each row, with its range), ``cdf`` (of times per
output token and of first tokens, by percentiles), ``stages`` (how each stage spends its time, by the
traces that the rows named in ``traces`` leave), ``time`` (how busy CPUs and GPUs are over time),
``memory`` (MiB by process).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.harness import BUILD, report
from sipipe.cli.parser import make_parser
from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools.make_model.checkpoint import make_model
from sipipe.tools.report.accounting import KINDS
from sipipe.tools.report.reader import read_trace
from sipipe.tools.report.summary import Run

FIGURES = Path(__file__).parent / "figures"
SCALES = ("cpu", "8xh100", "16xh100")
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
_KINDS = ("cpu", "gpu")
PERCENTILES = (10, 25, 50, 75, 90, 99)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("bench paper", (__doc__ or "").split("\n")[0])
    parser.add_argument("figure", metavar="LIST|FIG|all")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="default: cpu")
    parser.add_argument("--quick", action="store_true", help="one engine a row, fewer panels")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    own = parser.parse_args(argv)
    known = {path.stem: json.loads(path.read_text()) for path in sorted(FIGURES.glob("*.json"))}
    if own.figure.lower() == "list":
        for name, figure in known.items():
            print(f"{name:<12} {figure['title']} (paper: {figure['paper']})")
        return 0
    names = list(known) if own.figure == "all" else [own.figure]
    if names[0] not in known:
        raise ConfigError(f'bench paper: "{own.figure}" is none of {", ".join(known)}')
    for name in names:
        draw(name, known[name], own)
    return 0


def draw(name: str, figure: dict[str, Any], own: argparse.Namespace) -> None:
    """Measure one figure, and write what it shows.

    Raises:
        SiPipeError: a panel's command failed.
    """
    panels = figure["scales"].get(own.scale)
    if panels is None:
        print(f"{name}: nothing at the scale {own.scale}: {figure['differs']}")
        return
    if own.quick:
        panels = panels[: figure.get("quick_panels", 1)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sipipe-paper-") as scratch:
        for panel in panels:
            line = panel["bench"].replace("TRACES", scratch)
            command = [*shlex.split(line), *["--engines", "1", "--repeat", "1"] * own.quick]
            if own.dry_run:
                print(shlex.join(["sipipe", "bench", *command]))
                continue
            rows += _measured(panel["panel"], command)
        if own.dry_run:
            return
        if figure["kind"] == "stages":
            rows = [row for name in figure["traces"] for row in _stages(name, Path(scratch) / name)]
    stem = f"paper/{name}-{own.scale}{'-quick' if own.quick else ''}"
    (BUILD / "paper").mkdir(parents=True, exist_ok=True)
    pictures = {"bars": _bars, "cdf": _cdf, "time": _time, "stages": _stacks, "memory": _stacks}
    picture = pictures[figure["kind"]]
    (BUILD / f"{stem}.svg").write_text(picture(figure["title"], rows))
    note = f"paper: {figure['paper']}. What differs: {figure['differs']}"
    shown = [{key: value for key, value in row.items() if key[0] != "_"} for row in rows]
    report(name, figure["title"], shown, note=note, file=stem)


def _measured(panel: str, command: list[str]) -> list[dict[str, Any]]:
    """A row for each row of ``sipipe bench``; keys with an underscore are for the picture."""
    if not Path(command[0]).exists() and command[0].startswith("build/models/"):
        family, _, size = Path(command[0]).name.partition("-")
        make_model(family, Path(command[0]), size=size)
    run = subprocess.run(
        [sys.executable, "-m", "sipipe", "bench", *command, "--json"],
        stdout=subprocess.PIPE,
        check=False,
    )
    if run.returncode:
        raise SiPipeError(f"bench paper: sipipe bench {shlex.join(command)} failed")
    found = json.loads(run.stdout)
    rows = []
    for row in found["rows"]:
        starts = found["engines"][row["engine"]]["starts"]
        runs = [each for s in starts for each in s["runs"][f"{row['sampling']} {row['requests']}"]]
        rows.append(
            {"panel": panel, **row, **{f"{kind} busy %": _mean(runs, kind) for kind in _KINDS}}
            | {
                "_busy": {kind: runs[0][kind] for kind in _KINDS},
                "_label": f"{panel}: {row['sampling']}, {row['requests']}",
                "_row": row["engine"],
                "_speeds": sorted(r["output_throughput"] for r in runs),
                "_tpot": [runs[0][f"p{q}_tpot_ms"] for q in PERCENTILES],
                "_ttft": [runs[0][f"p{q}_ttft_ms"] for q in PERCENTILES],
                "_parts": starts[0]["memory_mib"],
            }
        )
    return rows


def _mean(runs: Sequence[dict[str, Any]], kind: str) -> float | None:
    figures = [figure for run in runs for figure in run[kind]]
    return sum(figures) / len(figures) if figures else None


def _stages(name: str, trace: Path) -> list[dict[str, Any]]:
    """How each stage of a traced engine spent the time in which it had requests, percent."""
    rows = []
    for stage in Run(read_trace(str(trace))).summary["stage_table"]:
        parts = {kind: 100 * stage["share"][kind] for kind in KINDS}
        rows.append(
            {"engine": name, "stage": stage["stage"], **parts}
            | {"_row": f"{name}, stage {stage['stage']}", "_parts": parts}
        )
    return rows


def _svg(title: str, height: int, body: list[str], names: Sequence[str]) -> str:
    """A picture 720 wide, with a legend below."""
    for i, name in enumerate(names):
        x, y = 20 + i % 4 * 175, height + 14 + i // 4 * 16
        body.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_colour(i)}"/>')
        body.append(f'<text x="{x + 14}" y="{y}">{escape(name[:28])}</text>')
    tall = height + 24 + (len(names) + 3) // 4 * 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{tall}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="20" y="18" font-size="13">{escape(title)}</text>{"".join(body)}</svg>\n'
    )


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _bars(title: str, rows: list[dict[str, Any]]) -> str:
    """Medians with ranges, a group of bars for each load."""
    names = list(dict.fromkeys(row["_row"] for row in rows))
    most = max(row["_speeds"][-1] for row in rows)
    body, y, label = [], 34, ""
    for row in rows:
        if row["_label"] != label:
            label = row["_label"]
            y += 18
            body.append(f'<text x="20" y="{y - 3}">{escape(label)}, tok/s</text>')
        low, median, high = (
            500 * row["_speeds"][i] / most for i in (0, len(row["_speeds"]) // 2, -1)
        )
        fill = _colour(names.index(row["_row"]))
        body.append(f'<rect x="20" y="{y}" width="{median:.1f}" height="11" fill="{fill}"/>')
        body.append(f'<path d="M{20 + low:.1f} {y + 6}H{20 + high:.1f}" stroke="black"/>')
        body.append(f'<text x="{26 + high:.1f}" y="{y + 10}">{escape(row["tok/s"])}</text>')
        y += 14
    return _svg(title, y + 8, body, names)


def _cdf(title: str, rows: list[dict[str, Any]]) -> str:
    """Shares of requests over milliseconds: times per token on the left, first tokens right."""
    panels = {
        f"{key.upper()}, share of requests": [
            [(value, q) for q, value in zip(PERCENTILES, row[f"_{key}"], strict=True)]
            for row in rows
        ]
        for key in ("tpot", "ttft")
    }
    return _lines(title, rows, panels, "ms")


def _time(title: str, rows: list[dict[str, Any]]) -> str:
    """Percent busy over seconds: CPUs on the left, GPUs right."""
    panels = {
        f"{kind.upper()}s busy": [
            [(0.5 * i, figure) for i, figure in enumerate(row["_busy"][kind])] for row in rows
        ]
        for kind in _KINDS
    }
    return _lines(title, rows, panels, "s")


def _lines(
    title: str,
    rows: list[dict[str, Any]],
    panels: dict[str, list[list[tuple[float, float]]]],
    unit: str,
) -> str:
    """Percent upwards, a line for each row, side by side."""
    names = [f"{row['_row']}, {row['_label']}" for row in rows]
    body = []
    for side, (label, lines) in zip((20, 370), panels.items(), strict=True):
        most = max((x for line in lines for x, _ in line), default=1) or 1
        body.append(f'<path d="M{side} 40V240H{side + 320}" stroke="black" fill="none"/>')
        text = f"{label}, 0 to 100 %, over 0 to {most:,.0f} {unit}"
        body.append(f'<text x="{side}" y="256">{text}</text>')
        for i, line in enumerate(lines):
            points = " ".join(f"{side + 320 * x / most:.1f},{240 - 2 * y:.1f}" for x, y in line)
            shape = f'<polyline points="{points}" fill="none" stroke="{_colour(i)}"'
            body.append(f'{shape} stroke-width="2"/>')
    return _svg(title, 264, body, names)


def _stacks(title: str, rows: list[dict[str, Any]]) -> str:
    """A bar for each row, of its parts."""
    names = list(dict.fromkeys(name for row in rows for name in row["_parts"]))
    most = max(sum(row["_parts"].values()) for row in rows) or 1
    body, y = [], 34
    for row in rows:
        body.append(f'<text x="20" y="{y + 10}">{escape(row["_row"][:24])}</text>')
        x = 170.0
        for name, part in row["_parts"].items():
            width = 530 * part / most
            fill = _colour(names.index(name))
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="12" fill="{fill}"/>'
            )
            x += width
        y += 16
    return _svg(title, y + 8, body, names)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SiPipeError as error:
        sys.exit(str(error))
