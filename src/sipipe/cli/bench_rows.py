"""The rows of ``sipipe bench``: which servers are started, each as it would best be set up."""

import argparse
import json
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from sipipe.cli.bench_tables import STOCK
from sipipe.cli.parser import at_least, counts, make_parser
from sipipe.config import STEPS_ASIDE, SiPipeConfig, asked_of_sipipe
from sipipe.cores import MOST_PLANNED, degrees, equal_shares, this_machine
from sipipe.errors import ConfigError, tell
from sipipe.versions import installed_vllm


def rows_of(
    args: argparse.Namespace, settings: Mapping[str, Any], arguments: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Servers of each row, by its name: entries of :class:`sipipe.tools.load.Job`.

    Args:
        args: the options of ``sipipe bench``.
        settings: SiPipe's settings on the command line.
        arguments: the model, and options for every server.

    Raises ConfigError: there is no model, or a row is unknown, wrong, or there twice.
    """
    parallel, words = _degrees_parser().parse_known_args(arguments)
    p = parallel.pp
    t = parallel.tp
    common = [*words, "-pp", str(p), "-tp", str(t)]
    cut = ",".join(map(str, settings["layers"])) if type(settings.get("layers")) is list else ""
    parts = [k for k, v in settings.items() if k == "layers" or (k == "cores" and v != "off")]
    of_one = {k: v for k, v in settings.items() if p == 1 or k not in parts}
    rows = {
        "sipipe": _options(settings),
        "stock": ["stock"],
        "stock-tp": ["stock", "-pp", "1", "-tp", str(p * t)],
        "stock-one": ["stock", "-pp", "1", "-tp", "1"],
        "sipipe-one": ["-pp", "1", "-tp", "1", *_options(of_one)],
        "stock-cut": ["stock", "--layers", cut],
    }
    aside = _steps_aside(of_one, words)
    if args.rows is None:
        names = ["sipipe", "stock"]
        names += ["stock-tp"] * (p > 1)
        names += ["stock-one", *["sipipe-one"] * (not aside)] * (p * t > 1)
        names += ["stock-cut"] * bool(cut)
    else:
        names = [name for name in args.rows.split(",") if name]
    if (wrong := next((name for name in names if name not in rows), None)) is not None:
        raise ConfigError(f'bench: --rows "{wrong}" is none of {", ".join(rows)}')
    of_one_stage = {"sipipe-one", *["sipipe"] * (p == 1)}
    if aside and (args.rows is None or of_one_stage & {*names}):
        tell(f"bench: rows {' and '.join(sorted(of_one_stage))} are stock vLLM: {STEPS_ASIDE}")
    if "stock-cut" in names and not cut:
        raise ConfigError("bench: --rows stock-cut wants --layers, such as --layers 7,1")
    if not words or words[0].startswith("-"):
        raise ConfigError("bench: name the MODEL first: sipipe bench MODEL [options]")
    jobs = [(name, server_job(common, rows[name])) for name in names]
    for pair in args.row:
        name, _, text = pair.partition("=")
        try:
            options = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"bench: --row '{pair}': {error}") from None
        if not name or "=" not in pair:
            raise ConfigError(f'bench: --row "{pair}" is not NAME=OPTIONS')
        jobs.append((name, server_job(common, options)))
    for pair in args.url:
        name, _, url = pair.partition("=")
        if not name or not _is_address(url):
            raise ConfigError(f'bench: --url "{pair}" is not NAME=http://HOST:PORT')
        jobs.append((name, {"command": [], "env": {}, "url": url.rstrip("/")}))
    if not jobs:
        raise ConfigError(f'bench: --rows "{args.rows}" names no row')
    for name, times in Counter(name for name, _ in jobs).items():
        if times > 1:
            raise ConfigError(f'bench: two rows are named "{name}"')
    return {name: job | {"model": words[0]} for name, job in jobs}


def _is_address(url: str) -> bool:
    """Say if ``url`` can be a server's: vLLM's client would say it when other rows are measured."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket that is not closed
        return False


def _steps_aside(settings: Mapping[str, Any], words: Sequence[str]) -> bool:
    """True if vLLM's own executor runs SiPipe's rows of one stage. It does on GPUs, unless a setting
    asks for SiPipe."""
    vllm = installed_vllm()
    additional = json.loads(config_of(words)[1].additional_config)
    settings_of_sipipe = [*asked_of_sipipe({"sipipe": settings}), *asked_of_sipipe(additional)]
    return vllm is not None and vllm.device != "cpu" and not settings_of_sipipe


def _degrees_parser() -> argparse.ArgumentParser:
    """A parser of stages and ranks, by any of their names."""
    parser = make_parser("bench", "", add_help=False)
    count = at_least(1, int, MOST_PLANNED)
    parser.add_argument("--pp", "-pp", "--pipeline-parallel-size", type=count, default=1)
    parser.add_argument("--tp", "-tp", "--tensor-parallel-size", type=count, default=1)
    return parser


def server_job(words: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """The server of a row: command, environment and no URL. A row's ``options`` come behind the
    ``words`` of all rows, and its degrees in the place of theirs."""
    stock = options[:1] == ["stock"]
    parser = _degrees_parser()
    if stock:
        parser.add_argument("--layers", type=counts)
        parser.add_argument("--speculative-config", "-sc", dest="drafts")
    row, command = parser.parse_known_args([*words, *options[stock:]])
    command += ["-pp", str(row.pp), "-tp", str(row.tp)]
    # All loads of a trace have the same prompts: later ones would be read from the cache.
    if not any(word.endswith("enable-prefix-caching") for word in command):
        command += ["--no-enable-prefix-caching"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    if stock:
        drafts = ["--speculative-config", row.drafts] if row.drafts and row.pp == 1 else []
        command = [*STOCK, *command, *drafts]
        workers = math.prod(degrees(command) or (row.pp, row.tp))
        env["VLLM_CPU_OMP_THREADS_BIND"] = equal_shares(this_machine(), workers)
        if row.layers:
            env["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, row.layers))
    else:
        command = [sys.executable, "-P", "-m", "sipipe", "serve", *command]
    env = {key: os.environ.get(key, value) for key, value in env.items()}
    return {"command": command, "env": env, "url": ""}


def _options(settings: Mapping[str, Any]) -> list[str]:
    """Checked settings, written as options of ``sipipe serve`` again."""
    as_json = partial(json.dumps, separators=(",", ":"))
    texts = ((k, v if isinstance(v, str) else as_json(v).strip("[]")) for k, v in settings.items())
    return [f"--{name.replace('_', '-')}={text}" for name, text in texts]


def config_of(words: Sequence[str]) -> tuple[SiPipeConfig, argparse.Namespace]:
    """SiPipe's settings in a command line's ``--additional-config``, and its options that matter to
    ``sipipe bench``. Raises ConfigError: the settings are wrong."""
    parser = make_parser("bench", "", add_help=False)
    parser.add_argument("--additional-config", default="{}")
    parser.add_argument("--trace")
    parser.add_argument("--tokenizer")
    parser.add_argument("--trust-remote-code", action="store_true")
    args, _ = parser.parse_known_args(words)
    try:
        additional = json.loads(args.additional_config)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--additional-config must be a JSON object: {error}") from None
    return SiPipeConfig.from_additional_config(additional), args
