"""``sipipe bench``: SiPipe beside stock vLLM and other servers, each as it would best be set up."""

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sipipe.cli.bench_answer import answers
from sipipe.cli.bench_compare import check_writable, compare, write
from sipipe.cli.bench_rows import config_of, rows_of
from sipipe.cli.bench_tables import STOCK, csv_table, show, table
from sipipe.cli.parser import adder, at_least, checked, counts, make_parser, parse_engine_command
from sipipe.errors import ConfigError, SiPipeError, tell
from sipipe.tools.child import TIMEOUT, measured
from sipipe.tools.load import SAMPLING
from sipipe.tools.provenance import machine
from sipipe.tools.report.render import render_load
from sipipe.versions import require_vllm

EPILOG = """\
Rows (--rows, a list): sipipe, stock (the same stages), stock-tp (the same devices, tensor parallel),
stock-one and sipipe-one (one stage with all cores, or one GPU), stock-cut (stock with --layers).
On GPUs SiPipe leaves one stage to stock vLLM: a sipipe-one of its own needs --samplers or the like.
Every other option is vLLM's, and given to each server that is started, but --speculative-config
to no stock with stages. Servers are started in turn, forwards and then backwards, one at a time.

  sipipe bench build/models/SmolLM2-135M-Instruct --pp 2
  sipipe bench MODEL --pp 2 --sampling greedy,chat,all --requests 128 --json
  sipipe bench MODEL --pp 2 --rate 1,2,4,8 --goodput ttft:500,tpot:50 --output load.html
  sipipe bench MODEL --pp 4 --tp 2 --trace-file arrivals.jsonl --url SGLang=http://host:30000
  sipipe bench MODEL --pp 2 --rows sipipe --row "vLLM's scheduler=--scheduler-cls ..." \\
      --row "stock, 8 in flight=stock --max-num-seqs 8"

Two results that --json or --output have written, side by side:

  sipipe bench compare before.html after.html --output both.html

The paper's figures, in a checkout of SiPipe: python -m benchmarks.paper LIST
"""

CHECKED = """; equal: requests whose greedy tokens are those of the first row; \
draws p: chi-square of drawn tokens against the server's own probabilities"""

LONGEST = 200_000.0
"""Seconds in which the requests of all loads of an engine may arrive, at most: two days."""


def main(argv: Sequence[str]) -> int:
    """Measure and show; returns the exit status. 0: every row was measured. 1: some failed."""
    if argv[:1] == ["compare"]:
        return compare(argv[1:])
    args, settings, words = parse_engine_command(_parser(), argv)
    jobs = rows_of(args, settings, words)
    _check(args, words, jobs)
    require_vllm()
    load = _load(args, words)
    arriving = (args.repeat + 1) * _seconds(load["loads"], args.trace_file)  # 1: warm-up
    if arriving > LONGEST:
        raise ConfigError(f"bench: all repetitions would take {arriving:.0f} s: fewer of --repeat")
    limit = TIMEOUT + arriving
    by_row, failed = _measured(jobs, load, args.engines, limit)
    if not by_row:
        raise SiPipeError(next(iter(failed.values())))
    rows = table(jobs, by_row)
    for starts in by_row.values():
        for start in starts:
            start.pop("answers", None)  # the rows say whether they are the same
    spread = "medians and ranges" if args.engines * args.repeat > 1 else "one run a row"
    # Every server inherits these libraries, and their figures depend on them.
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    preloads = f"; LD_PRELOAD: {', '.join(map(os.path.basename, preloaded))}" if preloaded else ""
    result = {
        "benchmark": "bench",
        "model": next(iter(jobs.values()))["model"],
        "answers": answers(rows, args.goodput or ()),
        "title": f"Served by {args.engines} engine(s) a row, {' '.join(load['load'])}",
        "command": shlex.join(["sipipe", "bench", *argv]),
        "machine": machine(),
        "note": f"{spread}; TTFT and TPOT in ms{preloads}{CHECKED if args.draws else ''}",
        "rows": rows,
        "engines": {
            name: {"job": _portable(jobs[name]), "starts": by_row[name]} for name in by_row
        },
        "failed": failed,
    }
    written = {"--output": (args.output, render_load), "--csv": (args.csv, _csv)}
    try:
        for option, (path, made) in written.items():
            if path:
                write(option, path, made(result))
    finally:  # also if a file could not be written: the figures took long
        if args.json:
            print(json.dumps(result, indent=1))
        else:
            show(result)
    return 1 if failed else 0


def _csv(result: Mapping[str, Any]) -> str:
    return csv_table(result["rows"])


