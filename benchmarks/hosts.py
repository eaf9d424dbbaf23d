"""Two hosts with a delay between them: SiPipe beside stock vLLM's own pipeline, in one run.

    python -m benchmarks.hosts [--quick] [--delays 0,5,20] [--inflight 2,3,5]   # make bench-hosts

Two network namespaces on this machine, half of its cores each, joined by a cable that delays
(:mod:`benchmarks.delayed_cable`); one stage on each. An engine is started once and measured at
every delay, with one request and with 32 at once. "Delays a token": what a token takes longer than
at no delay, in one-way delays. "Predicted" is the planner's rule (docs/planner.md, section 6),
which gets from the measurement at no delay what a round trip of one microbatch takes and the
period between two: ``tokens/s = rows / max(period, (round trip + 2 delays) / m)``.

Needs root and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from tests.hosts import Cluster, why_not

from benchmarks.harness import MODELS, report
from benchmarks.make_model.checkpoint import make_model

CABLE = Path(__file__).with_name("delayed_cable.py")
SIDES = {"stock": ["vllm.entrypoints.cli.main", "serve"], "sipipe": ["sipipe", "serve"]}
START_SECONDS = 600.0
OPTIONS = [
    *("-pp", "2", "--max-model-len", "512", "--max-num-seqs", "64", "--no-enable-prefix-caching"),
    *("--host", "127.0.0.1", "--port", "8000", "--served-model-name", "m", "--nnodes", "2"),
    *("--master-port", "29800"),
]
UNEVEN = ["--additional-config", '{"sipipe": {"kv_loss": 0.5}}']
"""Layers cut 7 and 1: what that costs of the KV cache, so many requests cannot fill."""
REPETITIONS = 3
CLIENT = """
import asyncio, json, sys, time
import aiohttp

