"""``sipipe bench``: SiPipe beside stock vLLM and other servers, each as it would best be set up."""

import argparse
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sipipe.cli.bench_rows import config_of, rows_of
from sipipe.cli.bench_tables import STOCK, show, table
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

The paper's figures, in a checkout of SiPipe: python -m benchmarks.paper LIST
"""

CHECKED = """; equal: requests whose greedy tokens are those of the first row; \
draws p: chi-square of drawn tokens against the server's own probabilities"""

LONGEST = 200_000.0
"""Seconds in which the requests of all loads of an engine arrive, once: two days."""


def main(argv: Sequence[str]) -> int:
    """0: every row was measured. 1: some failed."""
    own, settings, rest = parse_engine_command(_parser(), argv)
    jobs = rows_of(own, settings, rest)
    _check(own, rest, jobs)
    require_vllm()
    load = _load(own, rest)
    limit = TIMEOUT + (own.repeat + 1) * _seconds(load["loads"], own.trace_file)  # 1: warm-up
    found, failed = _measured(jobs, load, own.engines, limit)
    if not found:
        raise SiPipeError(next(iter(failed.values())))
    rows = table(jobs, found)
    for start in (start for starts in found.values() for start in starts):
        start.pop("answers", None)  # the rows say whether they are the same
    spread = "medians and ranges" if own.engines * own.repeat > 1 else "one run a row"
    given = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()  # every server inherits it
    preloads = ", ".join(map(os.path.basename, given)) or "none"
    result = {
        "benchmark": "bench",
        "title": f"Served by {own.engines} engine(s) a row, {' '.join(load['load'])}",
        "command": shlex.join(["sipipe", "bench", *argv]),
        "machine": machine(),
        "note": f"{spread}; ms; LD_PRELOAD: {preloads}{CHECKED * bool(own.draws)}",
        "rows": rows,
        "engines": {name: {"job": _portable(jobs[name]), "starts": found[name]} for name in found},
        "failed": failed,
    }
    try:
        if own.output:
            Path(own.output).write_text(render_load(result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"bench: --output {own.output}: {error.strerror}") from None
    finally:  # whoever reads what is shown may go before its end
        if own.json:
            print(json.dumps(result, indent=1))
        else:
            show(result)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "bench",
        "Measure what SiPipe serves beside stock vLLM, by vLLM's own benchmark client.",
        usage="sipipe bench MODEL [options] [any engine option of vLLM]",
        epilog=EPILOG,
        add_help=False,
    )
    group = parser.add_argument_group("load")
    add, count = adder(group), at_least(1, int)
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
    return parser


