"""The pictures of the paper's figures (SVG), each drawn from the rows that are kept of a figure.

Kinds of pictures: ``bars`` (output tokens/s of each row, with its range), ``cdf`` (of times per
output token and of first tokens, by percentiles), ``stages`` (how each stage spends its time, by the
trace ``TRACES/ROW`` that each row leaves), ``time`` (how busy CPUs and GPUs are over time),
``memory`` (MiB by process), ``lengths`` (time to the first token and prompt tokens/s over the prompt's
length).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any
from xml.sax.saxutils import escape

from sipipe.tools.report.accounting import KINDS

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
BUSY = ("cpu", "gpu")
DRAWN = {
    "bars": ("speeds",),
    "cdf": ("TPOT percentiles", "TTFT percentiles"),
    "time": ("busy over time",),
    "memory": ("memory by process",),
    "lengths": ("prompt", "ttft", "prompt tokens/s"),
}
"""What the picture of a kind shows of a row, beside its name and loads."""


def _label(row: dict[str, Any]) -> str:
    return f"{row['panel']}: {row['sampling']}, {row['requests']}"


def _svg(title: str, height: int, body: list[str], names: Sequence[str]) -> str:
    """A picture 720 wide, with a legend below."""
    for i, name in enumerate(names):
        x, y = 20 + i % 4 * 175, height + 14 + i // 4 * 16
        body.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_colour(i)}"/>')
        body.append(f'<text x="{x + 14}" y="{y}">{escape(name[:28])}</text>')
    tall = height + 24 + (len(names) + 3) // 4 * 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{tall}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="20" y="18" font-size="13">{escape(title)}</text>{"".join(body)}</svg>\n'
    )


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _bars(title: str, rows: list[dict[str, Any]]) -> str:
    """Medians with ranges, a group of bars for each load."""
    names = list(dict.fromkeys(row["engine"] for row in rows))
    most = max(max(row["speeds"]) for row in rows)
    body, y, label = [], 34, ""
    for row in rows:
        if _label(row) != label:
            label = _label(row)
            y += 18
            body.append(f'<text x="20" y="{y - 3}">{escape(label)}, tok/s</text>')
        low, high, median = (
            340 * speed / most
            for speed in (min(row["speeds"]), max(row["speeds"]), statistics.median(row["speeds"]))
        )
        fill = _colour(names.index(row["engine"]))
        body.append(f'<text x="20" y="{y + 10}">{escape(row["engine"][:38])}</text>')
        body.append(f'<rect x="240" y="{y}" width="{median:.1f}" height="11" fill="{fill}"/>')
        if high > low:
            body.append(f'<path d="M{240 + low:.1f} {y + 6}H{240 + high:.1f}" stroke="black"/>')
        body.append(f'<text x="{246 + high:.1f}" y="{y + 10}">{escape(row["tok/s"])}</text>')
        y += 14
    return _svg(title, y, body, ())


def _cdf(title: str, rows: list[dict[str, Any]]) -> str:
    """Shares of requests over milliseconds: times per token on the left, first tokens right."""
    return _lines(
        title,
        rows,
        {
            f"{key}, share of requests": lambda row, key=key: [
                (ms, float(q)) for q, ms in row[f"{key} percentiles"].items()
            ]
            for key in ("TPOT", "TTFT")
        },
        "ms",
    )


def _time(title: str, rows: list[dict[str, Any]]) -> str:
    """Percent busy over seconds: CPUs on the left, GPUs right where there are any."""
    return _lines(
        title,
        rows,
        {
            f"{kind.upper()}s busy": lambda row, kind=kind: [
                (row["busy over time"]["every_s"] * i, figure)
                for i, figure in enumerate(row["busy over time"][kind])
            ]
            for kind in BUSY
            if any(row["busy over time"][kind] for row in rows)
        },
        "s",
    )


def _lines(
    title: str,
    rows: list[dict[str, Any]],
    charts: dict[str, Callable[[dict[str, Any]], list[tuple[float, float]]]],
    unit: str,
) -> str:
    """Percent upwards: charts side by side for each load, in each a line for each row."""
    names = list(dict.fromkeys(row["engine"] for row in rows))
    body, top = [], 34
    for label in dict.fromkeys(_label(row) for row in rows):
        body.append(f'<text x="20" y="{top + 12}">{escape(label)}</text>')
        for side, (what, points) in zip((20, 370), charts.items(), strict=False):
            lines = {row["engine"]: points(row) for row in rows if _label(row) == label}
            most = max((x for line in lines.values() for x, _ in line), default=1) or 1
            low = top + 160
            body.append(
                f'<path d="M{side} {top + 20}V{low}H{side + 320}" stroke="black" fill="none"/>'
            )
            text = f"{what}, 0 to 100 %, over 0 to {most:,.0f} {unit}"
            body.append(f'<text x="{side}" y="{low + 14}">{text}</text>')
            for name, line in lines.items():
                shape = " ".join(
                    f"{side + 320 * x / most:.1f},{low - 1.4 * y:.1f}" for x, y in line
                )
                colour = _colour(names.index(name))
                body.append(
                    f'<polyline points="{shape}" fill="none" stroke="{colour}" stroke-width="2"/>'
                )
        top += 190
    return _svg(title, top, body, names)


def _stacks(title: str, rows: list[dict[str, Any]]) -> str:
    """A bar for each row, of its parts: MiB by process, or percent of a stage's time."""
    bars = [row.get("memory by process") or {kind: row[kind] for kind in KINDS} for row in rows]
    names = list(dict.fromkeys(name for parts in bars for name in parts))
    most = max(sum(parts.values()) for parts in bars) or 1
    body, y = [], 34
    for row, parts in zip(rows, bars, strict=True):
        name = row["engine"] + (f", stage {row['stage']}" if "stage" in row else "")
        body.append(f'<text x="20" y="{y + 10}">{escape(name[:24])}</text>')
        x = 170.0
        for name, part in parts.items():
            width = 530 * part / most
            fill = _colour(names.index(name))
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="12" fill="{fill}"/>'
            )
            x += width
        y += 16
    return _svg(title, y + 8, body, names)


