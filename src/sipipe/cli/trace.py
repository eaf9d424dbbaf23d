"""``sipipe trace``: what a recorded trace says, as a page, a table, JSON or for Perfetto."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from sipipe.cli.console import Console
from sipipe.cli.parser import adder, at_least, make_parser
from sipipe.errors import ConfigError, tell
from sipipe.tools.report.accounting import WORKING
from sipipe.tools.report.export import write_perfetto
from sipipe.tools.report.reader import read_trace
from sipipe.tools.report.render import DETAIL, render
from sipipe.tools.report.summary import Run

EPILOG = """\
  sipipe serve MODEL --pp 2 --trace traces/ours      record (Ctrl-C ends the trace)
  sipipe trace report traces/ours                    writes traces/ours/report.html
  sipipe trace report traces/ours --against traces/stock --output compare.html
  sipipe trace export traces/ours --perfetto ours.json.gz
"""


def main(argv: Sequence[str]) -> int:
    """Report on a trace or export it; returns the exit status. 2: no action was named."""
    parser = make_parser(
        "trace",
        "What a recorded trace says, as a page, a table, JSON or for Perfetto.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(dest="action", metavar="report|export")

    report = commands.add_parser(
        "report", help="account for the bubbles; write a page", allow_abbrev=False
    )
    report.set_defaults(run=_report)
    report.add_argument("--against", metavar="DIR", help="a second trace, shown beside the first")
    report.add_argument("--output", "-o", metavar="FILE", help="the page (DIR/report.html)")
    report.add_argument("--json", action="store_true", help="print figures as JSON, write no page")
    most = "most intervals in a page (default: 4000000, about 12 MB); beyond, hosts' lanes go"
    adder(report)("--detail", at_least(0, int), DETAIL, "N", most)

    export = commands.add_parser(
        "export", help="convert a trace for another program", allow_abbrev=False
    )
    export.set_defaults(run=_export)
    file = "Chrome trace JSON for ui.perfetto.dev; compressed if FILE ends in .gz"
    export.add_argument("--perfetto", metavar="FILE", required=True, help=file)

    for command in (report, export):
        command.add_argument("directory", metavar="DIR", help="directory of the trace")
        for name, word in (("--from", "begin"), ("--to", "end")):
            text = f"{word} of the part (default: all)"
            command.add_argument(name, metavar="SECONDS", type=at_least(0), dest=word, help=text)

    args = parser.parse_args(argv)
    if args.action is None:
        parser.print_help()
        return 2
    args.run(args)
    return 0


def _load(directory: str, args: argparse.Namespace) -> Run:
    """The part of a trace that the options name."""
    trace = read_trace(directory)
    for warning in trace.warnings:
        tell(warning)
    return Run(trace, args.begin, args.end)


def _report(args: argparse.Namespace) -> None:
    """Write the page, or print JSON. Raises ConfigError: the page cannot be written."""
    runs = [_load(args.directory, args)]
    if args.against is not None:
        runs.append(_load(args.against, args))
        if runs[0].label == runs[1].label:
            # One engine twice. The user named the directories by what was changed.
            for run in runs:
                run.label = run.trace.directory
    if args.json:
        print(json.dumps({"runs": [run.summary for run in runs]}, indent=1))
        return
    path = Path(args.output or Path(args.directory) / "report.html")
    page = render(runs, args.detail)
    try:
        # Two traces of one engine have their directories' names, which may not be UTF-8.
        path.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None
    for run in runs:
        Console().print(bubbles(run))
        print(run.summary["next"])
    print(f"written to {path} ({len(page) / 1e6:.1f} MB)")


def bubbles(run: Run) -> Table:
    """A table of the parts of each stage's time, by kind."""
    summary = run.summary
    idle = f", {summary['idle_s']:.2f} s of them without requests" if summary["idle_s"] else ""
    title = (
        f"{summary['label']}: {summary['iterations']:,} iterations in "
        f"{summary['wall_s']:.2f} s{idle}, {summary['tokens_per_s']:,.0f} tokens/s"
    )
    table = Table("stage", title=title)
    for kind in WORKING:
        table.add_column(kind.replace("_", " "), justify="right")
    captions = []
    prefill = summary["prefill_efficiency"]
    if prefill is not None:
        captions.append(f"while prompts were computed, devices worked {prefill:.1%} of the time")
    drafts = summary["drafts"]
    if drafts is not None:
        captions.append(
            f"{drafts['verified']:,} drafts verified, {drafts['accepted']:.0%} accepted, "
            f"{drafts['a_pass']:.2f} tokens a pass"
        )
    table.caption = "; ".join(captions) or None
    all_stages = {"stage": "all", "rank": 0, "share": summary["share"]}
    for stage in [*summary["stage_table"], all_stages]:
        name = f"{stage['stage']}.{stage['rank']}" if stage["rank"] else f"{stage['stage']}"
        table.add_row(name, *(f"{stage['share'][kind]:.1%}" for kind in WORKING))
    return table


def _export(args: argparse.Namespace) -> None:
    """Convert a trace for Perfetto."""
    count = write_perfetto(_load(args.directory, args), Path(args.perfetto))
    print(f"{count:,} slices written to {args.perfetto}; open it at https://ui.perfetto.dev")
