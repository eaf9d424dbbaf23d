"""The paper's figures, one command each: ``sipipe bench paper LIST|FIG|all`` in a checkout.

    python -m benchmarks.paper FIG [--scale cpu|8xh100|16xh100] [--quick]

``benchmarks/figures/FIG.json`` says what a figure shows: the paper's range, what differs here, and
for each scale its rows (an engine each: options of ``sipipe bench --row``, or SiPipe's settings) and
its panels (``sipipe bench`` command lines). The same code runs them on two cores and on a cluster.
Several figures that have a command line in common are measured together, each row once. For each
figure ``build/bench/paper`` gets its data (JSON, with machine and commit), a picture (SVG) and a
table. The quick form leaves out further panels, and the rows that a figure names as ``full``.

Kinds of pictures: ``bars`` (output tokens/s of each row, with its range), ``cdf`` (of times per
output token and of first tokens, by percentiles), ``stages`` (how each stage spends its time, by the
trace ``TRACES/ROW`` that each row leaves), ``time`` (how busy CPUs and GPUs are over time),
``memory`` (MiB by process).
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.harness import BUILD, report
from benchmarks.simulator.workload import at_rate, poisson_trace, shrunk, write_timed_trace
from sipipe.cli.parser import make_parser
from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools.load import EVERY, PERCENTILES
from sipipe.tools.make_model.checkpoint import make_model
from sipipe.tools.report.accounting import KINDS
from sipipe.tools.report.reader import read_trace
from sipipe.tools.report.summary import Run

FIGURES = Path(__file__).parent / "figures"
SCALES = ("cpu", "8xh100", "16xh100")
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
_KINDS = ("cpu", "gpu")
PRINTED = {
    "bars": ("of stock's best", "of the row above", "TTFT p50", "TPOT p50", "KV tokens"),
    "cdf": ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"),
    "time": ("cpu busy %", "gpu busy %"),
    "memory": ("memory MiB", "KV tokens"),
    "stages": ("stage", *KINDS),
}
"""Columns of the printed table by kind, behind those that name a row; the file has all."""
Rows = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("bench paper", (__doc__ or "").split("\n")[0])
    parser.add_argument("figure", metavar="LIST|FIG|all")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="default: cpu")
    parser.add_argument(
        "--quick", action="store_true", help="one engine a row, fewer rows and panels"
    )
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
    (BUILD / "paper").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sipipe-paper-") as scratch:
        wanted: dict[str, dict[str, Any]] = {}
        for name in names:
            for panel, rows in _panels(known[name], own):
                wanted.setdefault(_command(panel, own), {}).update(rows)
        commands = {line: _with_rows(line, rows, scratch) for line, rows in wanted.items()}
        if own.dry_run:
            print("\n".join(shlex.join(["sipipe", "bench", *c]) for c in commands.values()))
            return 0
        found: dict[str, Rows] = {}
        failed = False
        # What was measured is drawn before anything else is.
        order = list(wanted)
        names.sort(
            key=lambda name: [order.index(_command(p, own)) for p, _ in _panels(known[name], own)]
        )
        for name in names:
            try:
                draw(name, known[name], own, commands, found, Path(scratch))
            except SiPipeError as error:  # other figures are worth having
                failed = True
                print(f"sipipe: {name}: {error}", file=sys.stderr)
    return int(failed)


def draw(
    name: str,
    figure: dict[str, Any],
    own: argparse.Namespace,
    commands: dict[str, list[str]],
    found: dict[str, Rows],
    scratch: Path,
) -> None:
    """Measure what of one figure is not in ``found`` yet, and write what it shows.

    Raises:
        SiPipeError: a panel's command failed.
    """
    if own.scale not in figure["scales"]:
        print(f"{name}: nothing at the scale {own.scale}: {figure['differs']}")
        return
    rows: list[dict[str, Any]] = []
    for panel, names in _panels(figure, own):
        line = _command(panel, own)
        if line not in found:
            found[line] = _measured(commands[line])
        rows += _shown(panel["panel"], names, figure, found[line], own.scale)
    if figure["kind"] == "stages":
        traced = [name for name in names if (scratch / name).is_dir()]
        rows = [row for name in traced for row in _stages(name, scratch / name)]
    if not rows:
        raise SiPipeError("bench paper: no row could be measured")
    stem = f"paper/{name}-{own.scale}{'-quick' if own.quick else ''}"
    pictures = {"bars": _bars, "cdf": _cdf, "time": _time, "stages": _stacks, "memory": _stacks}
    picture = pictures[figure["kind"]]
    (BUILD / f"{stem}.svg").write_text(picture(figure["title"], rows))
    note = f"paper: {figure['paper']}. What differs: {figure['differs']}"
    shown = [{key: value for key, value in row.items() if key[0] != "_"} for row in rows]
    wanted = ("panel", "sampling", "requests", "engine", "tok/s", *PRINTED[figure["kind"]])
    told = {key: {row.get(key) for row in shown} - {None} for key in wanted}
    columns = [key for key in wanted if len(told[key]) > (key == "panel")]
    report(name, figure["title"], shown, note=note, file=stem, columns=columns)


def _panels(figure: dict[str, Any], own: argparse.Namespace) -> list[tuple[dict[str, Any], Rows]]:
    """The panels that are drawn, each with its rows."""
    scale = figure["scales"].get(own.scale, {"panels": [], "rows": {}})
    if not own.quick:
        return [(panel, scale["rows"]) for panel in scale["panels"]]
    rows = {name: row for name, row in scale["rows"].items() if name not in figure.get("full", ())}
    return [(panel, rows) for panel in scale["panels"][: figure.get("quick_panels", 1)]]


def _command(panel: dict[str, Any], own: argparse.Namespace) -> str:
    """A panel's command line without its rows; of its arrivals the file is written."""
    line: str = panel["bench"]
    if "arrivals" in panel:
        how = panel["arrivals"]
        trace = poisson_trace(how["requests"], how["seed"], how["lengths"])
        path = BUILD / f"paper/arrivals-{how['lengths']}-{how['rate']}-{how['requests']}.jsonl"
        write_timed_trace(shrunk(at_rate(trace, how["rate"]), how["shrink"]), path)
        line += f" --trace-file {path} --requests {how['requests']}"
    return f"{line} {panel.get('quick', '')} --engines 1 --repeat 1" if own.quick else line


