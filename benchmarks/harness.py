"""What every benchmark prints and keeps: a table with both sides, and the same as JSON.

A benchmark is run as ``python -m benchmarks.NAME`` (``make bench-NAME``). It measures its
baseline and ours in the same run, because machines are shared and noisy, hands rows to
:func:`report`, and never asserts a time. ``python -m benchmarks.results --keep NAME`` keeps a result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sipipe import cpu_features
from sipipe.tools.child import measured
from sipipe.tools.provenance import machine

BUILD = Path("build/bench")
MODELS = Path("build/models")
"""Directory of the models that benchmarks make."""

ROUNDS = "SIPIPE_CAMPAIGN_ROUNDS"
"""Variable of the environment: directory in which a campaign's benchmarks keep their rounds."""


VOID = "VOID"
"""Last cell of a row where the machine was too busy to emulate devices."""


def served_dtype() -> str:
    """The dtype in which a model of bfloat16 is measured: float32 where the CPU has no instructions for
    bfloat16, which would take several times as long and hide everything else."""
    return "float32" if cpu_features.slow() else "bfloat16"


def median_seconds(
    call: Callable[[], object], *, repeat: int = 15, warmup: int = 2, budget: float = 5.0
) -> float:
    """Median wall time of ``call`` in seconds, over at most ``repeat`` runs and ``budget`` seconds."""
    for _ in range(warmup):
        call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < repeat and (len(times) < 3 or time.perf_counter() - began < budget):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def alone(side: str, job: dict[str, Any]) -> dict[str, Any]:
    """What :func:`benchmarks.measure.measure` returns, of a process of its own."""
    return measured(side, job, of_the_checkout("benchmarks.measure"))


def of_the_checkout(module: str) -> str:
    """``module`` of the benchmarks, for :func:`sipipe.tools.child.measured`, whose processes find it
    from now on. Run so, it answers a job (:func:`sipipe.tools.child.answer`)."""
    root = Path(__file__).parents[1]
    already = filter(None, [os.environ.get("PYTHONPATH")])  # such as vLLM's place
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "src"), *already])
    return module


def once(words: Sequence[Any], ask: Callable[[], Any]) -> Any:
    """Ask, or take the answer that a campaign got which was stopped since.

    A campaign names in :data:`ROUNDS` a directory of its commit and machine. Without one all is asked
    anew, and so it is while files differ from the commit.

    Args:
        words: what is asked, as JSON; what differs is another round, and so is another commit's.
        ask: measures it, and returns what JSON can hold.
    """
    place = os.environ.get(ROUNDS)
    commit = machine()["commit"] if place else None
    if not place or not commit or commit.endswith("+"):
        return ask()
    digest = hashlib.sha256(json.dumps([commit, words], sort_keys=True).encode()).hexdigest()[:16]
    path = Path(place) / f"{digest}.json"
    if not path.exists():
        answer = json.dumps(ask())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_text(answer)
        path.with_suffix(".part").replace(path)  # whole, or not at all
    return json.loads(path.read_text())


def command() -> str:
    """How this benchmark was called: ``python -m benchmarks.NAME …``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = f"-m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    return shlex.join(["python", *name.split(), *sys.argv[1:]])


def report(
    name: str,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    note: str = "",
    file: str | None = None,
    columns: Sequence[str] = (),
) -> Path:
    """Print ``rows`` as a table and write them, with the machine, to ``build/bench/NAME.json``.

    The columns are the keys of the first row, or shown, here and on pages, are ``columns`` alone.
    ``file`` overrides the stem of the JSON file for a benchmark that prints several tables. Returns
    the path written.
    """
    console = Console(width=max(140 if columns else 100, Console().width))
    table = Table(title=title, caption=note or None)
    shown = list(columns or rows[0])
    for column in shown:
        justify: Any = "left" if isinstance(rows[0].get(column), str) else "right"
        table.add_column(column, justify=justify, no_wrap=column == "engine")
    for row in rows:
        table.add_row(*(cell(row.get(column)) for column in shown))
    console.print(table)
    where = machine()
    console.print(
        f"{where['cpu']}, {where['cores']} cores, Python {where['python']}, {where['date']}"
    )
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / f"{file or name}.json"
    path.write_text(
        json.dumps(
            {
                "benchmark": name,
                "title": title,
                "command": command(),
                "machine": where,
                "note": note,
                **({"columns": shown} if columns else {}),
                "rows": list(rows),
            },
            indent=1,
            default=float,
        )
        + "\n"
    )
    console.print(f"written to {path}")
    return path


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """A figure of several repetitions: their median, the lowest, the highest, and how many they were."""
    return {
        "median": float(np.median(values)),
        "low": float(min(values)),
        "high": float(max(values)),
        "n": len(values),
    }


def number(value: Any) -> float:
    """A figure's number; of one with a range its median.

    Raises:
        ValueError: it is a text that is no number.
    """
    return float(value["median"] if isinstance(value, Mapping) else value)


_TEXT = re.compile(r"(-?[\d,]*\.?\d+)(?: \((-?[\d,.]+)-(-?[\d,.]+)\))?")
_SEVERAL = re.compile(r"-?[\d,]*\.?\d+(?: / -?[\d,]*\.?\d+)+")


def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with numbers where it has texts such as ``1,234``, ``230 (224-236)`` and ``1.5 / 2.5``."""
    found = dict(row)
    for column, value in row.items():
        if isinstance(value, str) and _SEVERAL.fullmatch(value):
            found[column] = [_number(part) for part in value.split(" / ")]
            continue
        match = _TEXT.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            median, low, high = (part and _number(part) for part in match.groups())
            found[column] = {"median": median, "low": low, "high": high} if low else median
    return found


def _number(text: str) -> float | int:
    plain = text.replace(",", "")
    return float(plain) if "." in plain else int(plain)


def cell(value: Any) -> str:
    """A figure as tables show it: four digits, thousands set apart, a range behind its median. A range
    that these digits do not show, such as that of one repetition, is left out. Several figures, such as
    those of each stage, stand between slashes."""
    if isinstance(value, list):
        return " / ".join(map(cell, value))
    if isinstance(value, Mapping):
        median, low, high = (
            f"{part:,}" if type(part) is int else cell(part)
            for part in (value["median"], value["low"], value["high"])
        )
        return median if low == high == median else f"{median} ({low}-{high})"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)
