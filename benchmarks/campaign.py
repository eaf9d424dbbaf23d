"""All that README and the pages quote, measured in one run on one machine and at one commit.

    python -m benchmarks.campaign               # make campaign: under four hours on two cores
    python -m benchmarks.campaign --canary      # make canary: seven ratios, within 25 minutes
    python -m benchmarks.campaign --only start,stage
    python -m benchmarks.campaign --keep        # also takes what was measured into benchmarks/results
    python -m benchmarks.campaign --compare     # also names what differs from the kept figures

Each benchmark is a command of its own, and its results go to ``build/campaign/COMMIT-MACHINE``. What
is there already is not measured again, so that the same command goes on where it was stopped, in
``served`` and with drafts at the next engines. A file has its figures as numbers, with ranges where
there were repetitions, the wall time of the last run, the machine, its versions, the commit and the
command. Exit status 1: a command failed, or a ratio of the canary is another than the kept one. A
difference that ``--compare`` names is no failure: somebody has to read it.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
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


class Benchmark(NamedTuple):
    """A command of the campaign."""

    name: str
    words: str
    """``NAME OPTIONS`` of ``python -m benchmarks.NAME OPTIONS``; MODEL stands for the model, HEAD for its
    draft head, INT8 for the model in 8 bits."""
    results: tuple[str, ...]
    """The files that it writes and that are kept."""
    minutes: float
    """About how long it takes on two cores with nothing else on them."""
    why_not: Callable[[], str] = str
    """Returns why it cannot be measured on this machine; nothing: it can."""


def _no_namespaces() -> str:
    # Only where it is asked: two hosts are made by a part of the tests.
    from benchmarks.hosts import why_not_here

    return why_not_here()


CAMPAIGN_OF = (
    Benchmark("served", "served MODEL", ("served",), 75),
    Benchmark(
        "drafts-of-a-head",
        "speculation MODEL --head HEAD --pp 2 --requests 1,8,32 --kinds chat --sampling greedy "
        "--tokens 64 --repeat 1 --engines 2 --name speculation-head",
        ("speculation-head",),
        22,
    ),
    Benchmark(
        "drafts-emulated",
        "speculation --profile llama-70b-8xh100 --pp 4,8 --requests 32,256 --engines 2 "
        "--name speculation-emulated",
        ("speculation-emulated",),
        8,
    ),
    Benchmark("ablation", "emulate --ablate --minutes 70", ("emulation-ablation",), 65),
    Benchmark("start", "start --pp 1,2 --repeat 2", ("start",), 25),
    Benchmark(
        "int8",
        "served MODEL --int8 INT8 --rows sipipe,sipipe-one --loads short --sampling greedy "
        "--no-rates --engines 2 --name served-int8",
        ("served-int8",),
        12,
    ),
    Benchmark("timeline", "timeline MODEL", ("timeline",), 8),
    Benchmark("sampling", "sampling --only strategies", ("sampling",), 2),
    Benchmark("sampling-sizes", "sampling --only sizes", ("sampling-sizes",), 1),
    Benchmark("sampling-cliffs", "sampling --only cliffs", ("sampling-cliffs",), 2),
    Benchmark("sampling-alone", "sampling_alone", ("sampling-alone",), 2),
    Benchmark("stage", "stage", ("stage", "stage-executors"), 2),
    Benchmark("transfer", "transfer", ("transfer",), 1),
    Benchmark("trace", "trace", ("trace",), 1),
    Benchmark("prompts", "prefill MODEL --quick", ("prefill-pp2",), 12),
    Benchmark(
        "prompts-emulated",
        "prefill --profile deepseek-v3-32xh200 --pp 8 --chunks 2048,8192 --repeat 2 "
        "--lengths 16384 --tpot-target 250",
        ("prefill-emulated-pp8",),
        5,
    ),
    Benchmark(
        "drafts",
        "speculation MODEL --pp 2 --requests 1,8 --sampling greedy --repeat 1 --tokens 64 "
        "--engines 2 --no-stock",
        ("speculation-pp2",),
        12,
    ),
    Benchmark(
        "drafts-many",
        "speculation MODEL --pp 2 --requests 32 --kinds chat --sampling greedy --repeat 1 "
        "--tokens 48 --no-stock --engines 3 --name speculation-pp2-32",
        ("speculation-pp2-32",),
        9,
    ),
    Benchmark(
        "scheduling",
        "scheduling",
        ("scheduling-summary", "scheduling-prompts", "scheduling-beside", "scheduling-seeds"),
        8,
    ),
    Benchmark("emulation", "emulation", ("emulation", "emulation-device"), 8),
    Benchmark("planner", "planner", ("planner-findings", "planner-published"), 1),
)
"""What README quotes comes first, so that a campaign that is stopped has it."""

ASKED = (
    Benchmark("peers", "peers MODEL", ("peers",), 30),
    Benchmark(
        "hosts",
        "hosts --delays 0,20 --inflight 3 --tokens 32",
        ("hosts",),
        8,
        why_not=_no_namespaces,
    ),
)
"""What is measured only if it is named: it installs programs of others, or needs root."""

CANARY_OF = (
    Benchmark("served", "served MODEL --quick --loads short", ("served",), 7),
    Benchmark("start", "start --quick --sides 0,1", ("start",), 6),
    Benchmark("sampling", "sampling --only strategies", ("sampling",), 2),
    Benchmark(
        "prompts", "prefill MODEL --lengths 8000 --beside none --repeat 1", ("prefill-pp2",), 5
    ),
    Benchmark(
        "drafts",
        "speculation MODEL --quick --pp 2 --kinds copy --tokens 64",
        ("speculation-pp2",),
        3,
    ),
)


class Ratio(NamedTuple):
    """A ratio that the canary watches; figures are written as in a comment of a page."""

    what: str
    figure: str
    beside: str = ""
    """What the figure is divided by; empty: it is a ratio."""


_SERVED = "served: of stock with the same stages | load=short; rate=at once; engine=sipipe; "
RATIOS = (
    Ratio("64 greedy requests, of stock", f"{_SERVED}sampling=greedy; requests=64"),
    Ratio("64 sampled requests, of stock", f"{_SERVED}sampling=chat; requests=64"),
    Ratio("one greedy request, of stock", f"{_SERVED}sampling=greedy; requests=1"),
    Ratio(
        "a warm start, of stock",
        "start: total | stages=2; side=sipipe serve; caches=warm",
        "start: total | stages=2; side=stock; caches=warm",
    ),
    Ratio(
        "copying with drafts, of without",
        "speculation-pp2: with / without | kind=copy; sampling=greedy; requests=1",
    ),
    Ratio("8,000 tokens of prompt, of stock in chunks", "prefill-pp2: of equal times | load=1 x 8,000; engine=stock, chunks of 2,048"),
    Ratio("all sampling parameters, in reads", "sampling: reads | strategy=all"),
)  # fmt: skip


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
    """A line for each figure of ``folder`` that differs from the kept one by more than its own range,
    whether it is better or worse, and for each row that only one of both has."""
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
            for column, then in before[key].items():
                now = after[key].get(column)
                if _is_figure(then) and _is_figure(now) and _differ(then, now):
                    yield f"{name}: {_title(key)}: {column}: {cell(now)}, kept {cell(then)}"


Key = tuple[tuple[str, Any], ...]


def _rows(result: Mapping[str, Any]) -> dict[Key, Mapping[str, Any]]:
    """The rows by what they are of: texts and whole numbers, such as those of requests or tokens, up to
    the first column that holds a figure."""
    rows: dict[Key, Mapping[str, Any]] = {}
    for row in result["rows"]:
        key = []
        for column, value in row.items():
            if not isinstance(value, str | int | None):
                break
            key.append((column, value))
        alike = sum(other[: len(key)] == tuple(key) for other in rows)
        rows[(*key, ("row", alike)) if alike else tuple(key)] = row
    return rows


def _title(key: Key) -> str:
    return ", ".join(f"{value}" for _, value in key if value not in (None, ""))


def _is_figure(value: Any) -> bool:
    """Say if ``value`` is a figure, alone or with its range; a picture's data is none."""
    return isinstance(value, float) or (isinstance(value, Mapping) and "median" in value)


def _differ(then: Any, now: Any) -> bool:
    """Whether neither of two figures lies in the other's range; without ranges, whether they are far
    apart."""
    pairs = [(then, number(now)), (now, number(then))]
    ranged = [(figure, other) for figure, other in pairs if isinstance(figure, Mapping)]
    if not ranged:
        return abs(number(now) - number(then)) > UNRANGED * abs(number(then))
    return not any(figure["low"] <= other <= figure["high"] for figure, other in ranged)


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
