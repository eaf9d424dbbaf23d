"""``sipipe bench``: SiPipe against stock vLLM on one model, in one run."""

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from sipipe.cli.parser import at_least, make_parser, parse_engine_command
from sipipe.errors import ConfigError, SiPipeError
from sipipe.ipc.sockets import own_sockets
from sipipe.tools.measure import SAMPLING
from sipipe.versions import require_vllm

EPILOG = """\
Every engine option of vLLM is taken as well and given to both sides. On the CPU engine both sides
are compiled (stock vLLM cannot run pipeline stages eagerly there), which takes a minute each.

  sipipe bench build/models/bench --pp 2
  sipipe bench build/models/bench --pp 2 --sampling greedy,top-p,all --requests 128 --json
  sipipe bench build/models/bench --pp 1 --requests 1,4,16
"""

SIDES = ("stock", "sipipe")
TIMEOUT = 1_800.0
"""Seconds that one side may take before it is stopped."""


def main(argv: Sequence[str]) -> int:
    parser = make_parser(
        "bench",
        "Measure served tokens per second of SiPipe and of stock vLLM, one after the other.",
        usage="sipipe bench MODEL [options] [any engine option of vLLM]",
        epilog=EPILOG,
        add_help=False,
    )
    group = parser.add_argument_group("load")
    for name, default, what in (
        ("prompt-tokens", 16, "default: 16"),
        ("tokens", 16, "new ones (default: 16)"),
        ("repeat", 3, "default: 3"),
    ):
        group.add_argument(
            f"--{name}", type=at_least(1, int), default=default, metavar="N", help=what
        )
    group.add_argument(
        "--requests", type=_counts, default=64, metavar="N,N", help="at once (default: 64)"
    )
    group.add_argument(
        "--sampling", default="greedy,all", metavar="LIST", help=f"of {', '.join(SAMPLING)}"
    )
    group.add_argument("--only", choices=("sipipe", "stock"), help="measure one side")
    group.add_argument(
        "--shared-devices", action="store_true", help="measure stages that share a GPU all the same"
    )
    group.add_argument("--json", action="store_true", help="the figures as JSON")
    own, settings, rest = parse_engine_command(parser, argv)
    ways = own.sampling.split(",")
    unknown = [way for way in ways if way not in SAMPLING]
    if unknown:
        raise ConfigError(f'bench: --sampling "{unknown[0]}" is none of {", ".join(SAMPLING)}')
    load = {name: getattr(own, name) for name in ("requests", "prompt_tokens", "tokens", "repeat")}
    job = {"argv": rest, "sampling": ways, "shared_devices": own.shared_devices, **load}
    require_vllm()
    results = measure_sides(job, settings, sides=(own.only,) if own.only else SIDES)
    if own.json:
        print(json.dumps({"job": job, "results": results}, indent=1))
    else:
        _show(results, own.requests, own.tokens)
    return 0


def _counts(text: str) -> int | list[int]:
    counts = [at_least(1, int)(part) for part in text.split(",")]
    return counts if len(counts) > 1 else counts[0]


def measure_sides(
    job: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    sides: Sequence[str] = SIDES,
) -> dict[str, Any]:
    """Run ``job`` (:class:`sipipe.tools.measure.Job` without its settings) on each side in turn.

    Returns for each side what :func:`sipipe.tools.measure.measure` does.
    """
    own = {"stock": None, "sipipe": settings}
    return {side: _measure(side, {**job, "settings": own[side]}) for side in sides}


def _measure(side: str, job: Mapping[str, Any]) -> dict[str, Any]:
    print(f"measuring {side} …", file=sys.stderr, flush=True)
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as log, ours, theirs, own_sockets():
        # A session of its own, so that it can be ended with all the engine's processes; the socket
        # ends it when this process is killed.
        process = subprocess.Popen(
            [sys.executable, "-m", "sipipe.tools.measure", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
            }
            | dict(os.environ),
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        try:
            out, _ = process.communicate(json.dumps(job).encode(), timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise SiPipeError(f"bench: {side} took more than {TIMEOUT:.0f} s") from None
        finally:
            _end(process)
        log.seek(0)
        if process.returncode == 2:  # what measure says of a wrong option
            raise ConfigError(f"bench: {log.read().decode().splitlines()[-1]}")
        if process.returncode != 0:
            raise SiPipeError(f"bench: {side} failed: {_keep(side, log.read())}")
    result: dict[str, Any] = json.loads(out)
    return result


def _keep(side: str, log: bytes) -> str:
    """Keep a failed engine's log; its first error, which is the cause, and where the log is."""
    with tempfile.NamedTemporaryFile(
        prefix=f"sipipe-bench-{side}-", suffix=".log", delete=False
    ) as file:
        file.write(log)
    found = re.search(r"\w+(Error|Exception): .*", log.decode(errors="replace"))
    return f"{found.group() if found else 'no error in its log'} (log: {file.name})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the measured engine where it still runs: politely first, then for certain."""
    for number, seconds in ((signal.SIGINT, 15.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(seconds)  # wait: 15 s, then SIGKILL and 5 s; the engine's end
        except subprocess.TimeoutExpired:
            continue


def _show(results: Mapping[str, Any], requests: int | list[int], tokens: int) -> None:
    loads = list(next(iter(results.values()))["tokens_per_second"])
    medians = {
        side: {load: statistics.median(result["tokens_per_second"][load]) for load in loads}
        for side, result in results.items()
    }
    at_once = f"{requests} requests at once, " if isinstance(requests, int) else ""
    print(f"tokens/s, {at_once}{tokens} new tokens each, median")
    width = max(12, *(len(load) + 1 for load in loads))
    header = f"{'sampling':<{width}}" + "".join(f"{side:>12}" for side in medians)
    pair = len(medians) == 2
    print(header + f"{'ratio':>10}" * pair)
    for load in loads:
        line = f"{load:<{width}}" + "".join(f"{side[load]:>12,.0f}" for side in medians.values())
        if pair:
            line += f"{medians['sipipe'][load] / medians['stock'][load]:>9.2f}x"
        print(line)