async def ask(session, i, tokens):
    body = {"model": "m", "prompt": [3 + (7 * i + k) % 900 for k in range(16)], "stream": True,
            "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    times = []
    async with session.post("http://127.0.0.1:8000/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                assert b'"error"' not in line, line
                times.append(time.perf_counter())
    return (times[-1] - times[0]) / (tokens - 1)

async def main(requests, tokens, repetitions):
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        found = []
        for length in (4, *[tokens] * repetitions):
            began = time.perf_counter()
            each = await asyncio.gather(*(ask(session, i, length) for i in range(requests)))
            found.append([requests * length / (time.perf_counter() - began), each])
        print(json.dumps(found[1:]))

asyncio.run(main(*map(int, sys.argv[1:])))
"""


class Cable:
    """The cable between the hosts of ``cluster``, and its delay."""

    def __init__(self, cluster: Cluster) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(CABLE), *(str(host.pid) for host in cluster.hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.delay(0.0)
        for host in cluster.hosts:
            host.plug_in()

    def delay(self, seconds: float) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seconds, file=self._process.stdin, flush=True)
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit("the cable between the hosts broke: see above")

    def cpu_seconds(self) -> float:
        """What carrying the packets has cost so far, of the cores that the engines run on."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def close(self) -> None:
        self._process.communicate(timeout=10)


@contextmanager
def served(cluster: Cluster, side: str, model: Path, *options: str) -> Iterator[None]:
    """An engine with a stage on each host; nothing of it is left afterwards."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    head = cluster.hosts[0].address
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for node, host in enumerate(cluster.hosts):
            own = ",".join(map(str, cores[half:] if node else cores[:half]))
            command = ["taskset", "-c", own, sys.executable, "-m", *SIDES[side], str(model)]
            command += [*OPTIONS, *options, "--master-addr", head, "--node-rank", str(node)]
            environment = {
                "VLLM_CPU_OMP_THREADS_BIND": own,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_HOST_IP": host.address,
                "GLOO_SOCKET_IFNAME": "wire",
                "SIPIPE_SECRET": "of a benchmark on one machine",
                "VLLM_RPC_BASE_PATH": directory,  # of sockets, which stock vLLM leaves
            }
            with Path(directory, str(node)).open("w") as log:
                processes.append(
                    host.start(
                        command + ["--headless"] * node,
                        env=os.environ | environment,
                        stdout=log,
                        stderr=log,
                    )
                )
        logs = [Path(directory, str(node)) for node in (0, 1)]
        try:
            deadline = time.monotonic() + START_SECONDS
            while "Application startup complete" not in logs[0].read_text():
                ended = [process.poll() is not None for process in processes]
                if any(ended) or time.monotonic() > deadline:
                    said = "\n".join(log.read_text()[-2000:] for log in logs)
                    raise SystemExit(f"{said}\n{side} did not start")
                time.sleep(0.5)
            print(f"{side} {' '.join(options)} is up", file=sys.stderr, flush=True)
            yield
        finally:
            for host in cluster.hosts:
                host.end_all()


def measure(cluster: Cluster, cable: Cable, requests: int, tokens: int) -> dict[str, float]:
    """Tokens per second of all requests together and ms a token of each, medians of
    ``REPETITIONS``, and how much of a core the cable takes meanwhile."""
    began, before = time.monotonic(), cable.cpu_seconds()
    client = cluster.hosts[0].python(CLIENT, *map(str, (requests, tokens, REPETITIONS)))
    said, _ = client.communicate(timeout=600)
    if client.returncode:
        raise SystemExit("the client failed: see above")
    carrying = (cable.cpu_seconds() - before) / (time.monotonic() - began)
    rates, times = zip(*json.loads(said), strict=True)
    token = statistics.median(statistics.median(each) for each in times)
    found = {"tok/s": statistics.median(rates), "ms a token": token * 1e3, "cable, cores": carrying}
    print(f"{requests} requests: {found}, tok/s {rates}", file=sys.stderr, flush=True)
    return found


def predicted(rows: int, m: int, found: dict[str, float], alone: float, delay: float) -> float:
    """Tokens per second by the planner's rule.

    Args:
        rows: sequences, in ``m`` microbatches.
        found: what was measured at no delay.
        alone: a microbatch's round trip, were it alone, seconds.
        delay: one way, seconds.
    """
    period = rows / m / found["tok/s"]
    return rows / m / max(period, (alone + 2 * delay) / m)


def why_not_here() -> str:
    """Why two hosts cannot be made on this machine; or nothing."""
    return why_not() or ("" if os.path.exists("/dev/net/tun") else "needs /dev/net/tun")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="0 and 20 ms, 3 in flight, few tokens")
    parser.add_argument("--delays", default="", help="one way, ms (default: 0,5,20)")
    parser.add_argument("--inflight", default="", help="microbatches (default: 2,3,5)")
    parser.add_argument("--tokens", type=int, default=0, help="new ones (default: 64)")
    args = parser.parse_args()
    if reason := why_not_here():
        print(f"benchmarks.hosts: {reason}; nothing was measured")
        return
    delays = [
        float(d) / 1e3 for d in (args.delays or ("0,20" if args.quick else "0,5,20")).split(",")
    ]
    inflight = [int(m) for m in (args.inflight or ("3" if args.quick else "2,3,5")).split(",")]
    tokens = args.tokens or (16 if args.quick else 64)
    many = 32
    if delays[0]:
        raise SystemExit("--delays: the first is 0, which the others are compared with")
    model = make_model("llama", MODELS / "llama-bench", size="bench")
    cluster = Cluster(connected=False)
    cable = Cable(cluster)
    rows: list[dict[str, Any]] = []
    alone: dict[int, float] = {}
    sides = [("stock", 2), *(("sipipe", m) for m in inflight), ("one in flight", 1)]
    try:
        for side, m in sides:
            program, _, one = side.partition(" ")
            options = ["--inflight", str(m), *UNEVEN] if side != "stock" else []
            with served(cluster, "sipipe" if one else program, model, *options):
                if one:  # what a round trip takes, by how many sequences it has
                    for slots in inflight:
                        found = measure(cluster, cable, many // slots, tokens)
                        alone[slots] = found["ms a token"] / 1e3
                    break
                for requests, delay in itertools.product((1, many), delays):
                    cable.delay(delay)
                    found = measure(cluster, cable, requests, tokens)
                    where = {"in flight": m, "requests": requests, "delay ms": round(delay * 1e3)}
                    rows.append({"side": side, **where, **found})
                cable.delay(0.0)
    except KeyboardInterrupt:
        sys.exit("benchmarks.hosts: interrupted")
    finally:
        cluster.close()
        cable.close()
    if not rows:
        return
    for row in rows:
        requests, delay = row["requests"], row["delay ms"] / 1e3
        same = [r for r in rows if r["requests"] == requests]
        base = next(
            r for r in same if (r["side"], r["in flight"]) == (row["side"], row["in flight"])
        )
        stock = next(r for r in same if r["delay ms"] == row["delay ms"])
        longer = (row["ms a token"] - base["ms a token"]) / 1e3
        row["delays a token"] = longer / delay if delay else None
        row["predicted tok/s"] = None
        m = row["in flight"]
        if row["side"] == "sipipe" and requests > 1 and m in alone:
            row["predicted tok/s"] = predicted(many, m, base, alone[m], delay)
        row["of stock"] = row["tok/s"] / stock["tok/s"]
    report(
        "hosts",
        "Two hosts, a stage on each, one-way delay between them",
        rows,
        note=f"llama bench, bf16, compiled, greedy, prompts of 16 tokens, {tokens} new ones; SiPipe with "
        f"{' '.join(UNEVEN)}, stock with its even cut",
    )


if __name__ == "__main__":
    main()
