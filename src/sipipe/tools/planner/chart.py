"""Throughput and time per output token over (p, t), drawn as one SVG file.

Written by hand because the picture is two rows of bars: no plotting package is needed for it, and
a browser, an editor or a report shows it as it is. Colours are a colour-blind-safe pair, readable
on light and dark pages.
"""

import math
from collections.abc import Sequence
from html import escape

from sipipe.tools.planner.plan import Choice, Plan

_OURS, _BASE, _SLO = "#0072b2", "#e69f00", "#d55e00"
_LEFT, _TOP, _PANEL, _GAP = 84, 128, 190, 78
_GROUP = 118
_STYLE = """
  svg { background: #ffffff; font: 13px system-ui, sans-serif; }
  text { fill: #1a1a1a; } .faint { fill: #5a5a5a; } .grid { stroke: #d9d9d9; }
  .axis { stroke: #5a5a5a; } .value { font-size: 11px; } .title { font-size: 16px; }
  @media (prefers-color-scheme: dark) {
    svg { background: #16181c; } text { fill: #ececec; } .faint { fill: #a9a9a9; }
    .grid { stroke: #363a40; } .axis { stroke: #a9a9a9; }
  }
"""

Pair = tuple[float | None, float | None]


def draw(plan: Plan) -> str:
    """The picture as SVG text: throughput above, TPOT below, a group of two bars per (p, t).

    Degrees stand in order of p; those ruled out keep their place with a dash, so that the shape
    over (p, t) stays readable. The latency budget is a dashed line.
    """
    degrees: dict[tuple[int, int], Choice | None] = {(r.p, r.t): None for r in plan.rejected}
    degrees |= {(choice.p, choice.t): choice for choice in plan.choices}
    degrees = dict(sorted(degrees.items()))
    width = _LEFT + _GROUP * max(4, len(degrees)) + 30
    height = _TOP + 2 * _PANEL + _GAP + 92
    cluster, workload = plan.cluster, plan.workload
    hosts = f"{cluster.hosts} host{'s' if cluster.hosts > 1 else ''}"
    caption = (
        f"{cluster.devices} x {cluster.device.name}, {hosts}, "
        f"{workload.input} tokens in, {workload.output} out"
    )
    label = escape(f"{plan.facts.name} on {caption}")
    names = [f"P{p}T{t}" for p, t in degrees]
    pairs = [(c.best, c.baseline) if c else (None, None) for c in degrees.values()]
    rates = [(a.throughput if a else None, b.throughput if b else None) for a, b in pairs]
    delays = [(a.tpot * 1e3 if a else None, b.tpot * 1e3 if b else None) for a, b in pairs]
    ceiling = _ceiling(delays)
    second = _TOP + _PANEL + _GAP
    below = "time per output token, ms (tick: one sequence alone)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"',
        f' viewBox="0 0 {width} {height}" role="img" aria-label="{label}">',
        f"<style>{_STYLE}</style>",
        _text(_LEFT, 26, plan.facts.name, kind="title"),
        _text(_LEFT, 46, caption, kind="faint"),
        *_legend(plan),
        *_panel(_TOP, "output tokens/s", names, rates, _ceiling(rates), width),
        *_panel(second, below, names, delays, ceiling, width),
    ]
    for index, pair in enumerate(pairs):
        for side, prediction in enumerate(pair):
            if prediction is not None:  # the delay of one running sequence, the lowest there is
                x = _bar_x(index, side) - 3
                y = second + _PANEL * (1 - prediction.lowest_tpot * 1e3 / ceiling) - 1
                edge = 'stroke="#1a1a1a" stroke-width="0.8"'
                parts.append(_rect(x, y, 48, 3, f'fill="#ffffff" {edge}'))
    budget = workload.tpot_slo * 1e3
    if budget <= ceiling:
        y = second + _PANEL * (1 - budget / ceiling)
        dashes = f'stroke="{_SLO}" stroke-width="1.5" stroke-dasharray="6 4"'
        what = f"dashed: budget {budget:g} ms"
        parts.append(_line(y, width, dashes))
        parts.append(_text(width - 22, second - 14, what, kind="value", anchor="end"))
    for index, line in enumerate(_footer(plan, len(degrees))):
        parts.append(_text(_LEFT, second + _PANEL + 44 + 18 * index, line, kind="faint"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: object, y: object, text: str, *, kind: str = "", anchor: str = "") -> str:
    before = f'class="{kind}" ' if kind else ""
    after = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text {before}x="{x}" y="{y}"{after}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, paint: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width}" height="{height:.1f}" {paint}/>'


def _line(y: float, width: int, paint: str) -> str:
    return f'<line x1="{_LEFT}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" {paint}/>'


def _legend(plan: Plan) -> list[str]:
    other = next((c.baseline.engine.name for c in plan.choices if c.baseline), "baseline")
    parts, x = [], _LEFT
    for colour, name in ((_OURS, "SiPipe"), (_BASE, other)):
        parts.append(_rect(x, _TOP - 62, 12, 12, f'fill="{colour}"'))
        parts.append(_text(x + 18, _TOP - 51, name))
        x += 40 + 8 * len(name)
    return parts


def _ceiling(values: Sequence[Pair]) -> float:
    """A round number with some room above all values."""
    top = 1.04 * max([value for pair in values for value in pair if value], default=1.0)
    step = 10.0 ** math.floor(math.log10(top))
    factors = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10, 12)
    return next(step * factor for factor in factors if step * factor >= top)


def _number(value: float) -> str:
    if value >= 9_950:
        return f"{value / 1000:.1f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bar_x(index: int, side: int) -> float:
    """Left edge of a bar: group ``index``, SiPipe's side 0 or the baseline's side 1."""
    return _LEFT + _GROUP * (index + 0.5) + (side - 1) * 46 + 2


def _panel(
    top: int, title: str, names: list[str], values: list[Pair], ceiling: float, width: int
) -> list[str]:
    bottom = top + _PANEL
    parts = [_text(_LEFT, top - 14, title)]
    for tick in range(5):
        y = bottom - _PANEL * tick / 4
        kind = "axis" if tick == 0 else "grid"
        parts.append(_line(y, width, f'class="{kind}"'))
        label = _number(ceiling * tick / 4) if tick else "0"
        parts.append(_text(_LEFT - 8, f"{y + 4:.1f}", label, kind="faint", anchor="end"))
    for index, (name, pair) in enumerate(zip(names, values, strict=True)):
        parts.append(_text(_LEFT + _GROUP * (index + 0.5), bottom + 18, name, anchor="middle"))
        for side, (value, colour) in enumerate(zip(pair, (_OURS, _BASE), strict=True)):
            x, high = _bar_x(index, side), _PANEL * (value or 0.0) / ceiling
            y = bottom - high
            parts.append(_rect(x, y, 42, high, f'fill="{colour}"'))
            label = "–" if value is None else _number(value)
            x, y = x + 21, y - 4
            parts.append(_text(f"{x:.1f}", f"{y:.1f}", label, kind="value", anchor="middle"))
    return parts


def _footer(plan: Plan, degrees: int) -> list[str]:
    lines = []
    if (best := plan.best) is not None:
        lines.append(
            f"Best: P{best.p}T{best.t}, {best.best.batch} sequences, "
            f"{best.best.iteration.inflight} microbatches in flight, {best.samplers} samplers"
        )
    if plan.rejected:
        lines.append(f"– : ruled out ({len(plan.rejected)} of {degrees}); the table says why")
    return lines
