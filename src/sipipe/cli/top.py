"""``sipipe top``: a live view of a running server: stages, samplers, bubbles, tokens per second."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from sipipe.cli.parser import adder, at_least, make_parser
from sipipe.errors import ConfigError, ResourceError
from sipipe.observe.live import BUBBLES, Word, find
from sipipe.observe.poll import Block, Poll

BAR = 24
STYLES = {
    "busy": "blue",
    "load_imbalance": "yellow",
    "intra_stage": "red",
    "inter_stage": "magenta",
    "unscheduled": "bright_black",
}


def main(argv: Sequence[str]) -> int:
    parser = make_parser("top", "Live view of a running server of this user, on this machine.")
    add = adder(parser)
    add("--pid", int, None, "PID", "a process of the server, where several run on this machine")
    add("--interval", at_least(0.05), 1.0, "SECONDS", "between two views (1)")
    parser.add_argument("--once", action="store_true", help="print one view, and stop")
    parser.add_argument("--json", action="store_true", help="one JSON object a view, for programs")
    args = parser.parse_args(argv)

    poll = _open(args.pid)
    rates(poll)  # rates need two polls

    def after_interval() -> dict[str, Any]:
        time.sleep(args.interval)
        return rates(poll)

    def show(found: dict[str, Any]) -> None:
        if args.json:
            print(json.dumps(found), flush=True)
        else:
            Console().print(render(found))

    if args.once:
        show(after_interval())
    elif args.json or not sys.stdout.isatty():
        while poll.page.alive():
            show(after_interval())
    else:
        with Live(render(rates(poll)), refresh_per_second=8, screen=True) as live:
            while poll.page.alive():
                live.update(render(after_interval()))
        print("sipipe top: the server has ended")
    return 0


def _open(pid: int | None) -> Poll:
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
    header = poll.page.header
    executor, *others = poll.blocks()
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
        "stages": [_stage(block) for block in others if block.role == "stage"],
        "samplers": [_sampler(block) for block in others if block.role == "sampler"],
    }


def _stage(block: Block) -> dict[str, Any]:
    return {
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


def _sampler(block: Block) -> dict[str, Any]:
    return {
        "index": block.index,
        "busy": block.share(Word.MAIN_NS),
        "sequences_per_s": block.rate(Word.SEQUENCES),
        "us_per_sequence": block.main_ns(Word.SEQUENCES) / 1e3,
        "queue": block.queues["logits"],
    }


def render(found: dict[str, Any]) -> RenderableType:
    head = Text.assemble(
        ("SiPipe ", "bold"),
        f"{found['model'] or 'server'} (pid {found['pid']})   ",
        (f"{found['tokens_per_s']:,.0f} tokens/s", "bold green"),
        f"   {found['iterations_per_s']:,.1f} iterations/s   in flight {found['inflight']}/{found['limit']}"
        f"   running {found['running']}   waiting {found['waiting']}",
    )
    shares = ("busy", "imbalance", "intra", "inter", "unsched.")
    stages = _table(
        "stage", Column("device", min_width=BAR), *_figures(*shares, "forward", "queued", "iter.")
    )
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
        samplers = _table("sampler", *_figures("busy", "sequences/s", "µs/sequence", "queue"))
        for sampler in found["samplers"]:
            samplers.add_row(
                str(sampler["index"]),
                f"{sampler['busy']:.1%}",
                f"{sampler['sequences_per_s']:,.0f}",
                f"{sampler['us_per_sequence']:.1f}",
                str(sampler["queue"]),
            )
        parts += [samplers, Text()]
    keys = Text()
    for kind, style in STYLES.items():
        keys.append("■ ", style).append(f"{kind.replace('_', ' ')}  ")
    parts += [keys, Text(f"fallbacks {found['fallbacks']}   restarts {found['restarts']}")]
    return Group(*parts)


def _table(*columns: Column | str) -> Table:
    return Table(*columns, box=None, pad_edge=False)


def _figures(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _bar(stage: dict[str, Any]) -> Text:
    """The stage's time as a bar, ``BAR`` cells wide."""
    bar, end = Text(), 0.0
    for kind, share in {"busy": stage["busy"], **stage["bubbles"]}.items():
        end += share
        bar.append("█" * (min(BAR, round(end * BAR)) - len(bar)), STYLES[kind])
    return bar.append("·" * (BAR - len(bar)), "dim")
