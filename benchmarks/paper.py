"""The paper's figures, one command each, in a checkout.

    python -m benchmarks.paper LIST|FIG,FIG|all [--scale cpu|8xh100|16xh100] [--quick]
    python -m benchmarks.paper FILE.json          draws the picture of kept data again

``benchmarks/figures/FIG.json`` says what a figure shows: the paper's range, what differs here, and
for each scale its rows (an engine each: options of ``sipipe bench --row``, or SiPipe's settings and
``without``, parts of :mod:`benchmarks.ablation`) and its panels (``sipipe bench`` command lines). The
same code runs them on two cores and on a cluster. Several figures that have a command line in common are measured together, each row once; so are rows
of commands that differ in their loads alone. For each
figure ``build/bench/paper`` gets its data (JSON, with machine and commit), a picture (SVG) and a
table. The quick form leaves out further panels, and the rows that a figure names as ``full``.

A row may be set beside the one above it only in a chain: its name begins with ``+`` (one part more) or
``-`` (one less), or it is the figure's ``base``, the end of the first chain and the start of the second.

Kinds of pictures are those of :mod:`benchmarks.pictures`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ablation import extension
from benchmarks.busy import utilization, within
from benchmarks.harness import BUILD, report
from benchmarks.make_model.checkpoint import make_model
from benchmarks.pictures import BUSY, DRAWN, PICTURES
from benchmarks.simulator.workload import at_rate, poisson_trace, shrunk, write_timed_trace
from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools.load import PERCENTILES
from sipipe.tools.report.accounting import KINDS
from sipipe.tools.report.reader import read_trace
from sipipe.tools.report.summary import Run

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "figures"
SCALES = ("cpu", "8xh100", "16xh100")
PRINTED = {
    "bars": ("of stock's best", "of the row above", "TTFT p50", "TPOT p50", "KV tokens"),
    "cdf": ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"),
    "time": ("cpu busy %", "gpu busy %"),
    "memory": ("memory MiB", "KV tokens"),
    "lengths": ("TTFT p50", "of stock's best"),
    "stages": ("stage", *KINDS),
}
"""Columns of the printed table by kind, behind those that name a row; the file has all."""
Rows = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("figure", metavar="LIST|FIG,FIG|all")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="default: cpu")
    parser.add_argument(
        "--quick", action="store_true", help="one engine a row, fewer rows and panels"
    )
    parser.add_argument("--dtype", help="float32 on a CPU without AVX-512 (default: the model's)")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    own = parser.parse_args(argv)
    known = {path.stem: json.loads(path.read_text()) for path in sorted(FIGURES.glob("*.json"))}
    if own.figure.lower() == "list":
        for name, figure in known.items():
            print(f"{name:<12} {figure['title']} (paper: {figure['paper']})")
        return 0
    if own.figure.endswith(".json"):
        return _redraw(Path(own.figure), known)
    names = list(known) if own.figure == "all" else own.figure.split(",")
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f'paper: "{wrong[0]}" is none of {", ".join(known)}')
    (BUILD / "paper").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sipipe-paper-") as scratch:
        wanted: dict[str, dict[str, Any]] = {}
        for name in names:
            for panel, rows in _panels(known[name], own):
                wanted.setdefault(_command(panel, own), {}).update(rows)
        lenders = {line: _lender(line, wanted) for line in wanted}
        commands = {}
        for line, rows in wanted.items():
            lent = wanted.get(lenders[line] or "", {})
            own_rows = {name: row for name, row in rows.items() if lent.get(name, ...) != row}
            commands[line] = _with_rows(line, own_rows, scratch)
        if own.dry_run:
            for name in names:
                if own.scale not in known[name]["scales"]:
                    print(_nothing(name, known[name], own.scale), file=sys.stderr)
            for command in commands.values():
                print(shlex.join(["sipipe", "bench", *command]))
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
                draw(name, known[name], own, commands, lenders, found, Path(scratch))
            except SiPipeError as error:  # other figures are worth having
                failed = True
                print(f"sipipe: {name}: {error}", file=sys.stderr)
    return int(failed)


def draw(
    name: str,
    figure: dict[str, Any],
    own: argparse.Namespace,
    commands: dict[str, list[str]],
    lenders: dict[str, str | None],
    found: dict[str, Rows],
    scratch: Path,
) -> None:
    """Measure what of one figure is not in ``found`` yet, and write what it shows.

    Raises:
        SiPipeError: a panel's command failed.
    """
    if own.scale not in figure["scales"]:
        print(_nothing(name, figure, own.scale))
        return
    rows: list[dict[str, Any]] = []
    for panel, names in _panels(figure, own):
        line = _command(panel, own)
        lender = lenders[line]
        for each in (lender, line):
            if each is not None and each not in found:
                found[each] = _measured(commands[each])
                if lender is not None and each == line:
                    _lend(found[lender], found[line])
        rows += _shown(panel, names, figure, found[line], own.scale)
    if figure["kind"] == "stages":
        engines = {row["engine"]: row for row in rows}
        traced = [name for name in engines if (scratch / name).is_dir()]
        rows = [row for name in traced for row in _stages(engines[name], scratch / name)]
    if not rows:
        raise SiPipeError("paper: no row could be measured")
    stem = f"paper/{name}-{own.scale}{'-quick' if own.quick else ''}"
    (BUILD / f"{stem}.svg").write_text(PICTURES[figure["kind"]](figure["title"], rows))
    note = f"paper: {figure['paper']}. What differs: {figure['differs']}"
    if any(row.get("equal") for row in rows):
        first = next(iter(found[line]["engines"]))
        note += f". equal: requests with the greedy tokens of {first}"
    wanted = ("panel", "sampling", "requests", "engine", "tok/s", *PRINTED[figure["kind"]])
    told = {key: {row.get(key) for row in rows} - {None} for key in wanted}
    columns = [key for key in wanted if len(told[key]) > (key == "panel")]
    report(name, figure["title"], rows, note=note, file=stem, columns=columns)


def _nothing(name: str, figure: dict[str, Any], scale: str) -> str:
    return f"{name}: nothing at the scale {scale}: {figure['differs']}"


def _redraw(path: Path, known: dict[str, Any]) -> int:
    """The picture of a figure's data, into ``build/bench/paper``.

    Raises:
        ConfigError: the file is none, or not a figure's.
    """
    try:
        data = json.loads(path.read_text())
        picture = PICTURES[known[data["benchmark"]]["kind"]](data["title"], data["rows"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"paper: {path} is no figure's data: {error!r}") from None
    target = BUILD / f"paper/{path.stem}.svg"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(picture)
    print(f"written to {target}")
    return 0


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
    line += f" --dtype {own.dtype}" if own.dtype else ""
    return f"{line} {panel.get('quick', '')} --engines 1 --repeat 1" if own.quick else line


def _lender(line: str, lines: Iterable[str]) -> str | None:
    """Another command that only has more loads, whose rows need not be measured once more."""

    def parts(line: str) -> tuple[set[str], list[str]]:
        words = shlex.split(line)
        at = [i for i, word in enumerate(words) if word == "--sampling"]
        rest = [word for i, word in enumerate(words) if not {i, i - 1} & set(at)]
        return set(words[at[-1] + 1].split(",") if at else ()), rest

    loads, rest = parts(line)
    return next((o for o in lines if loads < parts(o)[0] and parts(o)[1] == rest), None)


def _lend(lender: Rows, found: Rows) -> None:
    """Add the engines of one result to another, with the loads that this one has."""
    loads = {(row["sampling"], row["requests"]) for row in found["rows"]}
    for row in lender["rows"]:
        if (row["sampling"], row["requests"]) in loads and row["engine"] not in found["engines"]:
            # Stock's best was another command's.
            found["rows"].append(row | {"of stock's best": None})
    found["engines"] = lender["engines"] | found["engines"]


def _with_rows(line: str, rows: Rows, scratch: str) -> list[str]:
    found = [*shlex.split(line), "--rows", ""]
    for name, options in rows.items():
        text = options
        if not isinstance(options, str):
            settings = {key: options[key] for key in options if key != "without"}
            words = extension(options.get("without", []))
            text = shlex.join(["--additional-config", json.dumps({"sipipe": settings}), *words])
        found += ["--row", f"{name}={text.replace('TRACES', scratch)}"]
    return found


def _measured(command: list[str]) -> dict[str, Any]:
    """What ``sipipe bench`` found, and how busy the machine was in each of its loads."""
    if not Path(command[0]).exists() and command[0].startswith("build/models/"):
        family, _, size = Path(command[0]).name.partition("-")
        make_model(family, Path(command[0]), size=size)
    with utilization() as looks:
        run = subprocess.run(
            [sys.executable, "-m", "sipipe", "bench", *command, "--json"],
            stdout=subprocess.PIPE,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # for benchmarks.stock_trace, .ablation
        )
    if not run.stdout:
        raise SiPipeError(f"paper: sipipe bench {shlex.join(command)} failed")
    found: dict[str, Any] = json.loads(run.stdout)
    for engine in found["engines"].values():
        for runs in (runs for start in engine["starts"] for runs in start["runs"].values()):
            runs[:] = [one | within(looks, one["span"]) for one in runs]
    return found


def _shown(
    panel: dict[str, Any], names: Rows, figure: dict[str, Any], found: dict[str, Any], scale: str
) -> list[dict[str, Any]]:
    """A row for each load and engine of a figure, with what its picture shows."""
    rows: list[dict[str, Any]] = []
    medians: dict[tuple[str, str], float] = {}
    base = figure.get("base", {}).get(scale)
    by_row = {(f"{row['sampling']} {row['requests']}", row["engine"]): row for row in found["rows"]}
    loads = dict.fromkeys(load for load, _ in by_row)
    if shows := panel.get("shows", figure.get("shows")):
        loads = dict.fromkeys(
            load for way in shows for load in loads if way in (load, load.split()[0])
        )
    for load, name in itertools.product(loads, names):
        if (load, name) not in by_row:  # bench has said why
            continue
        starts = found["engines"][name]["starts"]
        all_runs = [item for start in starts for item in start["runs"].items()]
        runs = [each for key, some in all_runs if key.split()[:2] == load.split() for each in some]
        speeds = [run["output_throughput"] for run in runs]
        medians[load, name] = statistics.median(speeds)
        drawn = {
            "busy over time": {key: runs[0][key] for key in (*BUSY, "every_s")},
            "speeds": speeds,
            "TPOT percentiles": {q: runs[0][f"p{q}_tpot_ms"] for q in map(str, PERCENTILES)},
            "TTFT percentiles": {q: runs[0][f"p{q}_ttft_ms"] for q in map(str, PERCENTILES)},
            "memory by process": starts[0]["memory_mib"],
            "prompt": panel.get("prompt", 0),
            "ttft": statistics.median(run["p50_ttft_ms"] for run in runs) / 1e3,
        }
        drawn["prompt tokens/s"] = drawn["prompt"] / drawn["ttft"]
        row = {"panel": panel["panel"], **by_row[load, name]}
        row |= {f"{kind} busy %": _mean(runs, kind) for kind in BUSY}
        rows.append(row | {key: drawn[key] for key in DRAWN.get(figure["kind"], ())})
        if base:
            above = medians.get((load, rows[-2]["engine"])) if len(rows) > 1 else None
            chained = name[:2] in ("+ ", "- ") or name == base
            rows[-1]["of the row above"] = (
                medians[load, name] / above if above and chained else None
            )
    for row in rows:
        if "of the row above" in row:
            load = f"{row['sampling']} {row['requests']}"
            whole = medians.get((load, base))
            row[f"of {base}"] = medians[load, row["engine"]] / whole if whole else None
    return rows


def _mean(runs: Sequence[dict[str, Any]], kind: str) -> float | None:
    figures = [figure for run in runs for figure in run[kind]]
    return sum(figures) / len(figures) if figures else None


def _stages(engine: dict[str, Any], trace: Path) -> list[dict[str, Any]]:
    """How each stage of a traced engine spent the time in which it had requests, percent."""
    rows = []
    for stage in Run(read_trace(str(trace))).summary["stage_table"]:
        parts = {kind: 100 * stage["share"][kind] for kind in KINDS}
        kept = {key: engine[key] for key in ("KV tokens", "cores")}
        rows.append({"engine": engine["engine"], "stage": stage["stage"], **parts, **kept})
    return rows


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SiPipeError as error:
        sys.exit(str(error))
