"""The tables that ``sipipe plan`` prints."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from sipipe.tools.planner.calibration import Calibration
from sipipe.tools.planner.placement import kv_bytes_per_token
from sipipe.tools.planner.plan import Choice, Plan, Prediction
from sipipe.tools.planner.report import SEVERAL_HOSTS, serve_commands
from sipipe.tools.planner.traces import LoopCheck

_NO_LOOP = "the traces hold no steady decoding to compare a whole prediction with"


def print_tables(
    plan: Plan, calibration: Calibration | None, checks: Sequence[LoopCheck], *, details: bool
) -> None:
    """The ranking, what was ruled out, notes, and the serve command."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=140)
    facts, cluster = plan.facts, plan.cluster
    kv = kv_bytes_per_token(facts, plan.workload.kv_element_bytes) / 1024
    between = (
        f", {cluster.network.adapters} x {cluster.network.gigabits:g} Gb/s between hosts"
        if cluster.hosts > 1
        else ""
    )
    console.print(
        f"{facts.name}: {facts.parameters / 1e9:.1f}B parameters, {facts.layers} layers, "
        f"{kv:.0f} KiB of KV cache a token"
    )
    console.print(
        f"{cluster.hosts} host(s) of {cluster.devices_per_host} x {cluster.device.name}, "
        f"{cluster.device.link.name}{between}"
    )
    if calibration is not None:
        console.print(_fit_table(calibration))
        console.print(_loop_table(checks) if checks else _NO_LOOP)
    if plan.choices:
        console.print(_choice_table(plan, console.width))
        if details:
            console.print(_detail_table(plan))
    if plan.rejected:
        console.print("ruled out:")
        for reject in plan.rejected:
            console.print(f"  P{reject.p}T{reject.t}  {reject.reason}")
    if plan.best is None:
        console.print("no (p, t) of this cluster serves this workload")
        return
    for note in sorted({note for c in plan.choices for note in c.best.unmeasured}):
        console.print(f"* {note}")
    if calibration is None:
        console.print(
            "predicted from data sheets, checked against nothing of yours: compare rows, and "
            "calibrate (--calibrate DIR) before relying on a number"
        )
    console.print()
    for command in serve_commands(plan, plan.best):
        print(command)
    if cluster.hosts > 1:
        console.print(SEVERAL_HOSTS)


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: str, title: str | None = None
) -> Table:
    """``rows`` under ``columns``, numbers to the right and the column ``left`` to the left."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=title)
    for name in columns:
        table.add_column(name, justify="left" if name == left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _choice_table(plan: Plan, width: int) -> Table:
    """The ranking; in a narrow terminal without what can be left out."""
    columns = ["p", "t", "tok/s", "TPOT ms", "running", "KV tokens", "idle", "limited by"]
    columns += ["baseline tok/s", "TPOT ms", "idle", "gain"]
    shown = [index for index in range(len(columns)) if width >= 118 or index not in (5, 9, 10)]
    rows = [_cells(choice) for choice in plan.choices]
    return _table(
        [columns[index] for index in shown],
        [[row[index] for index in shown] for row in rows],
        left="limited by",
    )


def _cells(choice: Choice) -> list[str]:
    def shown(prediction: Prediction | None) -> list[str]:
        if prediction is None:
            return ["over budget" if "budget" in choice.baseline_reason else "none", "", ""]
        idle = prediction.iteration.idle
        return [f"{prediction.throughput:,.0f}", f"{prediction.tpot * 1e3:.1f}", f"{idle:.0%}"]

    rate, delay, idle = shown(choice.best)
    best, mark = choice.best, " *" if choice.best.unmeasured else ""
    return [
        *(str(choice.p), str(choice.t), rate, delay),
        f"{choice.best.batch:,}",
        f"{choice.memory.kv_tokens:,}",
        idle,
        f"{best.iteration.limit}; {best.capped_by}{mark}",
        *shown(choice.baseline),
        "" if choice.gain is None else f"{choice.gain:.2f}x",
    ]


def _detail_table(plan: Plan) -> Table:
    """Memory and communication per device, and both engines' bubbles by kind."""
    columns = ["p", "t", "weights GB", "KV GB", "sent MB a token of all", "hops between hosts"]
    columns += ["idle: imbalance", "intra-stage", "inter-stage", "starved"]
    rows = []
    for choice in plan.choices:
        memory = choice.memory
        cache = memory.available - memory.weights - memory.workspace
        device = [
            *(str(choice.p), str(choice.t)),
            *(f"{memory.weights / 1e9:.1f}", f"{cache / 1e9:.1f}"),
            f"{choice.communication_bytes / 1e6:,.1f}",
            str(choice.placement.crossings),
        ]
        rows.append(device + _idle(choice.best))
        if choice.baseline is not None:
            rows.append([*[""] * 5, choice.baseline.engine.key, *_idle(choice.baseline)])
    return _table(columns, rows, left="", title="per device")


def _idle(prediction: Prediction) -> list[str]:
    return [f"{share:.0%}" for share in prediction.iteration.bubbles.values()]


def _loop_table(checks: Sequence[LoopCheck]) -> Table:
    columns = ["engine", "p", "t", "in flight", "a microbatch", "measured ms", "predicted ms"]
    rows = [
        [
            check.engine,
            *(str(number) for number in (check.p, check.t, check.inflight, check.batch)),
            f"{check.measured * 1e3:.2f}",
            f"{check.predicted * 1e3:.2f}",
            f"{check.error:+.0%}",
        ]
        for check in checks
    ]
    return _table([*columns, "error"], rows, left="engine", title="the traced runs themselves")


def _fit_table(calibration: Calibration) -> Table:
    columns = ["phase", "records", "mean ms", "median error", "90 % error", "batch seen"]
    rows = [
        [
            fit.phase,
            f"{fit.count:,}",
            f"{fit.mean_seconds * 1e3:.3f}",
            f"{fit.median_error:.0%}",
            f"{fit.high_error:.0%}",
            f"{fit.batch_range[0]:g}-{fit.batch_range[1]:g}",
        ]
        for fit in calibration.fits.values()
    ]
    return _table(columns, rows, left="phase", title="calibration")
