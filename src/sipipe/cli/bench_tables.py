"""The table of ``sipipe bench``: figures of each row's engines, and how they compare."""

import csv
import io
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sipipe.cli import console

STOCK = (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve")
"""The beginning of stock vLLM's command."""


def table(
    jobs: Mapping[str, Any], found: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Rows of the table, one for each load, mix of sampling parameters and engine.

    Args:
        jobs: servers by row.
        found: results of each start by row, as :mod:`sipipe.tools.load` gives them.
    """
    answers_of: dict[str, Any] = {name: starts[0].get("answers") for name, starts in found.items()}
    first = next((answers for answers in answers_of.values() if answers), None)
    stock = [name for name in found if tuple(jobs[name]["command"][: len(STOCK)]) == STOCK]
    rows = []
    for load in next(iter(found.values()))[0]["runs"]:
        way, requests, *settings = load.split(" ")
        conditions = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            conditions[name] = json.loads(value)
        stock_medians = {name: _speeds(found[name], load)[1] for name in stock}
        for name, starts in found.items():
            low, median, high = _speeds(starts, load)
            runs = [run for start in starts for run in start["runs"][load]]
            row: dict[str, Any] = {"sampling": way, "requests": int(requests), "engine": name}
            row |= conditions
            prompt = conditions.get("prompt")
            if prompt:
                speeds = [run["completed"] * prompt / run["duration"] for run in runs]
                row["prompt tok/s"] = f"{statistics.median(speeds):,.0f}"
            row["tok/s"] = f"{median:,.0f}"
            if len(runs) > 1:
                row["tok/s"] += f" ({low:,.0f}-{high:,.0f})"
            degrees = _degrees(jobs[name])
            alike = [other for other in stock if degrees in (None, _degrees(jobs[other]))]
            for column, others in ((" with the same stages", alike), ("'s best", stock)):
                best = max((stock_medians[other] for other in others), default=0.0)
                row[f"of stock{column}"] = f"{median / best:.2f}" if best else None
            for metric in ("ttft", "tpot"):
                for q in ("p50", "p99"):
                    values = [run[f"{q}_{metric}_ms"] for run in runs]
                    row[f"{metric.upper()} {q}"] = f"{statistics.median(values):,.1f}"
            goodputs = [run.get("request_goodput") for run in runs]
            if goodputs[0] is not None:
                row["goodput/s"] = f"{statistics.median(goodputs):.2f}"
                shares = [
                    run["request_goodput"] * run["duration"] / run["completed"] for run in runs
                ]
                row["within limits"] = f"{100 * statistics.median(shares):.0f}%"
            row["KV tokens"] = starts[0]["kv_tokens"]
            row["memory MiB"] = sum(starts[0]["memory_mib"].values()) or None
            bound = jobs[name]["env"].get("VLLM_CPU_OMP_THREADS_BIND")
            row["cores"] = _bound(bound) or "; ".join(starts[0]["plan"]).removeprefix("core plan: ")
            if first:
                same = [a == b for a, b in zip(answers_of[name] or [], first, strict=False)]
                # A server that tells texts instead of tokens is compared with none that tells them.
                comparable = same and type(answers_of[name][0]) is type(first[0])
                row["equal"] = f"{sum(same)} of {len(same)}" if comparable else None
                draws = starts[0]["draws"]
                row["draws p"] = f"{draws['p']:.3f}" if draws else None
            rows.append(row)
    return rows


def _bound(variable: str | None) -> str:
    """CPUs of each worker, in words, by vLLM's ``VLLM_CPU_OMP_THREADS_BIND`` such as ``0|1``; nothing where
    it is None."""
    if variable is None or not variable[:1].isdigit():  # a word, such as "auto"
        return variable or ""
    workers = variable.split("|")
    return " · ".join(f"worker {number}: CPU {cpus}" for number, cpus in enumerate(workers))


def _degrees(job: Mapping[str, Any]) -> list[str] | None:
    """The words of a server's stages and ranks; None for a server that runs already."""
    words = job["command"]
    return words[words.index("-pp") :][:4] if words else None


def _speeds(starts: Sequence[Mapping[str, Any]], load: str) -> tuple[float, float, float]:
    """Lowest, median and highest output tokens/s of all repetitions."""
    figures = [run["output_throughput"] for start in starts for run in start["runs"][load]]
    return min(figures), statistics.median(figures), max(figures)


RANGE = re.compile(r"([\d,.]+) \(([\d,.]+)-([\d,.]+)\)")
"""A median with its range, as a cell of the table has it."""
NUMBER = re.compile(r"[\d,]+(\.\d+)?")
"""A number with thousands separators."""


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """``rows`` as CSV with a head. Numbers have no thousands separators; a column with ranges becomes
    three, such as ``tok/s``, ``tok/s low`` and ``tok/s high``."""
    plain = []
    for row in rows:
        cells: dict[str, Any] = {}
        for name, value in row.items():
            text = "" if value is None else str(value)
            if ranges := RANGE.fullmatch(text):
                numbers = [number.replace(",", "") for number in ranges.groups()]
                cells |= zip((name, f"{name} low", f"{name} high"), numbers, strict=True)
            else:
                cells[name] = text.replace(",", "") if NUMBER.fullmatch(text) else text
        plain.append(cells)
    columns = list(dict.fromkeys(name for cells in plain for name in cells))
    made = io.StringIO()
    writer = csv.DictWriter(made, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return made.getvalue()


def show(result: Mapping[str, Any]) -> None:
    """Print the table of a result of ``sipipe bench``."""
    rows = result["rows"]
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    columns.remove("cores")
    # The memory of a server that ran already is not known, and then there is nothing to compare.
    if "memory MiB" in columns and any(row["memory MiB"] is None for row in rows):
        columns.remove("memory MiB")
    cells = (["" if row[name] is None else f"{row[name]}" for name in columns] for row in rows)
    shown = console.table(columns, cells, left=("sampling", "engine"), pad_edge=True)
    shown.title = result["title"]
    shown.caption = result["note"]
    for sentence in result["answers"]:
        print(sentence)
    console.Console(width=max(130, console.Console().width)).print(shown)
    for name, cores in {row["engine"]: row["cores"] for row in rows if row["cores"]}.items():
        print(f"{name}: {cores}")