def _parser() -> argparse.ArgumentParser:
    """The options of ``sipipe bench`` itself."""
    parser = make_parser(
        "bench",
        "Measure what SiPipe serves beside stock vLLM, by vLLM's own benchmark client.",
        usage="sipipe bench MODEL [options] [any engine option of vLLM]",
        epilog=EPILOG,
        add_help=False,
    )
    group = parser.add_argument_group("load")
    add = adder(group)
    count = at_least(1, int)
    add("--prompt-tokens", counts, [16], "LIST", "each a load (default: 16)")
    add("--tokens", count, 16, "N", "new ones (default: 16)")
    add("--repeat", count, 3, "N", "repetitions an engine (default: 3)")
    add("--engines", count, 2, "N", "starts of each row's engine, in turn (default: 2)")
    add("--requests", counts, [64], "LIST", "how many (default: 64)")
    ways = f"of {', '.join(SAMPLING)}; top-p:16: that one with 16 requests (default: greedy,chat)"
    add("--sampling", _ways, "greedy,chat", "LIST", ways)
    rates = lambda text: [at_least(0.001)(part) for part in text.split(",")]  # noqa: E731
    add("--rate", rates, [0], "LIST", "requests/s, each a load (default: at once)")
    limits = "such as ttft:500,tpot:50,e2el:9000 (ms): shows requests/s within all of them"
    add("--goodput", _limits, None, "LIMITS", limits)
    add("--sharegpt", str, None, "FILE", "prompts and lengths of ShareGPT's file")
    add("--trace-file", str, None, "FILE", "arrivals and lengths: timed_trace of vllm bench serve")
    add = adder(group := parser.add_argument_group("what is measured"))
    add("--rows", str, None, "LIST", "of those below (default: all that differ here)")
    row = partial(group.add_argument, action="append", default=[])
    text = "one more row: SiPipe, or stock vLLM where they begin with stock"
    row("--row", metavar="NAME=OPTIONS", help=text)
    row("--url", metavar="NAME=URL", help="one more row: a server that runs already")
    add("--draws", at_least(0, int), 1024, "N", "for the chi-square; 0: none")
    group.add_argument("--own-end", action="store_true", help="heed the model's end of text")
    group.add_argument("--shared-devices", action="store_true", help="measure stages on one GPU")
    group.add_argument("--json", action="store_true", help="the figures as JSON")
    add("--output", str, None, "FILE", "also a page (HTML): the figures over the load")
    add("--csv", str, None, "FILE", "also the table as CSV")
    return parser