def _with_rows(line: str, rows: Rows, scratch: str) -> list[str]:
    found = [*shlex.split(line), "--rows", ""]
    for name, options in rows.items():
        text = options
        if not isinstance(options, str):
            text = f"--additional-config {shlex.quote(json.dumps({'sipipe': options}))}"
        found += ["--row", f"{name}={text.replace('TRACES', scratch)}"]
    return found


def _measured(command: list[str]) -> dict[str, Any]:
    """What ``sipipe bench`` found."""
    if not Path(command[0]).exists() and command[0].startswith("build/models/"):
        family, _, size = Path(command[0]).name.partition("-")
        make_model(family, Path(command[0]), size=size)
    run = subprocess.run(
        [sys.executable, "-m", "sipipe", "bench", *command, "--json"],
        stdout=subprocess.PIPE,
        check=False,
    )
    if not run.stdout:
        raise SiPipeError(f"bench paper: sipipe bench {shlex.join(command)} failed")
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def _shown(
    panel: str, names: Rows, figure: dict[str, Any], found: dict[str, Any], scale: str
) -> list[dict[str, Any]]:
    """A row for each load and engine of a figure; keys with an underscore are for the picture."""
    rows: list[dict[str, Any]] = []
    ways = figure.get("shows")
    by_row = {(row["sampling"], row["requests"], row["engine"]): row for row in found["rows"]}
    loads = dict.fromkeys((way, count) for way, count, _ in by_row if not ways or way in ways)
    for (way, count), name in itertools.product(loads, names):
        if (way, count, name) not in by_row:  # bench has said why
            continue
        row = by_row[way, count, name]
        starts = found["engines"][name]["starts"]
        runs = [each for s in starts for each in s["runs"][f"{way} {count}"]]
        speeds = [run["output_throughput"] for run in runs]
        rows.append(
            {"panel": panel, **row, **{f"{kind} busy %": _mean(runs, kind) for kind in _KINDS}}
            | {
                "_busy": {kind: runs[0][kind] for kind in _KINDS},
                "_label": f"{panel}: {way}, {count}",
                "_row": name,
                "_speeds": speeds,
                "_median": statistics.median(speeds),
                "_tpot": [runs[0][f"p{q}_tpot_ms"] for q in PERCENTILES],
                "_ttft": [runs[0][f"p{q}_ttft_ms"] for q in PERCENTILES],
                "_parts": starts[0]["memory_mib"],
            }
        )
    if base := figure.get("base", {}).get(scale):
        whole = {row["_label"]: row["_median"] for row in rows if row["engine"] == base}
        before = {row["_label"]: row["_median"] for row in reversed(rows)}
        for row in rows:
            label, speed = row["_label"], row["_median"]
            row["of the row above"] = speed / before[label]
            row[f"of {base}"] = speed / whole[label] if label in whole else None
            before[label] = speed
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
    most = max(max(row["_speeds"]) for row in rows)
    body, y, label = [], 34, ""
    for row in rows:
        if row["_label"] != label:
            label = row["_label"]
            y += 18
            body.append(f'<text x="20" y="{y - 3}">{escape(label)}, tok/s</text>')
        low, high, median = (
            340 * speed / most
            for speed in (min(row["_speeds"]), max(row["_speeds"]), row["_median"])
        )
        fill = _colour(names.index(row["_row"]))
        body.append(f'<text x="20" y="{y + 10}">{escape(row["_row"][:38])}</text>')
        body.append(f'<rect x="240" y="{y}" width="{median:.1f}" height="11" fill="{fill}"/>')
        body.append(f'<path d="M{240 + low:.1f} {y + 6}H{240 + high:.1f}" stroke="black"/>')
        body.append(f'<text x="{246 + high:.1f}" y="{y + 10}">{escape(row["tok/s"])}</text>')
        y += 14
    return _svg(title, y, body, ())


