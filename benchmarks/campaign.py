"""All that README and the pages quote, measured in one run on one machine and at one commit.

    python -m benchmarks.campaign               # make campaign: about five hours on two cores
    python -m benchmarks.campaign --canary      # make canary: seven ratios, within 25 minutes
    python -m benchmarks.campaign --only start,stage
    python -m benchmarks.campaign --keep        # also takes what was measured into benchmarks/results
    python -m benchmarks.campaign --compare     # also names what differs from the kept figures

Each benchmark is a command of its own, and its results go to ``build/campaign/COMMIT-MACHINE``. What
is there already is not measured again, so that the same command goes on where it was stopped, in
``served`` and with drafts at the next engines. A file has its figures as numbers, with ranges where
there were repetitions, the wall time of the last run, the machine, its versions, the commit and the
command. Exit status 1: a command failed, or a ratio of the canary is another than the kept one. A
difference that ``--compare`` names is no failure: somebody has to read it. Which benchmarks there are
stands in :mod:`benchmarks.catalogue`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.catalogue import ASKED, CAMPAIGN_OF, CANARY_OF, RATIOS, Benchmark, Ratio
from benchmarks.harness import BUILD, MODELS, ROUNDS, cell, number, numbers
from sipipe.tools.provenance import machine

CAMPAIGN = Path("build/campaign")
MODEL = MODELS / "SmolLM2-135M-Instruct"
HEAD = MODELS / "SmolLM2-135M-Instruct-eagle"
INT8 = MODELS / "SmolLM2-135M-Instruct-int8"
NO_COMMIT = "no-commit"
"""In the place of the commit where there is none."""
UNRANGED = 0.3
"""Share by which a figure without a range may differ: two starts of one engine differ by 0.29."""


def main() -> int:
    """0: all was measured, and the canary's ratios are the kept ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign")
    add = parser.add_argument
    add(
        "--canary",
        action="store_true",
        help="seven ratios, and how they compare with the kept ones",
    )
    add(
        "--only",
        default="",
        metavar="LIST",
        help="of " + ", ".join(b.name for b in CAMPAIGN_OF + ASKED),
    )
    add("--list", action="store_true", help="measure nothing: show the commands")
    add("--keep", action="store_true", help="take the figures into benchmarks/results")
    add("--compare", action="store_true", help="name figures that differ from the kept ones")
    args = parser.parse_args()
    if args.canary and args.keep:
        parser.error("--canary measures less than what is kept: leave --keep out")
    benchmarks = chosen(CANARY_OF if args.canary else CAMPAIGN_OF, args.only)
    if args.list:
        for benchmark in benchmarks:
            print(f"{benchmark.minutes:3.0f} min  {shlex.join(command(benchmark))}")
        print(f"{sum(benchmark.minutes for benchmark in benchmarks):3.0f} min  in all")
        return 0
    folder = place()
    if args.canary:
        folder = folder.with_name(f"{folder.name}-canary")
    failed = measure(benchmarks, folder)
    if args.canary:
        failed += canary(folder)
    if args.compare:
        for line in differences(folder):
            print(line)
    if args.keep and not args.canary:
        keep(folder)
    for line in failed:
        print(f"failed: {line}")
    return 1 if failed else 0


def chosen(benchmarks: Sequence[Benchmark], only: str) -> list[Benchmark]:
    """Those of ``benchmarks`` and :data:`ASKED` that ``only``, a list of names, has; all of
    ``benchmarks`` where it is empty.

    Raises:
        SystemExit: one has no such name.
    """
    names = [name for name in only.split(",") if name]
    known = {benchmark.name: benchmark for benchmark in (*benchmarks, *ASKED)}
    if wrong := [name for name in names if name not in known]:
        sys.exit(f"campaign: --only {wrong[0]}: none of {', '.join(known)}")
    return [known[name] for name in names] if names else list(benchmarks)


def command(benchmark: Benchmark) -> list[str]:
    """The words of a benchmark's command."""
    places = {"MODEL": str(MODEL), "HEAD": str(HEAD), "INT8": str(INT8)}
    module, *options = (places.get(word, word) for word in benchmark.words.split())
    return ["python", "-m", f"benchmarks.{module}", *options]