def _measured(
    jobs: Mapping[str, Mapping[str, Any]], load: Mapping[str, Any], engines: int, limit: float
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Start each row's engine ``engines`` times, in turn forwards and backwards, so that a machine that
    grows slower or quicker favours none.

    Returns the results of each start by row, without rows that failed, and the reasons of those.
    Raises ConfigError: the first start of all is refused. The others would be, too.
    """
    by_row: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    failed: dict[str, str] = {}
    for number in range(engines):
        for name in list(jobs) if number % 2 == 0 else reversed(list(jobs)):
            if name in failed:
                continue
            try:
                job = {**jobs[name], **load, "start": number}
                start = measured(name, job, "sipipe.tools.load", timeout=limit)
            except SiPipeError as error:  # the other rows are still measured
                if isinstance(error, ConfigError) and not any(by_row.values()):
                    raise
                tell(error)
                failed[name] = str(error)
                continue
            by_row[name].append(start)
            if number == 0 and "refused" in start:
                tell(f"{name}: what it answers could not be compared: {start['refused']}")
    return {name: starts for name, starts in by_row.items() if name not in failed}, failed


def _ways(text: str) -> list[tuple[str, int | None]]:
    """The ``type`` of ``--sampling``: names of mixes, some with a number of requests of their own."""
    ways = []
    for entry in text.split(","):
        way, colon, count = entry.partition(":")
        if way not in SAMPLING:
            raise argparse.ArgumentTypeError(f'"{way}" is none of {", ".join(SAMPLING)}')
        ways.append((way, at_least(1, int)(count) if colon else None))
    return ways


_limits = checked(
    lambda text: [pair.strip() for pair in text.split(",")],
    "limits in ms such as ttft:500,tpot:50,e2el:9000",
    lambda pairs: all(re.fullmatch(r"(ttft|tpot|e2el):\d+(\.\d+)?", pair) for pair in pairs),
)
"""The ``type`` of ``--goodput``: limits as ``vllm bench serve`` takes them."""


def _portable(job: dict[str, Any]) -> dict[str, Any]:
    """The job without the path of this machine's Python in its command."""
    command = ["python" if word == sys.executable else word for word in job["command"]]
    return {**job, "command": command}


def _load(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Entries of :class:`sipipe.tools.load.Job` that say what is sent to each server."""
    if args.trace_file:
        client = [
            "--dataset-name",
            "timed_trace",
            "--dataset-path",
            args.trace_file,
            "--self-timed",
        ]
    elif args.sharegpt:
        client = ["--dataset-name", "sharegpt", "--dataset-path", args.sharegpt]
    else:
        client = ["--dataset-name", "random", "--random-input-len", str(args.prompt_tokens[0])]
        client += ["--random-output-len", str(args.tokens)]
    if args.goodput:
        client += ["--goodput", *args.goodput]
    _, options = config_of(words)
    if options.tokenizer:
        client += ["--tokenizer", options.tokenizer]
    if options.trust_remote_code:
        client.append("--trust-remote-code")
    several = len(args.prompt_tokens) > 1 and not args.trace_file and not args.sharegpt
    loads = [
        (way, count, prompt, rate)
        for way, number in args.sampling
        for count in ([number] if number else args.requests)
        for prompt in (args.prompt_tokens if several else [0])
        for rate in ([0] if args.trace_file else args.rate)
    ]
    return {
        # It is set here for all: with random prompts and traces vLLM's client sets it anyway.
        "mixes": {way: SAMPLING[way] | {"ignore_eos": not args.own_end} for way, *_ in loads},
        "load": client,
        "loads": sorted(dict.fromkeys(loads), key=lambda load: load[1:]),
        "repeat": args.repeat,
        "draws": args.draws,
    }


def _seconds(loads: Sequence[tuple[str, int, int, float]], trace: str | None) -> float:
    """Seconds in which the requests of all loads arrive. Raises ConfigError: they are too many, or
    ``trace`` is no trace."""
    arrivals = _arrivals(trace, most=max(count for _, count, *_ in loads)) if trace else []
    seconds = sum(
        count / rate if rate else max(arrivals[:count], default=0.0) for _, count, _, rate in loads
    )
    if seconds > LONGEST:
        raise ConfigError(f"bench: requests would arrive for {seconds:.0f} s (timestamps: seconds)")
    return seconds


def _arrivals(trace: str, most: int) -> list[float]:
    """Arrivals of the first ``most`` requests of a trace, in the trace's own unit. Raises ConfigError:
    it is no trace, or has fewer requests."""
    option = f"bench: --trace-file {trace}"
    try:
        lines = Path(trace).read_text("utf-8").splitlines()[:most]
    except OSError as error:
        raise ConfigError(f"{option} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{option} is not UTF-8 text") from None
    if len(lines) < most:
        raise ConfigError(f"{option} has {len(lines)} requests, one a line: fewer than --requests")
    arrivals = []
    for number, line in enumerate(lines, 1):
        try:
            arrival, length, hashes = _timed(json.loads(line))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise ConfigError(
                f"{option}, line {number}: must be a JSON object with timestamp, input_length and "
                "hash_ids"
            ) from None
        arrivals.append(arrival)
        if length > 16 * hashes:
            raise ConfigError(f"{option}, line {number}: hash_ids of other than 16 tokens each")
    return arrivals


def _timed(row: Mapping[str, Any]) -> tuple[float, int, int]:
    """The arrival of a trace's request, its prompt's tokens, and the number of its hashes. Raises
    ValueError, TypeError, KeyError or OverflowError: one of them is none."""
    arrival = float(row["timestamp"])
    length = row["input_length"]
    hashes = row["hash_ids"]
    numbers = [length, *hashes]
    if not 0 <= arrival < math.inf or not all(type(number) is int for number in numbers):
        raise ValueError
    if length < 1:
        raise ValueError
    return arrival, length, len(hashes)


def _check(args: argparse.Namespace, words: Sequence[str], jobs: Mapping[str, Any]) -> None:
    """Refuse a measurement that would say nothing, or would fail when the first engine has started.

    Raises ConfigError: a file or directory is missing, ``--additional-config`` is wrong, stages share
    a GPU without ``--shared-devices``, or two engines would write one trace."""
    for option, file in (("--sharegpt", args.sharegpt), ("--trace-file", args.trace_file)):
        if file and not os.path.isfile(file):
            raise ConfigError(f"bench: {option}: there is no file {file}")
    for option, path in (("--output", args.output), ("--csv", args.csv)):
        if path:
            check_writable(option, path)
    if args.trace_file and args.rate != [0]:
        raise ConfigError("bench: --rate: --trace-file has the arrivals, leave one of them out")
    if any(word.split("=")[0] in ("--nnodes", "-n") for word in words):
        raise ConfigError("bench: --nnodes: several hosts by Ray alone (docs/multi-host.md)")
    devices = config_of(words)[0].devices or ()
    if len(set(devices)) < len(devices) and not args.shared_devices:
        raise ConfigError(
            f'"devices" {list(devices)} puts stages on one GPU, which runs them in turn, so '
            "their speed says nothing of a pipeline's; --shared-devices measures it all the same"
        )
    writers: Counter[str] = Counter()
    for job in jobs.values():
        config, options = config_of(job["command"])
        trace = options.trace or config.trace
        if trace and job["command"][: len(STOCK)] != STOCK:
            writers[trace] += args.engines
    for trace, engines in writers.items():
        if engines > 1:
            raise ConfigError(
                f"bench: {engines} engines would write the trace {trace}: --engines 1 starts each "
                'row once, and --row "NAME=--trace DIR" gives a row its own'
            )