def _measured(
    jobs: Mapping[str, Mapping[str, Any]], load: Mapping[str, Any], engines: int, limit: float
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Start each row's engine so many times, in turn forwards and backwards; returns by row what
    came of each start, and why rows failed."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    failed: dict[str, str] = {}
    for number in range(engines):
        for name in list(jobs) if number % 2 == 0 else reversed(list(jobs)):
            if name in failed:
                continue
            try:
                job = {**jobs[name], **load, "start": number}
                start = measured(name, job, "sipipe.tools.load", timeout=limit)
            except SiPipeError as error:  # the others are worth having
                if isinstance(error, ConfigError) and not any(found.values()):
                    raise
                tell(error)
                failed[name] = str(error)
                continue
            found[name].append(start)
            if number == 0 and "refused" in start:
                tell(f"{name}: what it answers could not be compared: {start['refused']}")
    return {name: starts for name, starts in found.items() if name not in failed}, failed


def _ways(text: str) -> list[tuple[str, int | None]]:
    """The ``type`` of ``--sampling``: names of mixes, some with their own number of requests."""
    found = []
    for entry in text.split(","):
        way, colon, count = entry.partition(":")
        if way not in SAMPLING:
            raise argparse.ArgumentTypeError(f'"{way}" is none of {", ".join(SAMPLING)}')
        found.append((way, at_least(1, int)(count) if colon else None))
    return found


_limits = checked(
    lambda text: [pair.strip() for pair in text.split(",")],
    "limits in ms such as ttft:500,tpot:50,e2el:9000",
    lambda pairs: all(re.fullmatch(r"(ttft|tpot|e2el):\d+(\.\d+)?", pair) for pair in pairs),
)
"""The ``type`` of ``--goodput``: what ``vllm bench serve`` takes."""


def _portable(job: dict[str, Any]) -> dict[str, Any]:
    """A job whose command names no path of this machine's Python."""
    return {**job, "command": ["python" if w == sys.executable else w for w in job["command"]]}


def _load(own: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """What is sent to each server: the other entries of :class:`sipipe.tools.load.Job`."""
    if own.trace_file:
        how = ["--dataset-name", "timed_trace", "--dataset-path", own.trace_file, "--self-timed"]
    elif own.sharegpt:
        how = ["--dataset-name", "sharegpt", "--dataset-path", own.sharegpt]
    else:
        how = ["--dataset-name", "random", "--random-input-len", str(own.prompt_tokens[0])]
        how += ["--random-output-len", str(own.tokens)]
    if own.goodput:
        how += ["--goodput", *own.goodput]
    _, given = config_of(rest)
    how += ["--tokenizer", given.tokenizer] if given.tokenizer else []
    how += ["--trust-remote-code"] * given.trust_remote_code
    several = len(own.prompt_tokens) > 1 and not own.trace_file and not own.sharegpt
    loads = [
        (way, count, prompt, rate)
        for way, one in own.sampling
        for count in ([one] if one else own.requests)
        for prompt in (own.prompt_tokens if several else [0])
        for rate in ([0] if own.trace_file else own.rate)
    ]
    return {
        # Here, for of random prompts and of traces vLLM's client ignores ends itself.
        "mixes": {way: SAMPLING[way] | {"ignore_eos": not own.own_end} for way, *_ in loads},
        "load": how,
        "loads": sorted(dict.fromkeys(loads), key=lambda each: each[1:]),
        "repeat": own.repeat,
        "draws": own.draws,
    }


def _seconds(loads: Sequence[tuple[str, int, int, float]], trace: str | None) -> float:
    """How long the requests of all loads take to arrive. Raises ConfigError: ``trace`` is none."""
    at = _arrivals(trace, most=max(count for _, count, *_ in loads)) if trace else []
    seconds = sum(count / r if r else max(at[:count], default=0.0) for _, count, _, r in loads)
    if seconds > LONGEST:
        raise ConfigError(f"bench: requests would arrive for {seconds:.0f} s (timestamps: seconds)")
    return seconds


def _arrivals(trace: str, most: int) -> list[float]:
    """When the first ``most`` requests of a trace arrive, in its own unit. ConfigError: it is none."""
    wrong = f"bench: --trace-file {trace}"
    try:
        lines = Path(trace).read_text("utf-8").splitlines()[:most]
    except OSError as error:
        raise ConfigError(f"{wrong} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{wrong} is not UTF-8 text") from None
    if len(lines) < most:
        raise ConfigError(f"{wrong} has {len(lines)} requests, one a line: fewer than --requests")
    arrivals = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            arrivals.append(float(row["timestamp"]))
            covered = 16 * len(row["hash_ids"]) >= row["input_length"]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise ConfigError(
                f"{wrong}, line {number}: must be a JSON object with timestamp, input_length and "
                "hash_ids"
            ) from None
        if not covered:
            raise ConfigError(f"{wrong}, line {number}: hash_ids of other than 16 tokens each")
    return arrivals


def _check(own: argparse.Namespace, rest: Sequence[str], jobs: Mapping[str, Any]) -> None:
    """Refuse what would say nothing, or would fail when the first engine has started. Raises
    ConfigError: a file or directory is missing, an ``--additional-config`` is wrong, stages share a
    GPU and nobody asked for it to be measured, or two engines would write one trace."""
    for option, file in (("--sharegpt", own.sharegpt), ("--trace-file", own.trace_file)):
        if file and not os.path.isfile(file):
            raise ConfigError(f"bench: {option}: there is no file {file}")
    if own.output:
        page = Path(own.output)
        if not os.path.isdir(page.parent):
            raise ConfigError(f"bench: --output: there is no directory {page.parent}")
        written = page if os.path.exists(page) else page.parent
        if os.path.isdir(page) or not os.access(written, os.W_OK):
            raise ConfigError(f"bench: --output: no file can be written at {page}")
    if own.trace_file and own.rate != [0]:
        raise ConfigError("bench: --rate: --trace-file has the arrivals, leave one of them out")
    if any(word.split("=")[0] in ("--nnodes", "-n") for word in rest):
        raise ConfigError("bench: --nnodes: several hosts by Ray alone (docs/multi-host.md)")
    devices = config_of(rest)[0].devices or ()
    if len(set(devices)) < len(devices) and not own.shared_devices:
        raise ConfigError(
            f'"devices" {list(devices)} puts stages on one GPU, which runs them in turn, so '
            "their speed says nothing of a pipeline's; --shared-devices measures it all the same"
        )
    writers: Counter[str] = Counter()
    for job in jobs.values():
        config, given = config_of(job["command"])
        if (trace := given.trace or config.trace) and job["command"][: len(STOCK)] != STOCK:
            writers[trace] += own.engines
    for trace, engines in writers.items():
        if engines > 1:
            raise ConfigError(
                f"bench: {engines} engines would write the trace {trace}: --engines 1 starts each "
                'row once, and --row "NAME=--trace DIR" gives a row its own'
            )
