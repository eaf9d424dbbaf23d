"""``sipipe top``: a live view of a running server: stages, samplers, tokens per second."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from sipipe.cli.console import Console, table
from sipipe.cli.parser import adder, at_least, make_parser
from sipipe.errors import ConfigError, ResourceError
from sipipe.observe.live import Word, find
from sipipe.observe.poll import Block, Poll

BAR = 20


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
        time.sleep(args.interval)  # wait: `--interval`; Ctrl-C
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
        first = render(after_interval())
        with Live(first, console=Console(), refresh_per_second=8, screen=True) as live:
            while poll.page.alive():
                live.update(render(after_interval()))
        print("sipipe top: the server has ended")
    return 0


def _open(pid: int | None) -> Poll:
    if not (pages := find(pid=pid)):
        where = "" if pid is None else f" under process {pid}"
        raise ResourceError(
            f"no running SiPipe server of this user found{where}; start one with sipipe serve (with "
            "one stage on a GPU vLLM's own executor runs it, without figures: docs/one-stage.md)"
        )
    if len(pages) > 1:
        found = ", ".join(f"{p.header.pid} ({p.header.model or 'model unknown'})" for p in pages)
        raise ConfigError(f"several engines run here; choose one with --pid: {found}")
    return Poll(pages[0])


def rates(poll: Poll) -> dict[str, Any]:
    """What has happened a second since the poll before; the object that ``--json`` prints."""
    header = poll.page.header
    executor, *others = poll.blocks()
    tokens = executor.grown[Word.TOKENS]
    return {
        "model": header.model,
        "pid": header.pid,
        "seconds": executor.span_ns / 1e9,
        "path": header.path,
        "idle_s": executor.idle_ns / 1e9,
        "tokens_per_s": executor.rate(Word.TOKENS),
        # Of the requests whose first token came; of the tokens, each for a request that runs.
        "ttft_ms": executor.per(Word.TTFT_NS, Word.FIRST_TOKENS) / 1e6,
        "tpot_ms": executor.words[Word.RUNNING] * executor.span_ns / 1e6 / tokens if tokens else 0,
        "iterations_per_s": executor.rate(Word.BATCHES),
        "inflight": executor.words[Word.INFLIGHT],
        "limit": header.inflight,
        "running": executor.words[Word.RUNNING],
        "waiting": executor.words[Word.WAITING],
        "restarts": executor.words[Word.RESTARTS],
        # Of drafts: how many a pass of a request that has any, and what part of them was drawn.
        "drafts": executor.per(Word.DRAFTS, Word.DRAFTED),
        "accepted": executor.per(Word.ACCEPTED, Word.DRAFTS),
        # Of any request: each pass has a token of its own.
        "tokens_a_pass": tokens / max(1, tokens - executor.grown[Word.ACCEPTED]),
        "stages": [_stage(block) for block in others if block.role == "stage"],
        "samplers": [_sampler(block) for block in others if block.role == "sampler"],
    }


def _stage(block: Block) -> dict[str, Any]:
    return {
        "index": block.index,
        "rank": block.rank,
        "busy": block.busy,
        "microbatches_per_s": block.rate(Word.BATCHES),
        "forward_ms": block.main_ns(Word.BATCHES) / 1e6,
        "iteration": block.last_iteration,
        "queues": block.queues,
    }


def _sampler(block: Block) -> dict[str, Any]:
    return {
        "index": block.index,
        "busy": block.busy,
        "sequences_per_s": block.rate(Word.SEQUENCES),
        "us_per_sequence": block.main_ns(Word.SEQUENCES) / 1e3,
        "queue": block.queues["logits"],
    }


def render(found: dict[str, Any]) -> RenderableType:
    """A view of 80 columns."""
    name = found["model"] or "server"
    head = Text.assemble(
        ("SiPipe ", "bold"), f"{name if len(name) < 50 else '…' + name[-49:]} (pid {found['pid']})\n",
        (f"{found['tokens_per_s']:,.0f} tokens/s", "bold green"),
        f"   {found['iterations_per_s']:,.1f} iterations/s"
        f"   TTFT {found['ttft_ms']:,.0f} ms   TPOT {found['tpot_ms']:,.1f} ms\n"
        f"in flight {found['inflight']}/{found['limit']}   running {found['running']}"
        f"   waiting {found['waiting']}   restarts {found['restarts']}",
        f"\ndrafts {found['drafts']:.1f} a pass   {found['accepted']:.0%} accepted"
        f"   {found['tokens_a_pass']:.2f} tokens a pass"
        if found["drafts"]
        else "",
    )  # fmt: skip
    stages = table(("stage", "device", "busy", "ms", "queue"), left=("stage", "device"))
    stages.columns[1].min_width = BAR
    for stage in found["stages"]:
        stages.add_row(
            f"{stage['index']}" + (f".{stage['rank']}" if stage["rank"] else ""),
            Text("█" * (full := round(stage["busy"] * BAR)), "blue").append(
                "·" * (BAR - full), "dim"
            ),
            f"{stage['busy']:.0%}",
            f"{stage['forward_ms']:.1f}",
            "/".join(map(str, stage["queues"].values())),
        )
    parts: list[RenderableType] = [head, Text(), stages, Text()]
    if found["samplers"]:
        columns = ("sampler", "busy", "sequences/s", "µs/sequence", "queue")
        samplers = table(columns, left=("sampler",))
        for sampler in found["samplers"]:
            samplers.add_row(
                str(sampler["index"]),
                f"{sampler['busy']:.0%}",
                f"{sampler['sequences_per_s']:,.0f}",
                f"{sampler['us_per_sequence']:.1f}",
                str(sampler["queue"]),
            )
        parts += [samplers, Text()]
    return Group(*parts, Text("Ctrl-C ends", "dim"))
