"""``sipipe bench``: SiPipe beside stock vLLM and other servers, each as it would best be set up."""

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sipipe.cli.parser import at_least, counts, make_parser, parse_engine_command
from sipipe.config import SiPipeConfig
from sipipe.cores import equal_shares, this_machine
from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools.child import measured
from sipipe.tools.measure import SAMPLING
from sipipe.tools.provenance import machine
from sipipe.versions import require_vllm

EPILOG = """\
Rows (--rows, a list): sipipe, stock (the same stages), stock-tp (the same devices, tensor parallel),
stock-one and sipipe-one (one stage with all cores, or one GPU), stock-cut (stock with --layers).
Every other option is vLLM's, and given to each server that is
started. Servers are started in turn, forwards and then backwards, one at a time.

  sipipe bench build/models/bench --pp 2
  sipipe bench build/models/bench --pp 2 --sampling greedy,top-p,all --requests 128 --json
  sipipe bench MODEL --pp 4 --tp 2 --trace-file arrivals.jsonl --url SGLang=http://host:30000
  sipipe bench MODEL --pp 2 --rows sipipe --row "vLLM's scheduler=--scheduler-cls ..." \\
      --row "stock, 8 in flight=stock --max-num-seqs 8"
"""

ROWS = ("sipipe", "stock", "stock-tp", "stock-one", "sipipe-one", "stock-cut")
STOCK = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] == "paper":
        return _paper(argv[1:])
    parser = make_parser(
        "bench",
        "Measure what SiPipe serves beside stock vLLM, by vLLM's own benchmark client.",
        usage="sipipe bench MODEL [options] [any engine option of vLLM]",
        epilog=EPILOG,
        add_help=False,
    )
    group = parser.add_argument_group("load")
    for name, default, what in (
        ("prompt-tokens", 16, "default: 16"),
        ("tokens", 16, "new ones (default: 16)"),
        ("repeat", 3, "repetitions an engine (default: 3)"),
        ("engines", 2, "starts of each row's engine, in turn (default: 2)"),
    ):
        group.add_argument(
            f"--{name}", type=at_least(1, int), default=default, metavar="N", help=what
        )
    group.add_argument(
        "--requests", type=counts, default=[64], metavar="LIST", help="how many (default: 64)"
    )
    group.add_argument(
        "--sampling", default="greedy,all", metavar="LIST", help=f"of {', '.join(SAMPLING)}"
    )
    group.add_argument(
        "--rate", type=at_least(0), metavar="N", help="requests/s (default: at once)"
    )
    group.add_argument("--sharegpt", metavar="FILE", help="prompts and lengths of ShareGPT's file")
    group.add_argument(
        "--trace-file", metavar="FILE", help="arrivals and lengths: timed_trace of vllm bench serve"
    )
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--rows", metavar="LIST", help="of those below (default: all that differ here)"
    )
    for option, form, what in (
        (
            "--row",
            "NAME=OPTIONS",
            "one more row: SiPipe, or stock vLLM where they begin with stock",
        ),
        ("--url", "NAME=URL", "one more row: a server that runs already"),
    ):
        group.add_argument(option, action="append", default=[], metavar=form, help=what)
    group.add_argument(
        "--draws",
        type=at_least(0, int),
        default=1024,
        metavar="N",
        help="for the chi-square; 0: none",
    )
    group.add_argument(
        "--shared-devices", action="store_true", help="measure stages that share a GPU all the same"
    )
    group.add_argument("--json", action="store_true", help="the figures as JSON")
    usual = {"-pp": "--pp", "--pipeline-parallel-size": "--pp"}
    usual |= {"-tp": "--tp", "--tensor-parallel-size": "--tp"}
    own, settings, rest = parse_engine_command(parser, [usual.get(word, word) for word in argv])
    ways = own.sampling.split(",")
    unknown = [way for way in ways if way not in SAMPLING]
    if unknown:
        raise ConfigError(f'bench: --sampling "{unknown[0]}" is none of {", ".join(SAMPLING)}')
    jobs = _rows(own, settings, rest)
    _check_devices(rest, own)
    require_vllm()
    load = {
        "mixes": {way: SAMPLING[way] for way in ways},
        "load": _load(own),
        "requests": own.requests,
        "repeat": own.repeat,
        "draws": own.draws,
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    failed: dict[str, str] = {}
    for number in range(own.engines):
        for name in list(jobs) if number % 2 == 0 else reversed(jobs):
            if name in failed:
                continue
            try:
                found[name].append(measured(name, jobs[name] | load, "sipipe.tools.load"))
            except ConfigError:
                raise
            except SiPipeError as error:  # the others are worth having
                print(f"sipipe: {error}", file=sys.stderr)
                failed[name] = str(error)
    for name in failed:
        del found[name]
    if not found:
        raise SiPipeError(next(iter(failed.values())))
    result = {
        "benchmark": "bench",
        "title": f"Served by {own.engines} engine(s) a row, {' '.join(load['load'])}",
        "command": shlex.join(["sipipe", "bench", *argv]),
        "machine": machine(),
        "note": "medians and ranges; ms; equal: requests whose greedy tokens are those of the first "
        "row; draws p: chi-square of drawn tokens against the server's own probabilities",
        "rows": _table(jobs, found),
        "engines": {name: {"job": _portable(jobs[name]), "starts": found[name]} for name in found},
        "failed": failed,
    }
    if own.json:
        print(json.dumps(result, indent=1))
    else:
        _show(result)
    return 1 if failed else 0


def _portable(job: dict[str, Any]) -> dict[str, Any]:
    """A job whose command names no path of this machine's Python."""
    return {**job, "command": ["python" if w == sys.executable else w for w in job["command"]]}


def _paper(argv: Sequence[str]) -> int:
    """``sipipe bench paper``, whose code and data are the checkout's, not the package's."""
    import importlib

    if not Path("benchmarks/paper.py").exists():
        raise ConfigError("bench paper: run it in a checkout of SiPipe (docs/evaluation.md)")
    sys.path.insert(0, str(Path.cwd()))
    status: int = importlib.import_module("benchmarks.paper").main(argv)
    return status


def _rows(
    own: argparse.Namespace, settings: Mapping[str, Any], rest: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """What is started for each row, by its name: entries of :class:`sipipe.tools.load.Job`.

    Raises:
        ConfigError: no model, an unknown row.
    """
    p, t = own.pp or 1, own.tp or 1
    cut = ",".join(map(str, settings["layers"])) if type(settings.get("layers")) is list else ""
    degrees = {
        "sipipe": (p, t),
        "stock": (p, t),
        "stock-tp": (1, p * t),
        "stock-one": (1, 1),
        "sipipe-one": (1, 1),
        "stock-cut": (p, t),
    }
    if own.rows is None:
        names = ["sipipe", "stock"]
        names += ["stock-tp"] * (p > 1) + ["stock-one", "sipipe-one"] * (p * t > 1)
        names += ["stock-cut"] * bool(cut)
    else:
        names = [name for name in own.rows.split(",") if name]
    wrong = next((name for name in names if name not in ROWS), None)
    if wrong is not None:
        raise ConfigError(f'bench: --rows "{wrong}" is none of {", ".join(ROWS)}')
    if "stock-cut" in names and not cut:
        raise ConfigError("bench: --rows stock-cut wants --layers, such as --layers 7,1")
    words = [word for i, word in enumerate(rest) if not {"-pp", "-tp"} & {word, rest[i - 1]}]
    model = words[0] if words else "-"
    if model.startswith("-"):
        raise ConfigError("bench: name the MODEL first: sipipe bench MODEL [options]")
    jobs = {}

    def add(name: str, options: Sequence[str], stages: int, ranks: int, cut: str = "") -> None:
        command = [*words, "-pp", str(stages), "-tp", str(ranks)]
        env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        if name in ROWS[1:4] or cut or options[:1] == ["stock"]:
            command = [*STOCK, *command, *options[1:]]
            env["VLLM_CPU_OMP_THREADS_BIND"] = equal_shares(this_machine(), stages * ranks)
            env |= {"VLLM_PP_LAYER_PARTITION": cut} if cut else {}
        else:
            command = [sys.executable, "-m", "sipipe", "serve", *command, *options]
        env = {key: os.environ.get(key, value) for key, value in env.items()}
        jobs[name] = {"command": command, "env": env, "url": "", "model": model}

    for name in names:
        stages, ranks = degrees[name]
        mine = settings if stages == p else {k: v for k, v in settings.items() if k != "layers"}
        options = [] if name.startswith("stock") else _options(mine)
        add(name, options, stages, ranks, cut if name == "stock-cut" else "")
    for pair in own.row:
        name, _, text = pair.partition("=")
        options = shlex.split(text)
        # vLLM takes the last of two values, but the cores' shares are by the degrees.
        stages, ranks = (
            int(options[options.index(flag) + 1]) if flag in options[:-1] else usual
            for flag, usual in (("--pp", p), ("--tp", t))
        )
        options = [
            word for i, word in enumerate(options) if not {"--pp", "--tp"} & {word, options[i - 1]}
        ]
        add(name, options, stages, ranks)
    for pair in own.url:
        name, _, url = pair.partition("=")
        if not url.startswith("http"):
            raise ConfigError(f'bench: --url "{pair}" is not NAME=http://HOST:PORT')
        jobs[name] = {"command": [], "env": {}, "url": url.rstrip("/"), "model": model}
    return jobs


def _options(settings: Mapping[str, Any]) -> list[str]:
    """Checked settings as options of ``sipipe serve`` once more."""
    return [
        f"--{name.replace('_', '-')}={value if isinstance(value, str) else _text(value)}"
        for name, value in settings.items()
    ]


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).strip("[]")


def _load(own: argparse.Namespace) -> list[str]:
    """Options of ``vllm bench serve``."""
    if own.trace_file:
        found = ["--dataset-name", "timed_trace", "--dataset-path", own.trace_file, "--self-timed"]
    elif own.sharegpt:
        found = ["--dataset-name", "sharegpt", "--dataset-path", own.sharegpt]
    else:
        found = ["--dataset-name", "random", "--random-input-len", str(own.prompt_tokens)]
        found += ["--random-output-len", str(own.tokens)]
    if own.rate and not own.trace_file:
        found += ["--request-rate", str(own.rate)]
    return found


def _check_devices(rest: Sequence[str], own: argparse.Namespace) -> None:
    """Refuse figures that would say nothing.

    Raises:
        ConfigError: stages share a GPU, and nobody asked for it to be measured.
    """
    given = [rest[i + 1] for i, word in enumerate(rest[:-1]) if word == "--additional-config"]
    try:
        additional = json.loads(given[-1]) if given else {}
    except ValueError as error:
        raise ConfigError(f"--additional-config must be a JSON object: {error}") from None
    devices = SiPipeConfig.from_additional_config(additional).devices or ()
    if len(set(devices)) < len(devices) and not own.shared_devices:
        raise ConfigError(
            f'"devices" {list(devices)} puts stages on one GPU, which runs them in turn, so '
            "their speed says nothing of a pipeline's; --shared-devices measures it all the same"
        )


def _table(
    jobs: Mapping[str, Any], found: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """A row for each load, way of sampling and engine."""
    first = next(iter(found.values()))[0].get("answers")
    stock = [name for name in found if tuple(jobs[name]["command"][: len(STOCK)]) == STOCK]
    rows = []
    for load in next(iter(found.values()))[0]["runs"]:
        best = max((_speeds(found[name], load)[1] for name in stock), default=0.0)
        for name, starts in found.items():
            low, median, high = _speeds(starts, load)
            runs = [run for start in starts for run in start["runs"][load]]
            way, _, requests = load.partition(" ")
            row: dict[str, Any] = {"sampling": way, "requests": int(requests), "engine": name}
            row["tok/s"] = f"{median:,.0f} ({low:,.0f}-{high:,.0f})"
            row["of stock's best"] = f"{median / best:.2f}" if best else None
            for metric in ("ttft", "tpot"):
                for q in ("p50", "p99"):
                    values = [run[f"{q}_{metric}_ms"] for run in runs]
                    row[f"{metric.upper()} {q}"] = f"{statistics.median(values):,.0f}"
            row["KV tokens"] = starts[0]["kv_tokens"]
            row["memory MiB"] = sum(starts[0]["memory_mib"].values()) or None
            bound = jobs[name]["env"].get("VLLM_CPU_OMP_THREADS_BIND")
            row["cores"] = bound or "; ".join(starts[0]["plan"]).removeprefix("core plan: ")
            if first:
                same = [a == b for a, b in zip(starts[0]["answers"], first, strict=True)]
                row["equal"] = f"{sum(same)} of {len(same)}"
                told = starts[0]["draws"]
                row["draws p"] = f"{told['p']:.2f}" if told else None
            rows.append(row)
    return rows


def _speeds(starts: Sequence[Mapping[str, Any]], load: str) -> tuple[float, float, float]:
    """Lowest, median and highest output tokens/s of all repetitions."""
    figures = [run["output_throughput"] for start in starts for run in start["runs"][load]]
    return min(figures), statistics.median(figures), max(figures)


def _show(result: Mapping[str, Any]) -> None:
    rows = result["rows"]
    table = Table(title=result["title"], caption=result["note"], box=None)
    columns = [column for column in rows[0] if column != "cores"]
    for column in columns:
        table.add_column(column, justify="left" if column in ("sampling", "engine") else "right")
    for row in rows:
        table.add_row(*("" if row[column] is None else f"{row[column]}" for column in columns))
    console = Console(width=max(130, Console().width))
    console.print(table)
    for name, cores in {row["engine"]: row["cores"] for row in rows}.items():
        print(f"{name}: {cores}")