def place() -> Path:
    """The directory of this commit's figures on this machine with its versions."""
    facts = machine()
    kind = {name: value for name, value in facts.items() if name not in ("date", "commit")}
    digest = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:8]
    return CAMPAIGN / f"{facts['commit'] or NO_COMMIT}-{digest}"


def measure(benchmarks: Sequence[Benchmark], folder: Path) -> list[str]:
    """Run the commands whose results are not in ``folder``; returns a line for each that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    # With changed files, or outside a checkout, nobody knows of what code a figure is.
    reuse = "+" not in folder.name and not folder.name.startswith(NO_COMMIT)
    words = {word for benchmark in benchmarks for word in benchmark.words.split()}
    if "MODEL" in words and not MODEL.exists():
        make = [sys.executable, "-m", "sipipe", "make-model", "smollm2", str(MODEL)]
        subprocess.run(make, check=True)  # wait: its own; the command
    if "HEAD" in words and not HEAD.exists():
        train = [sys.executable, "-m", "benchmarks.make_model.eagle", str(MODEL), str(HEAD)]
        subprocess.run(train, check=True)  # wait: its own, about ten minutes; the command
    if "INT8" in words and not INT8.exists():
        round_it = [sys.executable, "-m", "benchmarks.make_model.int8", str(MODEL), str(INT8)]
        subprocess.run(round_it, check=True)  # wait: its own, a minute; the command
    failed = []
    for benchmark in benchmarks:
        title = f"{benchmark.name} (about {benchmark.minutes:g} min)"
        if reuse and all((folder / f"{name}.json").exists() for name in benchmark.results):
            print(f"{benchmark.name}: measured already", flush=True)
        elif reason := benchmark.why_not():
            print(f"{benchmark.name}: not measured: {reason}", flush=True)
        else:
            print(f"{title}: {shlex.join(command(benchmark))}", flush=True)
            if why := _run(benchmark, folder, reuse=reuse):
                print(f"{benchmark.name}: {why}", flush=True)
                failed.append(f"{benchmark.name}: {why}")
    return failed


def _run(benchmark: Benchmark, folder: Path, *, reuse: bool) -> str:
    """Run one command and take its results into ``folder``; returns why it failed, or nothing.

    Args:
        reuse: have it go on where one that was stopped had come to.
    """
    files = {name: BUILD / f"{name}.json" for name in benchmark.results}
    for file in files.values():
        file.unlink(missing_ok=True)  # of an earlier run: they would pass for this one's
    log = folder / f"{benchmark.name}.log"
    goes_on = reuse and log.exists()  # it was stopped, and how long it had run is not known
    began = time.monotonic()
    env = dict(os.environ)
    if reuse:
        env[ROUNDS] = str(folder / "rounds")
    with log.open("a" if reuse else "w") as out:
        words = [sys.executable, *command(benchmark)[1:]]
        # wait: none, engines have bounds of their own; the command, or who interrupts the campaign
        status = subprocess.run(words, stdout=out, stderr=out, env=env, check=False).returncode
    wall = time.monotonic() - began
    if status:
        return f"its command ended with status {status} ({log})"
    missing = [name for name, file in files.items() if not file.exists()]
    if missing:
        return f"its command wrote no {missing[0]} ({log})"
    results_of = {name: json.loads(file.read_text()) for name, file in files.items()}
    commits = {result["machine"]["commit"] or NO_COMMIT for result in results_of.values()}
    if any(not folder.name.startswith(f"{commit}-") for commit in commits):
        return f"files were changed while it ran: measured is {', '.join(commits)} ({log})"
    for name, result in results_of.items():
        if not goes_on:
            result["wall_s"] = round(wall, 1)
        result["rows"] = [numbers(row) for row in result["rows"]]
        # Written whole: a campaign that is stopped here measures this benchmark again.
        partial = folder / f"{name}.part"
        partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        partial.replace(folder / f"{name}.json")
    return ""


def canary(folder: Path) -> list[str]:
    """Print the canary's ratios beside the kept ones; returns a line for each that left its range."""
    left = []
    for ratio in RATIOS:
        try:
            now = _value(ratio, folder)
            then = _value(ratio, results.RESULTS)
        except SystemExit as error:
            left.append(f"{ratio.what}: cannot be compared: {error}")
            print(left[-1])
            continue
        verdict = "as kept" if not _differ(then, now) else "another"
        print(f"{ratio.what}: {cell(now)}, kept {cell(then)}: {verdict}")
        if verdict != "as kept":
            left.append(f"{ratio.what}: {cell(now)}, kept {cell(then)}")
    return left


