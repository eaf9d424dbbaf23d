"""``sipipe top``: a live view of a running server: stages, samplers, bubbles, tokens per second."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sipipe.cli.parser import at_least, make_parser
from sipipe.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from sipipe.observe.poll import Poll

__all__ = ["add_arguments", "main", "run"]

BAR = 24
STYLES = {
    "busy": "blue",
    "load_imbalance": "yellow",
    "intra_stage": "red",
    "inter_stage": "magenta",
    "unscheduled": "bright_black",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``sipipe top``."""
    parser.add_argument(
        "--pid",
        metavar="PID",
        type=int,
        help="a process of the server, where several run on this machine",
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=at_least(0.05),
        default=1.0,
        help="between two views (1)",
    )
    parser.add_argument("--once", action="store_true", help="print one view, and stop")
    parser.add_argument("--json", action="store_true", help="one JSON object a view, for programs")


def main(argv: Sequence[str]) -> int:
    """Run ``sipipe top``; returns the exit status."""
    parser = make_parser("top", "Live view of a running server of this user, on this machine.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Do what the parsed arguments say."""
    poll = _open(args.pid)
    rates(poll)  # rates need two polls
    if args.once:
        time.sleep(args.interval)
        _print(rates(poll), args.json)
        return 0
    if args.json or not sys.stdout.isatty():
        while poll.page.alive():
            time.sleep(args.interval)
            _print(rates(poll), args.json)
        return 0
    return _live(poll, args.interval)


def _open(pid: int | None) -> Poll:
    from sipipe.observe.live import find
    from sipipe.observe.poll import Poll

    pages = find(pid=pid)
    if not pages:
        where = "" if pid is None else f" under process {pid}"
        raise ResourceError(
            f"no running SiPipe server of this user found{where}; start one with sipipe serve"
        )
    if len(pages) > 1:
        found = ", ".join(f"{p.header.pid} ({p.header.model or 'model unknown'})" for p in pages)
        raise ConfigError(f"several servers run here; choose one with --pid: {found}")
    return Poll(pages[0])


def rates(poll: Poll) -> dict[str, Any]:
    """What has happened a second since the poll before; the object that ``--json`` prints."""
    from sipipe.observe.live import BUBBLES, Word

    header = poll.page.header
    executor, *others = poll.blocks()
    stages, samplers = [], []
    for block in others:
        if block.role == "stage":
            stages.append(
                {
                    "index": block.index,
                    "rank": block.rank,
                    # What these shares leave of 1 is not accounted for yet.
                    "busy": block.share(Word.BUSY_NS),
                    "bubbles": {kind: block.share(word) for kind, word in BUBBLES.items()},
                    "microbatches_per_s": block.rate(Word.BATCHES),
                    "forward_ms": block.main_ns(Word.BATCHES) / 1e6,
                    "iteration": block.last_iteration,
                    "queues": block.queues,
                }
            )
        else:
            samplers.append(
                {
                    "index": block.index,
                    "busy": block.share(Word.MAIN_NS),
                    "sequences_per_s": block.rate(Word.SEQUENCES),
                    "us_per_sequence": block.main_ns(Word.SEQUENCES) / 1e3,
                    "queue": block.queues["logits"],
                }
            )
    return {
        "model": header.model,
        "pid": header.pid,
        "seconds": executor.span_ns / 1e9,
        "tokens_per_s": executor.rate(Word.TOKENS),
        "iterations_per_s": executor.rate(Word.BATCHES),
        "inflight": executor.words[Word.INFLIGHT],
        "limit": header.inflight,
        "running": executor.words[Word.RUNNING],
        "waiting": executor.words[Word.WAITING],
        "fallbacks": executor.words[Word.FALLBACKS],
        "restarts": executor.words[Word.RESTARTS],
        "stages": stages,
        "samplers": samplers,
    }


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found), flush=True)
    else:
        from rich.console import Console

        Console().print(render(found))


def _live(poll: Poll, interval: float) -> int:
    from rich.live import Live

    with Live(render(rates(poll)), refresh_per_second=8, screen=True) as live:
        while poll.page.alive():
            time.sleep(interval)
            live.update(render(rates(poll)))
    print("sipipe top: the server has ended")
    return 0


def render(found: dict[str, Any]) -> RenderableType:
    """One frame."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble(
        ("SiPipe ", "bold"),
        f"{found['model'] or 'server'} (pid {found['pid']})   ",
        (f"{found['tokens_per_s']:,.0f} tokens/s", "bold green"),
        f"   {found['iterations_per_s']:,.1f} iterations/s   in flight {found['inflight']}/{found['limit']}"
        f"   running {found['running']}   waiting {found['waiting']}",
    )
    stages = Table(box=None, pad_edge=False)
    for name in ("stage", "device", "busy", "imbalance", "intra", "inter", "unsched.", "forward"):
        stages.add_column(name, justify="left" if name in ("stage", "device") else "right")
    stages.columns[1].min_width = BAR
    stages.add_column("queued", justify="right")
    stages.add_column("iter.", justify="right")
    for stage in found["stages"]:
        stages.add_row(
            f"{stage['index']}" + (f".{stage['rank']}" if stage["rank"] else ""),
            _bar(stage),
            f"{stage['busy']:.1%}",
            *(f"{share:.1%}" for share in stage["bubbles"].values()),
            f"{stage['forward_ms']:.2f} ms",
            "/".join(map(str, stage["queues"].values())),
            str(stage["iteration"]),
        )
    parts: list[RenderableType] = [head, Text(), stages, Text()]
    if found["samplers"]:
        samplers = Table(box=None, pad_edge=False)
        for name in ("sampler", "busy", "sequences/s", "µs/sequence", "queue"):
            samplers.add_column(name, justify="left" if name == "sampler" else "right")
        for sampler in found["samplers"]:
            samplers.add_row(
                str(sampler["index"]),
                f"{sampler['busy']:.1%}",
                f"{sampler['sequences_per_s']:,.0f}",
                f"{sampler['us_per_sequence']:.1f}",
                str(sampler["queue"]),
            )
        parts += [samplers, Text()]
    keys = Text.assemble(
        *(part for kind, style in STYLES.items() for part in (("■ ", style), f"{_name(kind)}  "))
    )
    parts += [keys, Text(f"fallbacks {found['fallbacks']}   restarts {found['restarts']}")]
    return Group(*parts)


def _name(kind: str) -> str:
    return kind.replace("_", " ")


def _bar(stage: dict[str, Any]) -> Text:
    """The stage's time as a bar, ``BAR`` cells wide."""
    from rich.text import Text

    text, used = Text(), 0
    shares = {"busy": stage["busy"], **stage["bubbles"]}
    total = 0.0
    for kind, share in shares.items():
        total += share
        cells = min(BAR, round(total * BAR)) - used
        text.append("█" * cells, style=STYLES[kind])
        used += cells
    text.append("·" * (BAR - used), style="dim")
    return text
