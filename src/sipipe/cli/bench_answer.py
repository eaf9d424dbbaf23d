"""The answer of ``sipipe bench``: what its table says, in sentences."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]

LOADS = {
    "rate": "at {} requests/s",
    "requests": "with {} requests at once",
    "prompt": "with prompts of {} tokens",
}
"""Columns that can vary between the rows of one engine, and how a sentence names each."""
AS_GOOD = 0.03
"""Part by which two figures may differ and still count as equal. The repetitions of one engine differ by
as much or more: the table's ranges say by how much."""
WITHIN = 90.0
"""Percent of requests within the limits of ``--goodput`` for a rate to count as served."""


def figure(text: object) -> float | None:
    """The number in a cell of the table, of a median with its range the median; None: it has none."""
    number = re.match(r"-?\d[\d,]*(\.\d+)?", str(text))
    return float(number[0].replace(",", "")) if number else None


def answers(rows: Sequence[Row], limits: Sequence[str] = ()) -> list[str]:
    """Sentences on SiPipe beside stock vLLM, one for each way of sampling and each load that is not the
    varying one. Empty where nothing is compared.

    Args:
        rows: rows of the table, of all engines.
        limits: those of ``--goodput``, such as ``ttft:500``.
    """
    axis = next((key for key in LOADS if len({row.get(key) for row in rows} - {None}) > 1), "rate")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        named = tuple(row.get(key) for key in ("sampling", *LOADS) if key != axis)
        groups.setdefault(named, []).append(row)
    sentences = []
    for members in groups.values():
        sentences += _compared(members, axis, several=len(groups) > 1)
        sentences += _within_limits(members, limits) if axis == "rate" else []
    return sentences


def _compared(rows: Sequence[Row], axis: str, *, several: bool) -> list[str]:
    """A sentence on the heaviest load, and one on where another engine is as good."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    ours = next((name for name in engines if not name.startswith("stock")), None)
    stock = [name for name in engines if name.startswith("stock")]
    if ours is None or not stock:
        return []
    loads: dict[Any, dict[str, Row]] = {}
    for row in rows:
        loads.setdefault(row.get(axis), {})[row["engine"]] = row
    common = {load: engine for load, engine in loads.items() if len(engine) == len(engines)}
    if not common:
        return []
    # Without a rate all requests come at once, which is the heaviest load.
    heaviest = max(common, key=lambda load: float("inf") if load is None else load)
    under_load = common[heaviest]
    begin = _place(under_load[ours], axis, heaviest)
    if several:
        begin = f"{under_load[ours]['sampling']}, {begin}"
    parts = []
    for other in stock:
        tokens = _ratio(under_load[ours], under_load[other], "tok/s")
        if len(stock) == 1:  # the table has that number, made before its speeds were rounded
            tokens = figure(under_load[ours].get("of stock's best")) or tokens
        pace = _ratio(under_load[ours], under_load[other], "TPOT p50")
        if tokens is not None and pace is not None:
            parts.append(
                f"{tokens:.2f} × the tokens of {other} with {pace:.2f} × its time per token"
            )
    if not parts:
        return []
    sentences = [f"{begin[0].upper()}{begin[1:]} {ours} serves {'; '.join(parts)}."]
    best = {
        load: [other for other in stock if _as_good(engine[other], engine[ours])]
        for load, engine in common.items()
        if load is not None
    }
    for other in stock:
        where = sorted(load for load, names in best.items() if other in names)
        if where and len(common) > 1:
            places = LOADS[axis].format(_listed([f"{load:g}" for load in where]))
            sentences.append(f"{other} is as good or better {places}.")
    return sentences


def _listed(words: Sequence[str]) -> str:
    """``words`` as a sentence has them: "1, 2 and 4"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _place(row: Row, axis: str, load: Any) -> str:
    if load is not None:
        return LOADS[axis].format(f"{load:g}")
    return LOADS["requests"].format(row["requests"])


def _ratio(ours: Row, other: Row, column: str) -> float | None:
    part = figure(ours.get(column))
    total = figure(other.get(column))
    return part / total if part is not None and total else None


def _as_good(other: Row, ours: Row) -> bool:
    """True if the other engine serves as many tokens in as little time each."""
    tokens = _ratio(other, ours, "tok/s")
    pace = _ratio(other, ours, "TPOT p50")
    return tokens is not None and pace is not None and tokens >= 1 - AS_GOOD and pace <= 1 + AS_GOOD


def _within_limits(rows: Sequence[Row], limits: Sequence[str]) -> list[str]:
    """A sentence on the highest rate that each engine serves within the limits."""
    highest: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row.get("rate") or float("inf")):
        share = figure(row.get("within limits"))
        name = row["engine"]
        if share is None or row.get("rate") is None:
            continue
        served = highest.setdefault(name, 0.0)
        lower = [
            other["rate"]
            for other in rows
            if other["engine"] == name and other.get("rate") and other["rate"] < row["rate"]
        ]
        if share >= WITHIN and served == max(lower, default=0.0):  # and each rate below it
            highest[name] = row["rate"]
    if not highest:
        return []
    named = (
        f"{name} up to {rate:g} requests/s" if rate else f"{name} at none of these rates"
        for name, rate in highest.items()
    )
    limits_text = f" ({', '.join(limits)})" if limits else ""
    return [f"Nine of ten requests stay within the limits{limits_text}: {', '.join(named)}."]
