"""One stage on one GPU: SiPipe's ways to draw beside stock vLLM.

All servers are started at once, which saves most of a borrowed GPU's time, and get their loads in
turn: who has none sleeps. Each has its part of the GPU's memory. Weights are random, in the shape of
an 8B model (``sipipe/tools/gpu_steps.toml``); MODEL gives the tokenizer:

    python -m benchmarks.make_model llama build/models/tiny --size tiny
    python -m benchmarks.one_gpu build/models/tiny

The first loads of each server compile its kernels and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout, suppress
from itertools import product, repeat
from typing import Any

from benchmarks.harness import report
from sipipe.cli.gpu_check import TABLE
from sipipe.ipc.parent import kill_group
from sipipe.tools import load as served

STOCK = {"stock": [], "stock-sync": ["--no-async-scheduling"]}
LOADS = (("greedy", 256), ("all", 256), ("chat", 256), ("greedy", 64))
PORT = 9100
OPTIONS = TABLE["load"]["large"]["options"] + (
    "--max-num-seqs 256 --stream-interval 16 --no-enable-prefix-caching "
    "--gpu-memory-utilization 0.2 --kv-cache-memory-bytes 11G "
    """--compilation-config '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("model")
    add("--rows", default="stock,on,off", help=f"cpu_sampling, or of {list(STOCK)}")
    add("--options", default=OPTIONS, help="of each server")
    add("--loads", type=json.loads, default=LOADS, help="mixes of parameters, and requests of each")
    add("--tokens", type=int, default=128, help="new ones")
    add("--repeat", type=int, default=3, help="of each load")
    args = parser.parse_args()
    names = args.rows.split(",")
    send = ["--dataset-name", "random", "--random-input-len", "16", "--ignore-eos"]
    send += ["--random-output-len", str(args.tokens)]
    job = served.Job(
        command=[], env={}, url="", model=args.model, mixes=served.SAMPLING, load=send, loads=[],
        repeat=1, draws=0,
    )  # fmt: skip
    with redirect_stdout(sys.stderr), ExitStack() as stack:
        servers = {
            name: (port, stack.enter_context(Server(command(name, args, port), name)))
            for port, name in enumerate(names, PORT)
        }
        with ThreadPoolExecutor(len(names)) as pool:
            started = pool.map(lambda server: client(job, *server), servers.values())
            clients = dict(zip(names, started, strict=True))
            mixes = dict.fromkeys(mix for mix, _ in args.loads)
            for params in map(served.SAMPLING.get, mixes):
                list(
                    pool.map(
                        lambda who, how: who.run(how, 4, 0, 99), clients.values(), repeat(params)
                    )
                )
        found: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for turn, (mix, count) in product(range(1 + args.repeat), args.loads):
            for name in names[:: -1 if turn % 2 else 1]:
                one = clients[name].run(served.SAMPLING[mix], count, 0, turn)
                found[mix, count, name] += [one] * bool(turn)
    report(
        "one-gpu", "One stage on one GPU, 8B, random weights", rows(found, names[0]),
        note="medians; TPOT: ms per output token; TTFT: ms to the first; servers side by side, loads "
        "in turn, decodes in CUDA graphs, no torch.compile",
    )  # fmt: skip


def rows(found: dict[Any, list[dict[str, Any]]], first: str) -> list[dict[str, Any]]:
    """A line for each load and server; ratios are to the server ``first``."""
    lines = []
    for (mix, count, name), runs in found.items():
        speed, base = (
            statistics.median(run["output_throughput"] for run in found[mix, count, who])
            for who in (name, first)
        )
        line = {"sampling": mix, "requests": count, "engine": name, "tokens/s": round(speed)}
        line[f"of {first}"] = round(speed / base, 2)
        for figure in ("tpot", "ttft"):
            middle = statistics.median(run[f"p50_{figure}_ms"] for run in runs)
            line[f"{figure.upper()} p50"] = round(middle, 2)
        lines.append(line | {"runs": len(runs)})
    return lines


class Server:
    """A server's process, and all that it has started, for as long as the block lasts."""

    def __init__(self, words: list[str], name: str) -> None:
        self._words, self._log = words, f"{tempfile.gettempdir()}/one-gpu-{name}.log"

    def __enter__(self) -> subprocess.Popen[bytes]:
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        kill_group(self._process.pid)


def command(name: str, args: argparse.Namespace, port: int) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(port)]
    words = [args.model, *shlex.split(args.options), *where]
    if name in STOCK:
        return [
            sys.executable,
            "-P",
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            *words,
            *STOCK[name],
        ]
    settings = json.dumps({"sipipe": {"cpu_sampling": name}})
    words += ["--additional-config", settings]
    return [sys.executable, "-P", "-m", "sipipe", "serve", *words]


def client(job: served.Job, port: int, process: subprocess.Popen[bytes]) -> Any:
    url = f"http://127.0.0.1:{port}"
    served._wait(url, process, None)
    return served._Client(job, url)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    main()
