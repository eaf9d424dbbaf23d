"""``sipipe bench compare``: two results of ``sipipe bench`` side by side."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sipipe.cli import console
from sipipe.cli.bench_answer import LOADS, figure
from sipipe.cli.parser import make_parser
from sipipe.errors import ConfigError
from sipipe.tools.report.render import render_load

COMPARED = ("tok/s", "goodput/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
NEEDED = ("command", "machine", "note", "rows", "title")


def compare(argv: Sequence[str]) -> int:
    """Print the second result's figures as parts of the first's; returns the exit status."""
    parser = make_parser(
        "bench compare",
        "Compare two results of sipipe bench: its --json, or pages of its --output.",
        usage="sipipe bench compare FIRST SECOND [--output FILE]",
    )
    parser.add_argument("first", metavar="FIRST")
    parser.add_argument("second", metavar="SECOND")
    parser.add_argument("--output", metavar="FILE", help="also a page (HTML) with both")
    args = parser.parse_args(argv)
    if args.output:
        check_writable("--output", args.output)
    first = read(args.first)
    second = read(args.second)
    names = Path(args.first).stem, Path(args.second).stem
    if names[0] == names[1]:
        names = args.first, args.second
    rows = compared(first["rows"], second["rows"])
    if not rows:
        raise ConfigError(
            f"bench compare: {args.first} and {args.second} have no engine under the same load"
        )
    if args.output:
        write("--output", args.output, render_load(both(first, second, names)))
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = (["" if row[name] is None else f"{row[name]}" for name in columns] for row in rows)
    shown = console.table(columns, cells, left=("sampling", "engine"), pad_edge=True)
    shown.title = f"{names[1]}, in parts of {names[0]}"
    console.Console(width=max(130, console.Console().width)).print(shown)
    for name, result in zip(names, (first, second), strict=True):
        print(f"{name}: {result['command']}")
    return 0


def read(path: str) -> dict[str, Any]:
    """The result in a page or a JSON file. Raises ConfigError: there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"bench compare: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"bench compare: {path} is not UTF-8 text") from None
    page = DATA.search(text)
    try:
        result = json.loads(page[1] if page else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict) or not _is_result(result):
        raise ConfigError(
            f"bench compare: {path} is no result of sipipe bench: give a page of --output, or what "
            "--json printed"
        )
    return result


def _refuse(constant: str) -> NoReturn:
    """Take a NaN or an infinity for what it is not: a number of JSON."""
    raise ValueError(constant)


def _is_result(result: Mapping[str, Any]) -> bool:
    rows = result.get("rows")
    sentences = result.get("answers", [])
    return (
        all(name in result for name in NEEDED)
        and isinstance(result["machine"], dict)
        and isinstance(rows, list)
        and all(isinstance(row, dict) and _is_row(row) for row in rows)
        and isinstance(sentences, list)
        and all(isinstance(sentence, str) for sentence in sentences)
    )


def _is_row(row: Mapping[str, Any]) -> bool:
    named = {"engine", "sampling"} <= row.keys()
    return named and all(isinstance(cell, str | int | float | None) for cell in _key(row))


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row["sampling"], *(row.get(name) for name in LOADS), row["engine"])


def compared(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of the engines and loads that both have, each figure the second's as a part of the first's."""
    before = {_key(row): row for row in first}
    rows = []
    for row in second:
        other = before.get(_key(row))
        if other is None:
            continue
        made: dict[str, Any] = {"sampling": row["sampling"], "engine": row["engine"]}
        made |= {name: row.get(name) for name in LOADS}
        for name in COMPARED:
            after = figure(row.get(name))
            earlier = figure(other.get(name))
            made[name] = f"{after / earlier:.2f} ×" if after is not None and earlier else None
        rows.append(made)
    return rows


def both(
    first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """A result with the rows of two, whose engines have their result's name behind their own."""
    rows = [
        {**row, "engine": f"{row['engine']} ({name})"}
        for result, name in zip((first, second), names, strict=True)
        for row in result["rows"]
    ]
    sentences = [
        f"{name}: {sentence}"
        for result, name in zip((first, second), names, strict=True)
        for sentence in result.get("answers", ())
    ]
    return {
        **second,
        "title": " against ".join(names),
        "command": f"{names[0]}: {first['command']} · {names[1]}: {second['command']}",
        "answers": sentences,
        "rows": rows,
    }


def check_writable(option: str, path: str) -> None:
    """Refuse a file that cannot be written. Raises ConfigError: the option's directory or file."""
    file = Path(path)
    if not os.path.isdir(file.parent):
        raise ConfigError(f"bench: {option}: there is no directory {file.parent}")
    written = file if os.path.exists(file) else file.parent
    if os.path.isdir(file) or not os.access(written, os.W_OK):
        raise ConfigError(f"bench: {option}: no file can be written at {file}")


def write(option: str, path: str, text: str) -> None:
    """Write a file that an option names. Raises ConfigError: it cannot be written."""
    try:
        # A model's directory may have a name that is not UTF-8, and the figures took long.
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"bench: {option} {path}: {error.strerror}") from None
