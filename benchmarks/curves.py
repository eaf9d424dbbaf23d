"""A picture of what is served over load, from three kept results of ``sipipe bench``.

    python -m benchmarks.curves MODEL                          measures: 25 minutes with SmolLM2
    python -m benchmarks.results --keep load-requests load-rates load-prompts
    python -m benchmarks.results                               draws it anew from what is kept

Tokens/s over requests at once, time per output token over requests a second, time to the first token
over the prompt's length; each of SiPipe and of stock vLLM with two stages, and of stock with one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any, NamedTuple

from benchmarks.harness import BUILD
from benchmarks.timeline import INKS

ENGINES = {
    "sipipe": ("SiPipe, 2 stages", "#4477aa", ""),
    "stock": ("stock vLLM, 2 stages", "#ee6677", ' stroke-dasharray="7 4"'),
    "stock-one": ("stock vLLM, 1 stage", "#228833", ' stroke-dasharray="2 4"'),
}
USUAL = "--pp 2 --max-model-len 2048 --engines 1 --draws 0 --rows " + ",".join(ENGINES)
WIDTH, HEIGHT, LEFT, TOP = 270, 190, 52, 44
"""Of a panel, and where its axes cross."""


class Panel(NamedTuple):
    options: str
    """Of ``sipipe bench``."""
    title: str
    over: str
    x: str
    """Columns of the result: on this axis by its place among the values, ..."""
    y: str
    """... and on this one by its size."""


PANELS = {
    "load-requests": Panel(
        "--sampling chat --requests 1,4,16,64,256 --prompt-tokens 16 --tokens 32 --repeat 1",
        "output tokens/s",
        "requests at once",
        "requests",
        "tok/s",
    ),
    "load-rates": Panel(
        "--sampling chat --requests 40 --rate 1,2,4,8,16 --prompt-tokens 64 --tokens 48 --repeat 1",
        "ms per output token",
        "requests a second",
        "rate",
        "TPOT p50",
    ),
    "load-prompts": Panel(
        "--sampling greedy --requests 1 --prompt-tokens 64,256,1024,1900 --tokens 2 --repeat 3",
        "ms to the first token",
        "tokens of the prompt",
        "prompt",
        "TTFT p50",
    ),
}
"""By the kept result's name."""


def draw(results: dict[str, dict[str, Any]], scheme: str) -> str:
    """The picture (SVG) of the results that are there, for a page of a colour scheme."""
    ink, body = INKS[scheme], []
    shown = [(name, panel) for name, panel in PANELS.items() if name in results]
    for at, (name, panel) in enumerate(shown):
        body.append(f'<g transform="translate({at * WIDTH} 0)">{_panel(results[name]["rows"], panel, ink)}</g>')  # fmt: skip
    x, low = LEFT, TOP + HEIGHT + 58
    for label, colour, dashes in ENGINES.values():
        body.append(f'<path d="M{x} {low - 4}h28" stroke="{colour}" stroke-width="2.5"{dashes}/>')
        body.append(f'<text x="{x + 36}" y="{low}">{label}</text>')
        x += 210
    wide = WIDTH * len(shown)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{low + 14}" '
        f'viewBox="0 0 {wide} {low + 14}" font-family="sans-serif" font-size="12" fill="{ink}">'
        f"{''.join(body)}</svg>\n"
    )


def _panel(rows: list[dict[str, Any]], panel: Panel, ink: str) -> str:
    values = sorted({row[panel.x] for row in rows})
    width = WIDTH - LEFT - 24
    across = {value: LEFT + width * i / max(1, len(values) - 1) for i, value in enumerate(values)}
    most = max(_number(row[panel.y]) for row in rows)
    step = next(step for step in STEPS if most <= 5 * step)
    scale = HEIGHT / (step * -(-most // step))
    base = TOP + HEIGHT
    parts = [
        f'<text x="{LEFT}" y="{TOP - 22}" font-size="13" font-weight="bold">{panel.title}</text>'
    ]
    for i in range(int(-(-most // step)) + 1):
        y = base - i * step * scale
        parts.append(f'<path d="M{LEFT} {y:.1f}h{width}" stroke="{ink}" stroke-opacity=".2"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{i * step:,}</text>')
    for value, x in across.items():
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{value:,g}</text>')
    middle = LEFT + width / 2
    parts.append(f'<text x="{middle}" y="{base + 34}" text-anchor="middle">{panel.over}</text>')
    for engine, (_, colour, dashes) in ENGINES.items():
        points = sorted(
            (across[row[panel.x]], base - _number(row[panel.y]) * scale)
            for row in rows
            if row["engine"] == engine
        )
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"{dashes}/>')  # fmt: skip
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return "".join(parts)


STEPS = [m * 10**e for e in range(6) for m in (1, 2, 5)]


def _number(text: Any) -> float:
    """Of a median with its range the median."""
    return float(str(text).split()[0].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--only", choices=PANELS, help="one of the three")
    options = parser.parse_args()
    for name in [options.only] if options.only else PANELS:
        panel = PANELS[name]
        words = ["bench", options.model, *USUAL.split(), *panel.options.split(), "--json"]
        said = subprocess.run(
            [sys.executable, "-P", "-m", "sipipe", *words], check=True, stdout=subprocess.PIPE
        )
        found = json.loads(said.stdout)
        del found["engines"]  # which have the client's own figures
        shown = ["requests", panel.x, "tok/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"]
        found["columns"] = ["engine", *dict.fromkeys(shown)]
        BUILD.mkdir(parents=True, exist_ok=True)
        (BUILD / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
