"""The tables that ``sipipe plan`` prints."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from sipipe.tools.planner.hardware import assumptions
from sipipe.tools.planner.placement import kv_bytes_per_token
from sipipe.tools.planner.plan import Choice, Plan
from sipipe.tools.planner.report import notes, serve_commands

_KINDS = {"greedy": "greedy", "all": "top-k, top-p, min-p and penalties"}


def print_tables(plans: Sequence[Plan]) -> None:
    """For each plan, which differ in the sampling alone, the ranking, what was ruled out, which
    engine is fastest, and the commands that start it."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=140)
    facts, cluster = plans[0].facts, plans[0].cluster
    kv = kv_bytes_per_token(facts, plans[0].workload.kv_element_bytes) / 1024
    network, between = cluster.network, ""
    if cluster.hosts > 1:
        between = f", {network.adapters} x {network.gigabits:g} Gb/s between hosts"
    console.print(
        f"{facts.name}: {facts.parameters / 1e9:.1f}B parameters, {facts.layers} layers, "
        f"{kv:.0f} KiB of KV cache a token"
    )
    console.print(
        f"{cluster.hosts} host(s) of {cluster.devices_per_host} x {cluster.device.name}, "
        f"{cluster.device.link.name}{between}"
    )
    for plan in plans:
        _print_plan(console, plan)
    if any(plan.choices for plan in plans):
        console.print(
            "computed from data sheets and assumed inputs (--assumptions lists them): ranges are "
            "between their ends; compare rows, and measure (sipipe bench) before relying on a number"
        )


def _print_plan(console: Console, plan: Plan) -> None:
    console.print()
    console.print(f"sampling: {_KINDS.get(plan.workload.sampling, plan.workload.sampling)}")
    if plan.choices:
        console.print(_choice_table(plan, console.width))
    ruled_out: dict[tuple[int, int, str], list[str]] = {}
    for reject in plan.rejected:
        ruled_out.setdefault((reject.p, reject.t, reject.reason), []).append(reject.engine)
    for (p, t, reason), engines in sorted(ruled_out.items()):
        console.print(f"ruled out: P{p}T{t} {' and '.join(engines)}: {reason}")
    if plan.best is None:
        console.print("no (p, t) of this cluster serves this workload")
        return
    console.print(_recommendation(plan, plan.best))
    for command in serve_commands(plan, plan.best):
        print(f"  {command}")
    for note in notes(plan, plan.best):
        console.print(f"  {note}")


def _recommendation(plan: Plan, best: Choice) -> str:
    """Which engine is fastest within the budget, and what the other one's best is worth."""
    ours, other = plan.fastest(True), plan.fastest(False)
    name = "SiPipe" if best is ours else f"stock vLLM ({best.engine.key})"
    text = f"fastest: {name}, P{best.p}T{best.t}"
    if ours is None or other is None or plan.gain is None:
        return f"{text}; {'SiPipe' if ours is None else 'stock vLLM'} has no row here"
    gain = plan.gain
    text += (
        f". SiPipe's best row (P{ours.p}T{ours.t}) / stock's (P{other.p}T{other.t}): "
        f"{gain.stated:.2f}x, from {gain.low:.2f} to {gain.high:.2f} with what is assumed of either"
    )
    close = gain.low < 1.0 < gain.high
    return text + (": the model cannot tell which is faster, measure both" if close else "")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str]) -> Table:
    """``rows`` under ``columns``, numbers to the right and the columns ``left`` to the left."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _choice_table(plan: Plan, width: int) -> Table:
    """The ranking; in a narrow terminal without what can be left out."""
    columns = ["engine", "p", "t", "tok/s", "range", "TPOT ms", "range", "running"]
    columns += ["KV tokens", "idle", "vocabulary", "limited by"]
    left_out = set() if width >= 110 else {6, 7, 9}
    if not any(choice.placement.shares_projection for choice in plan.choices):
        left_out.add(10)
    names, *rows = (
        [cell for index, cell in enumerate(row) if index not in left_out]
        for row in (columns, *map(_cells, plan.choices))
    )
    return _table(names, rows, left=("engine", "vocabulary", "limited by"))


def _cells(choice: Choice) -> list[str]:
    low, high = choice.slowest, choice.quickest
    # Tokens of the cache, and what share of them the layers' cut costs (-) or gains (+).
    share = f"{-choice.kv_loss:+.0%}"
    tokens = f"{choice.memory.kv_tokens:,}" + ("" if share[1:] == "0%" else f" ({share})")
    return [
        *(choice.engine.key, str(choice.p), str(choice.t)),
        *(f"{choice.throughput:,.0f}", f"{low.throughput:,.0f}-{high.throughput:,.0f}"),
        *(f"{choice.tpot * 1e3:.1f}", f"{high.delay * 1e3:.1f}-{low.delay * 1e3:.1f}"),
        *(f"{choice.batch:,}", tokens, f"{choice.iteration.idle:.0%}"),
        *(choice.vocabulary, f"{choice.iteration.limit}; {choice.capped_by}"),
    ]


def print_assumptions() -> None:
    """Every input that ``--assume`` takes."""
    columns = ["input", "value", "quickest", "slowest", "source"]
    rows = [
        [name, *(f"{number:g}" for number in numbers), source]
        for name, (*numbers, source) in assumptions().items()
    ]
    Console(highlight=False, markup=False).print(_table(columns, rows, left=("input", "source")))
