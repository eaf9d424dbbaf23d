"""``sipipe top``: a live view of a running server: stages, samplers, tokens per second."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType, group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sipipe.cli.console import Console, table
from sipipe.cli.parser import adder, at_least, make_parser
from sipipe.errors import ConfigError, ResourceError
from sipipe.observe.live import Word, find
from sipipe.observe.poll import Block, Poll

BAR = 20
"""Characters of a stage's bar."""


def main(argv: Sequence[str]) -> int:
    """Show views until the server ends; returns the exit status 0."""
    parser = make_parser("top", "Live view of a running server of this user, on this machine.")
    add = adder(parser)
    add("--pid", int, None, "PID", "a process of the server, where several run on this machine")
    add("--interval", at_least(0.05), 1.0, "SECONDS", "between two views (1)")
    parser.add_argument("--once", action="store_true", help="print one view, and stop")
    parser.add_argument("--json", action="store_true", help="one JSON object a view, for programs")
    args = parser.parse_args(argv)

    poll = _open(args.pid)
    rates(poll)  # a rate is the difference of two polls

    def after_interval() -> dict[str, Any]:
        time.sleep(args.interval)  # wait: `--interval`; Ctrl-C
        return rates(poll)

    def show(figures: dict[str, Any]) -> None:
        if args.json:
            print(json.dumps(figures), flush=True)
        else:
            Console().print(render(figures))

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
    """A poll of the engine that runs on this machine, or of the one of which ``pid`` is a process.
    Raises ResourceError: there is none. ConfigError: there are several."""
    pages = find(pid=pid)
    if not pages:
        where = "" if pid is None else f" under process {pid}"
        raise ResourceError(
            f"no running SiPipe server of this user found{where}; start one with sipipe serve (with "
            "one stage on a GPU vLLM's own executor runs it, without figures: docs/one-stage.md)"
        )
    if len(pages) > 1:
        engines = ", ".join(
            f"{page.header.pid} ({page.header.model or 'model unknown'})" for page in pages
        )
        raise ConfigError(f"several engines run here; choose one with --pid: {engines}")
    return Poll(pages[0])


def rates(poll: Poll) -> dict[str, Any]:
    """Poll, and return rates and means since the poll before: the object that ``--json`` prints."""
    header = poll.page.header
    executor, *blocks = poll.blocks()
    tokens = executor.grown[Word.TOKENS]
    return {
        "model": header.model,
        "pid": header.pid,
        "seconds": executor.span_ns / 1e9,
        "path": header.path,
        "idle_s": executor.idle_ns / 1e9,
        "tokens_per_s": executor.rate(Word.TOKENS),
        # Means over the requests whose first token came, and over the tokens of running requests.
        "ttft_ms": executor.per(Word.TTFT_NS, Word.FIRST_TOKENS) / 1e6,
        "tpot_ms": executor.words[Word.RUNNING] * executor.span_ns / 1e6 / tokens if tokens else 0,
        "iterations_per_s": executor.rate(Word.BATCHES),
        "inflight": executor.words[Word.INFLIGHT],
        "limit": header.inflight,
        "running": executor.words[Word.RUNNING],
        "waiting": executor.words[Word.WAITING],
        "restarts": executor.words[Word.RESTARTS],
        # Drafts of a pass, over the requests that have any; and the part of them that was accepted.
        "drafts": executor.per(Word.DRAFTS, Word.DRAFTED),
        "accepted": executor.per(Word.ACCEPTED, Word.DRAFTS),
        # Over all requests. Each pass has a token that is no draft.
        "tokens_a_pass": tokens / max(1, tokens - executor.grown[Word.ACCEPTED]),
        "stages": [_stage(block) for block in blocks if block.role == "stage"],
        "samplers": [_sampler(block) for block in blocks if block.role == "sampler"],
    }


def _stage(block: Block) -> dict[str, Any]:
    """The figures of one rank of a stage."""
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
    """The figures of one sampler."""
    return {
        "index": block.index,
        "busy": block.busy,
        "sequences_per_s": block.rate(Word.SEQUENCES),
        "us_per_sequence": block.main_ns(Word.SEQUENCES) / 1e3,
        "queue": block.queues["logits"],
    }


@group()
def render(figures: dict[str, Any]) -> Iterator[RenderableType]:
    """A view of ``figures`` from :func:`rates`, in 80 columns."""
    yield _head(figures)
    yield Text()
    yield _stages_table(figures)
    yield Text()
    if figures["samplers"]:
        yield _samplers_table(figures)
        yield Text()
    yield Text("Ctrl-C ends", "dim")


def _head(figures: dict[str, Any]) -> Text:
    """The lines on the whole engine."""
    name = figures["model"] or "server"
    return Text.assemble(
        ("SiPipe ", "bold"), f"{name if len(name) < 50 else '…' + name[-49:]} (pid {figures['pid']})\n",
        (f"{figures['tokens_per_s']:,.0f} tokens/s", "bold green"),
        f"   {figures['iterations_per_s']:,.1f} iterations/s"
        # 0: no token came since the poll before, and there is no time to show.
        f"   TTFT {_number(figures['ttft_ms'], 0)} ms   TPOT {_number(figures['tpot_ms'], 1)} ms\n"
        f"in flight {figures['inflight']}/{figures['limit']}   running {figures['running']}"
        f"   waiting {figures['waiting']}   restarts {figures['restarts']}",
        f"\ndrafts {figures['drafts']:.1f} a pass   {figures['accepted']:.0%} accepted"
        f"   {figures['tokens_a_pass']:.2f} tokens a pass"
        if figures["drafts"]
        else "",
    )  # fmt: skip


def _number(value: float, digits: int) -> str:
    """``value`` with so many digits behind the point; a dash where it is 0."""
    return f"{value:,.{digits}f}" if value else "-"


def _stages_table(figures: dict[str, Any]) -> Table:
    """A row for each rank of each stage."""
    stages = table(("stage", "device", "busy", "ms", "queue"), left=("stage", "device"))
    stages.columns[1].min_width = BAR
    for stage in figures["stages"]:
        full = round(stage["busy"] * BAR)
        stages.add_row(
            f"{stage['index']}" + (f".{stage['rank']}" if stage["rank"] else ""),
            Text("█" * full, "blue").append("·" * (BAR - full), "dim"),
            f"{stage['busy']:.0%}",
            f"{stage['forward_ms']:.1f}",
            "/".join(map(str, stage["queues"].values())),
        )
    return stages


def _samplers_table(figures: dict[str, Any]) -> Table:
    """A row for each sampler."""
    columns = ("sampler", "busy", "sequences/s", "µs/sequence", "queue")
    samplers = table(columns, left=("sampler",))
    for sampler in figures["samplers"]:
        samplers.add_row(
            str(sampler["index"]),
            f"{sampler['busy']:.0%}",
            f"{sampler['sequences_per_s']:,.0f}",
            f"{sampler['us_per_sequence']:.1f}",
            str(sampler["queue"]),
        )
    return samplers
