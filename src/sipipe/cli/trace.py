"""``sipipe trace``: what a recorded trace says, as a page, a table, JSON, CSV or for Perfetto."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sipipe.cli.parser import at_least, make_parser
from sipipe.errors import ConfigError

if TYPE_CHECKING:
    from sipipe.tools.report.summary import Run

__all__ = ["add_arguments", "main", "run"]

EPILOG = """\
  sipipe serve MODEL --pp 2 --trace traces/ours      record (Ctrl-C ends the trace)
  sipipe trace report traces/ours                    writes traces/ours/report.html
  sipipe trace report traces/ours --against traces/stock --output compare.html
  sipipe trace export traces/ours --perfetto ours.json.gz
  sipipe trace example /tmp/example                  two made-up traces, to look at the report
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``sipipe trace``."""
    commands = parser.add_subparsers(dest="action", metavar="report|export|example")

    report = commands.add_parser("report", help="account for the bubbles; write a page")
    report.add_argument("directory", metavar="DIR", help="directory of the trace")
    report.add_argument("--against", metavar="DIR", help="a second trace, shown beside the first")
    report.add_argument(
        "--output", "-o", metavar="FILE", help="the page (default: DIR/report.html)"
    )
    printed = report.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print figures as JSON, write no page")
    printed.add_argument("--csv", action="store_true", help="print the bubbles as CSV, no page")
    report.add_argument(
        "--detail",
        metavar="N",
        type=at_least(0, int),
        help="most intervals in a page (default: 4000000, about 12 MB); beyond, hosts' lanes go",
    )
    _window(report)

    export = commands.add_parser("export", help="convert a trace for another program")
    export.add_argument("directory", metavar="DIR", help="directory of the trace")
    export.add_argument(
        "--perfetto",
        metavar="FILE",
        required=True,
        help="Chrome trace JSON for ui.perfetto.dev; compressed if FILE ends in .gz",
    )
    _window(export)

    example = commands.add_parser("example", help="write two made-up traces to look at")
    example.add_argument("directory", metavar="DIR", help="gets DIR/sipipe and DIR/stock")
    example.add_argument(
        "--stages", metavar="N", type=at_least(1, int), default=4, help="pipeline stages (4)"
    )
    example.add_argument(
        "--iterations", metavar="N", type=at_least(10, int), default=2000, help="iterations (2000)"
    )


def _window(parser: argparse.ArgumentParser) -> None:
    for name, word in (("from", "begin"), ("to", "end")):
        parser.add_argument(
            f"--{name}",
            dest=word,
            metavar="SECONDS",
            type=at_least(0),
            help=f"{word} of the part (default: all)",
        )


def main(argv: Sequence[str]) -> int:
    """Run ``sipipe trace``; returns the exit status."""
    parser = make_parser("trace", __doc__.split("\n", 1)[0].split(": ", 1)[1], epilog=EPILOG)
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.action is None:
        parser.print_help()
        return 2
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Do what the parsed arguments say."""
    actions = {"report": _report, "export": _export, "example": _example}
    return actions[args.action](args)


def _load(directory: str, args: argparse.Namespace) -> Run:
    from sipipe.tools.report.reader import read_trace
    from sipipe.tools.report.summary import Run

    trace = read_trace(directory)
    for warning in trace.warnings:
        print(f"sipipe: {warning}", file=sys.stderr)
    return Run(trace, args.begin, args.end)


def _report(args: argparse.Namespace) -> int:
    runs = [_load(args.directory, args)]
    if args.against is not None:
        runs.append(_load(args.against, args))
    if args.json:
        json.dump({"runs": [run.summary for run in runs]}, sys.stdout, indent=1)
        print()
        return 0
    if args.csv:
        from sipipe.tools.report.export import write_csv

        write_csv(runs, sys.stdout)
        return 0
    from sipipe.tools.report.encode import DETAIL
    from sipipe.tools.report.render import render

    path = Path(args.output or Path(args.directory) / "report.html")
    page = render(runs, DETAIL if args.detail is None else args.detail)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None
    _print_bubbles(runs)
    print(f"written to {path} ({len(page) / 1e6:.1f} MB)")
    return 0


def _print_bubbles(runs: list[Run]) -> None:
    from rich.console import Console
    from rich.table import Table

    from sipipe.tools.report.accounting import KINDS

    for summary in (run.summary for run in runs):
        table = Table(
            title=f"{summary['label']}: {summary['iterations']:,} iterations in "
            f"{summary['wall_s']:.2f} s, {summary['tokens_per_s']:,.0f} tokens/s",
        )
        table.add_column("stage")
        for kind in KINDS:
            table.add_column(kind.replace("_", " "), justify="right")
        rows = [
            (f"{s['stage']}" + (f".{s['rank']}" if s["rank"] else ""), s["share"])
            for s in summary["stage_table"]
        ]
        for name, share in [*rows, ("all", summary["share"])]:
            table.add_row(name, *(f"{share[kind]:.1%}" for kind in KINDS))
        Console().print(table)


def _export(args: argparse.Namespace) -> int:
    from sipipe.tools.report.export import write_perfetto

    path = Path(args.perfetto)
    count = write_perfetto(_load(args.directory, args), path)
    print(f"{count:,} slices written to {path}; open it at https://ui.perfetto.dev")
    return 0


def _example(args: argparse.Namespace) -> int:
    from sipipe.tools.report.example import Example, write_example

    base = Path(args.directory)
    for name, stock in (("sipipe", False), ("stock", True)):
        spec = Example(
            stages=args.stages,
            iterations=args.iterations,
            stock=stock,
            inflight=args.stages if stock else args.stages + 1,
        )
        try:
            write_example(base / name, spec)
        except OSError as error:
            raise ConfigError(f"{base / name}: {error.strerror}") from None
    print(
        f"two made-up traces; now: sipipe trace report {base / 'sipipe'} --against {base / 'stock'}"
    )
    return 0