def _value(ratio: Ratio, folder: Path) -> Any:
    value = results.figure(*ratio.figure.split(": ", 1), folder)
    if not ratio.beside:
        return value
    return number(value) / number(results.figure(*ratio.beside.split(": ", 1), folder))


def differences(folder: Path, kept: Path | None = None) -> Iterator[str]:
    """A line for each figure of ``folder`` that differs from the kept one (:func:`_differ`), whether it is
    better or worse, and for each row and column that only one of both has."""
    kept = kept or results.RESULTS
    for name in results.names(folder):
        if not (kept / f"{name}.json").exists():
            yield f"{name}: has not been kept before"
            continue
        before = _rows(results.kept(name, kept))
        after = _rows(results.kept(name, folder))
        for key in before.keys() ^ after.keys():
            yield f"{name}: {_title(key)}: {'gone' if key in before else 'new'}"
        for key in (key for key in before if key in after):
            for column in before[key].keys() | after[key].keys():
                then = before[key].get(column)
                now = after[key].get(column)
                if _differ(then, now):
                    kept_one, new_one = (cell(value) or "nothing" for value in (then, now))
                    yield f"{name}: {_title(key)}: {column}: {new_one}, kept {kept_one}"


Key = tuple[tuple[str, Any], ...]


def _rows(result: Mapping[str, Any]) -> dict[Key, Mapping[str, Any]]:
    """The figures of each row by what they are of: texts and whole numbers, such as those of requests or
    tokens, up to the first column that holds a figure. Each column behind is one."""
    rows: dict[Key, Mapping[str, Any]] = {}
    for row in result["rows"]:
        key = []
        for column, value in row.items():
            if not isinstance(value, str | int | None):
                break
            key.append((column, value))
        alike = sum(other[: len(key)] == tuple(key) for other in rows)
        figures = {column: value for column, value in row.items() if (column, value) not in key}
        rows[(*key, ("row", alike)) if alike else tuple(key)] = figures
    return rows


def _title(key: Key) -> str:
    return ", ".join(f"{value}" for _, value in key if value not in (None, ""))


def _differ(then: Any, now: Any) -> bool:
    """Whether neither of two figures lies in the other's range; where neither has one, whether they are
    further apart than :data:`UNRANGED`. Words differ where they are others, and a picture's data never."""
    if isinstance(then, list) and isinstance(now, list):
        return len(then) != len(now) or any(map(_differ, then, now))
    if _is_drawn(then) or _is_drawn(now):
        return False
    if not (_is_number(then) and _is_number(now)):
        return cell(then) != cell(now)
    pairs = [(then, number(now)), (now, number(then))]
    ranged = [(figure, other) for figure, other in pairs if _has_range(figure)]
    if not ranged:
        return abs(number(now) - number(then)) > UNRANGED * abs(number(then))
    return not any(figure["low"] <= other <= figure["high"] for figure, other in ranged)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Mapping) and "median" in value)


def _is_drawn(value: Any) -> bool:
    """Say if ``value`` is a picture's data."""
    return isinstance(value, Mapping) and "median" not in value


def _has_range(figure: Any) -> bool:
    """Say if ``figure`` tells how far it may vary: one repetition, or equal ones, do not."""
    return isinstance(figure, Mapping) and bool(figure["low"] < figure["high"])


def keep(folder: Path) -> None:
    """Take the figures of ``folder`` into the kept ones, and write all pages anew.

    Raises:
        SystemExit: they are of no commit.
    """
    for name in results.names(folder):
        results.keep(folder / f"{name}.json")
    for page in results.write():
        print(f"{page}: written anew from its results")


if __name__ == "__main__":
    sys.exit(main())