def _cdf(title: str, rows: list[dict[str, Any]]) -> str:
    """Shares of requests over milliseconds: times per token on the left, first tokens right."""
    return _lines(
        title,
        rows,
        {
            f"{key.upper()}, share of requests": lambda row, key=key: list(
                zip(row[f"_{key}"], PERCENTILES, strict=True)
            )
            for key in ("tpot", "ttft")
        },
        "ms",
    )


def _time(title: str, rows: list[dict[str, Any]]) -> str:
    """Percent busy over seconds: CPUs on the left, GPUs right where there are any."""
    return _lines(
        title,
        rows,
        {
            f"{kind.upper()}s busy": lambda row, kind=kind: [
                (EVERY * i, figure) for i, figure in enumerate(row["_busy"][kind])
            ]
            for kind in _KINDS
            if any(row["_busy"][kind] for row in rows)
        },
        "s",
    )


def _lines(
    title: str,
    rows: list[dict[str, Any]],
    charts: dict[str, Callable[[dict[str, Any]], list[tuple[float, float]]]],
    unit: str,
) -> str:
    """Percent upwards: charts side by side for each load, in each a line for each row."""
    names = list(dict.fromkeys(row["_row"] for row in rows))
    body, top = [], 34
    for label in dict.fromkeys(row["_label"] for row in rows):
        body.append(f'<text x="20" y="{top + 12}">{escape(label)}</text>')
        for side, (what, points) in zip((20, 370), charts.items(), strict=False):
            lines = {row["_row"]: points(row) for row in rows if row["_label"] == label}
            most = max((x for line in lines.values() for x, _ in line), default=1) or 1
            low = top + 160
            body.append(
                f'<path d="M{side} {top + 20}V{low}H{side + 320}" stroke="black" fill="none"/>'
            )
            text = f"{what}, 0 to 100 %, over 0 to {most:,.0f} {unit}"
            body.append(f'<text x="{side}" y="{low + 14}">{text}</text>')
            for name, line in lines.items():
                shape = " ".join(
                    f"{side + 320 * x / most:.1f},{low - 1.4 * y:.1f}" for x, y in line
                )
                colour = _colour(names.index(name))
                body.append(
                    f'<polyline points="{shape}" fill="none" stroke="{colour}" stroke-width="2"/>'
                )
        top += 190
    return _svg(title, top, body, names)


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
