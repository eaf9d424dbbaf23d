"""Throughput and time per output token over (p, t), drawn as one SVG file.

Written by hand because the picture is two columns of bars: no plotting package is needed for it,
and a browser, an editor or a report shows it as it is. Every bar has its number, so there are no
axes. Colours are a colour-blind-safe pair, readable on light and dark pages.
"""

from html import escape

from sipipe.tools.planner.plan import OURS, Choice, Plan

_COLOURS, _BUDGET = ("#0072b2", "#e69f00"), "#d55e00"
_LEFT, _TOP, _ROW, _BAR = 84, 118, 52, 20
_WIDTH, _SECOND = 300, 500
"""Pixels of the longest bar, and where the second column begins."""
_STYLE = """
  svg { background: #ffffff; font: 13px system-ui, sans-serif; }
  text { fill: #1a1a1a; } .faint { fill: #5a5a5a; } .value { font-size: 11px; }
  .title { font-size: 16px; }
  @media (prefers-color-scheme: dark) {
    svg { background: #16181c; } text { fill: #ececec; } .faint { fill: #a9a9a9; }
  }
"""


def draw(plan: Plan) -> str:
    """The picture as SVG text: throughput to the left, TPOT to the right, two bars per (p, t).

    Degrees stand in order of p; those ruled out keep their place with a dash, so that the shape
    over (p, t) stays readable. The latency budget is a dashed line.
    """
    rows: dict[tuple[int, int], list[Choice | None]] = {
        degree: [None, None]
        for degree in sorted(
            {(one.p, one.t) for one in plan.choices} | {(one.p, one.t) for one in plan.rejected}
        )
    }
    for choice in plan.choices:
        rows[choice.p, choice.t][choice.engine.key != OURS] = choice
    fastest = max((one.throughput for one in plan.choices), default=1.0)
    slowest = max((one.tpot for one in plan.choices), default=1.0)
    cluster, workload = plan.cluster, plan.workload
    caption = (
        f"{cluster.devices} x {cluster.device.name}, {cluster.hosts} host"
        f"{'s' if cluster.hosts > 1 else ''}, {workload.input} tokens in, {workload.output} out"
    )
    stock = plan.fastest(False)
    other = stock.engine.name if stock else "baseline"
    parts = [
        _text(_LEFT, 26, plan.facts.name, "title"),
        _text(_LEFT, 46, caption, "faint"),
        *(_bar(_LEFT + 90 * side, 58, 12, side) for side in (0, 1)),
        *(_text(_LEFT + 18 + 90 * side, 71, name) for side, name in enumerate(("SiPipe", other))),
        _text(_LEFT, _TOP - 12, "output tokens/s"),
        _text(_SECOND, _TOP - 12, "time per output token, ms (tick: one sequence alone)"),
    ]
    bottom = _TOP + _ROW * len(rows)
    for top, ((p, t), pair) in zip(range(_TOP, bottom, _ROW), rows.items(), strict=True):
        parts.append(_text(_LEFT - 60, top + 24, f"P{p}T{t}"))
        for side, prediction in enumerate(pair):
            y = top + _BAR * side
            if prediction is None:
                parts += [_text(x, y + 14, "–", "value") for x in (_LEFT + 4, _SECOND + 4)]
                continue
            for x, value, share in (
                (_LEFT, f"{prediction.throughput:,.0f}", prediction.throughput / fastest),
                (_SECOND, f"{prediction.tpot * 1e3:.3g}", prediction.tpot / slowest),
            ):
                parts.append(_bar(x, y, share * _WIDTH, side))
                parts.append(_text(x + share * _WIDTH + 5, y + 14, value, "value"))
            tick = _SECOND + prediction.lowest_tpot / slowest * _WIDTH
            parts.append(
                f'<path d="M{tick:.1f} {y}v{_BAR - 2}" stroke="#ffffff" stroke-width="2"/>'
            )
    if workload.tpot_slo <= slowest * 1.1:
        end = _SECOND + workload.tpot_slo / slowest * _WIDTH
        line = (
            f'<path d="M{end:.1f} {_TOP - 4}V{bottom}" stroke="{_BUDGET}" stroke-dasharray="6 4"/>'
        )
        parts += [line, _text(end, bottom + 14, f"budget {workload.tpot_slo * 1e3:g} ms", "value")]
    if best := plan.best:
        text = (
            f"Fastest: {best.engine.name}, P{best.p}T{best.t}, {best.batch} sequences, "
            f"{best.iteration.inflight} microbatches in flight"
        )
        parts.append(_text(_LEFT, bottom + 32, text, "faint"))
    if plan.rejected:
        text = f"– : ruled out ({len(plan.rejected)} of {2 * len(rows)}); the table says why"
        parts.append(_text(_LEFT, bottom + 50, text, "faint"))
    size = f'width="{_SECOND + _WIDTH + 100}" height="{bottom + 66}"'
    label = escape(f"{plan.facts.name} on {caption}")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, side: int) -> str:
    size = f'width="{width:.1f}" height="{_BAR - 2}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{_COLOURS[side]}"/>'