def _lengths(title: str, rows: list[dict[str, Any]]) -> str:
    """A line for each engine over tokens of the prompt, both axes logarithmic: seconds to the first
    token on the left, prompt tokens/s right."""
    names = list(dict.fromkeys(row["engine"] for row in rows))
    body, top = [], 34
    for of in dict.fromkeys(row.get("of", "") for row in rows):
        mine = [row for row in rows if row.get("of", "") == of]
        body.append(f'<text x="20" y="{top + 12}">{escape(of)}</text>')
        for side, key, what in (
            (20, "ttft", "s to the first token"),
            (370, *[DRAWN["lengths"][2]] * 2),
        ):
            low = top + 160
            body.append(
                f'<path d="M{side} {top + 20}V{low}H{side + 320}" stroke="black" fill="none"/>'
            )
            across, up = (_logarithmic([row[each] for row in mine]) for each in ("prompt", key))
            (x0, x1), (y0, y1) = (
                (min(row[each] for row in mine), max(row[each] for row in mine))
                for each in ("prompt", key)
            )
            text = f"{what}, {y0:,.3g} to {y1:,.3g}, over {x0:,} to {x1:,} tokens"
            body.append(f'<text x="{side}" y="{low + 14}">{text}</text>')
            for name in names:
                line = [row for row in mine if row["engine"] == name]
                shape = " ".join(
                    f"{side + 310 * across(row['prompt']):.1f},{low - 130 * up(row[key]) - 4:.1f}"
                    for row in sorted(line, key=lambda row: row["prompt"])
                )
                colour = _colour(names.index(name))
                body.append(
                    f'<polyline points="{shape}" fill="none" stroke="{colour}" stroke-width="2"/>'
                )
        top += 190
    return _svg(title, top, body, names)


def _logarithmic(figures: Sequence[float]) -> Callable[[float], float]:
    """From 0 for the least of them to 1 for the largest."""
    least, most = min(figures), max(figures)
    return lambda figure: math.log(figure / least) / (math.log(most / least) or 1.0)


PICTURES = {
    "bars": _bars,
    "cdf": _cdf,
    "time": _time,
    "stages": _stacks,
    "memory": _stacks,
    "lengths": _lengths,
}
