"""Throughput and time per output token over (p, t), drawn as one SVG file.

Written by hand because the picture is two rows of bars: no plotting package is needed for it, and
a browser, an editor or a report shows it as it is. Colours are a colour-blind-safe pair, readable
on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from sipipe.tools.planner.plan import Choice, Plan, Prediction

__all__ = ["draw"]

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

Series = Sequence[tuple[float | None, float | None]]


def draw(plan: Plan) -> str:
    """The picture as SVG text: throughput above, TPOT below, a group of two bars per (p, t).

    Degrees stand in order of p; those ruled out keep their place with a dash, so that the shape
    over (p, t) stays readable. The latency budget is a dashed line.
    """
    degrees = sorted(
        [(choice.p, choice.t, choice) for choice in plan.choices]
        + [(reject.p, reject.t, None) for reject in plan.rejected],
        key=lambda entry: entry[0],
    )
    width = _LEFT + _GROUP * max(4, len(degrees)) + 30
    height = _TOP + 2 * _PANEL + _GAP + 92
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"',
        f' viewBox="0 0 {width} {height}" role="img" aria-label="{escape(_caption(plan))}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="26">{escape(plan.facts.name)}</text>',
        f'<text class="faint" x="{_LEFT}" y="46">{escape(_cluster(plan))}</text>',
        *_legend(plan),
    ]
    names = [f"P{p}T{t}" for p, t, _ in degrees]
    choices = [choice for _, _, choice in degrees]
    pairs = [(c.best, c.baseline) if c else (None, None) for c in choices]
    rates = [(a.throughput if a else None, b.throughput if b else None) for a, b in pairs]
    delays = [(a.tpot * 1e3 if a else None, b.tpot * 1e3 if b else None) for a, b in pairs]
    second = _TOP + _PANEL + _GAP
    parts += _panel(_TOP, "output tokens/s", names, rates, width)
    parts += _panel(
        second, "time per output token, ms (tick: one sequence alone)", names, delays, width
    )
    parts += _ticks(second, pairs, _ceiling(delays))
    if not math.isinf(plan.workload.tpot_slo):
        parts += _budget(second, delays, plan.workload.tpot_slo * 1e3, width)
    parts += _footer(choices, second + _PANEL + 44, plan)
    return "\n".join([*parts, "</svg>", ""])


def _caption(plan: Plan) -> str:
    return f"{plan.facts.name} on {_cluster(plan)}"


def _cluster(plan: Plan) -> str:
    cluster, workload = plan.cluster, plan.workload
    hosts = f"{cluster.hosts} host{'s' if cluster.hosts > 1 else ''}"
    return (
        f"{cluster.devices} x {cluster.device.name}, {hosts}, "
        f"{workload.input} tokens in, {workload.output} out"
    )


def _legend(plan: Plan) -> list[str]:
    other = next((c.baseline.engine.name for c in plan.choices if c.baseline), "baseline")
    entries = [(_OURS, "SiPipe"), (_BASE, other)]
    parts, x = [], _LEFT
    for colour, name in entries:
        parts.append(f'<rect x="{x}" y="{_TOP - 62}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{_TOP - 51}">{escape(name)}</text>')
        x += 40 + 8 * len(name)
    return parts


def _ceiling(values: Series) -> float:
    """A round number with some room above all values."""
    top = 1.04 * max([value for pair in values for value in pair if value], default=1.0)
    step = 10.0 ** math.floor(math.log10(top))
    return next(
        step * factor
        for factor in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10, 12)
        if step * factor >= top
    )


def _number(value: float) -> str:
    if value >= 9_950:
        return f"{value / 1000:.1f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _panel(top: int, title: str, names: list[str], values: Series, width: int) -> list[str]:
    ceiling = _ceiling(values)
    bottom = top + _PANEL
    parts = [f'<text x="{_LEFT}" y="{top - 14}">{title}</text>']
    for tick in range(5):
        y = bottom - _PANEL * tick / 4
        kind = "axis" if tick == 0 else "grid"
        parts.append(
            f'<line class="{kind}" x1="{_LEFT}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="faint" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{_number(ceiling * tick / 4) if tick else '0'}</text>"
        )
    for index, (name, pair) in enumerate(zip(names, values, strict=True)):
        middle = _LEFT + _GROUP * (index + 0.5)
        parts.append(f'<text x="{middle}" y="{bottom + 18}" text-anchor="middle">{name}</text>')
        for side, (value, colour) in enumerate(zip(pair, (_OURS, _BASE), strict=True)):
            parts += _bar(middle + (side - 1) * 46 + 2, bottom, value, ceiling, colour)
    return parts


def _bar(x: float, bottom: int, value: float | None, ceiling: float, colour: str) -> list[str]:
    label, high = ("–", 0.0) if value is None else (_number(value), _PANEL * value / ceiling)
    y = bottom - high
    return [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="42" height="{high:.1f}" fill="{colour}"/>',
        f'<text class="value" x="{x + 21:.1f}" y="{y - 4:.1f}" text-anchor="middle">{label}</text>',
    ]


def _ticks(
    top: int, pairs: Sequence[tuple[Prediction | None, Prediction | None]], ceiling: float
) -> list[str]:
    """A mark on every bar at the delay of a single running sequence, the lowest there is."""
    parts = []
    for index, pair in enumerate(pairs):
        for side, prediction in enumerate(pair):
            if prediction is not None:
                x = _LEFT + _GROUP * (index + 0.5) + (side - 1) * 46 + 2
                y = top + _PANEL * (1 - prediction.lowest_tpot * 1e3 / ceiling)
                parts.append(
                    f'<rect x="{x - 3:.1f}" y="{y - 1:.1f}" width="48" height="3" '
                    'fill="#ffffff" stroke="#1a1a1a" stroke-width="0.8"/>'
                )
    return parts


def _budget(top: int, delays: Series, budget: float, width: int) -> list[str]:
    ceiling = _ceiling(delays)
    if budget > ceiling:
        return []
    y = top + _PANEL * (1 - budget / ceiling)
    return [
        f'<line x1="{_LEFT}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_SLO}"',
        ' stroke-width="1.5" stroke-dasharray="6 4"/>',
        f'<text class="value" x="{width - 22}" y="{top - 14}" text-anchor="end">',
        f"dashed: budget {budget:g} ms</text>",
    ]


def _footer(choices: Sequence[Choice | None], y: int, plan: Plan) -> list[str]:
    best = plan.best
    out = sum(choice is None for choice in choices)
    lines = []
    if best is not None:
        lines.append(
            f"Best: P{best.p}T{best.t}, {best.best.batch} sequences, "
            f"{best.best.iteration.inflight} microbatches in flight, {best.samplers} samplers"
        )
    if out:
        lines.append(f"– : ruled out ({out} of {len(choices)}); the table says why")
    return [
        f'<text class="faint" x="{_LEFT}" y="{y + 18 * index}">{escape(line)}</text>'
        for index, line in enumerate(lines)
    ]
