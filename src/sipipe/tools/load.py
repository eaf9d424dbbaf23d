"""One engine under load, for ``sipipe bench``: a server, vLLM's own benchmark client, a check.

``python -m sipipe.tools.load FD`` reads a :class:`Job` as JSON from stdin, starts the server or takes
the one at a URL, and prints what :func:`run` returns as JSON. Loads, datasets and metrics are those
of ``vllm bench serve``; :func:`answers` and :func:`draws` say whether it computes the same.

Who runs here
    The main thread measures. Another one sleeps on the socket ``FD``, whose other end is the
    parent's, and kills this process's group, with the server in it, when the parent is gone.
"""

import argparse
import asyncio
import dataclasses
import http.client
import importlib
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

import psutil

from sipipe.errors import ConfigError, SiPipeError
from sipipe.linux import memfd_create
from sipipe.messages.measured import MIXES
from sipipe.tools.child import answer

SHOWN = 20
"""Most likely tokens whose probabilities a server tells; :func:`draws` draws among half of them."""
PERCENTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
"""Of times to the first token and per output token."""
SAMPLING = MIXES | {
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "chat": {"temperature": 0.7, "top_p": 0.9},
}
"""Ways of sampling by name; ``all`` is every strategy at once."""
STARTS = 900.0
"""Seconds that a server may take to start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One engine, and what is sent to it."""

    command: list[str]
    """The server's, without host and port; empty: ``url`` is there already."""
    env: dict[str, str]
    url: str
    model: str
    """Also where the client's tokenizer is."""
    mixes: dict[str, dict[str, Any]]
    load: list[str]
    """Options of ``vllm bench serve`` that say what is sent."""
    loads: list[tuple[str, int, int, float]]
    """Of each load the mix; how many requests are sent; their prompts' tokens, 0 where ``load`` says how
    many; and requests a second, 0: at once, or as a trace has them."""
    repeat: int
    start: int = 0
    """How often the row was measured before."""
    draws: int
    """How many tokens are drawn for the chi-square; 0: no check."""


def run(job: Job) -> dict[str, Any]:
    """Returns ``startup_s``, and ``wall_s`` with all loads; ``kv_tokens`` that the KV cache holds;
    ``memory_mib`` by process (a shared page's part); ``plan``, SiPipe's lines on cores, layers and who draws;
    ``answers`` and ``draws``, None where the server does not answer these, as ``refused`` says; and
    ``runs``: by mix, number of requests, prompt tokens and rate ("all 64 prompt=8192 rate=2.0"; without
    what is 0) what :meth:`_Client.run` returns, one a repetition.
    """
    began = time.monotonic()
    server = None
    url = job.url
    log = None
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if direct != "*":  # no proxy reaches a server here
        direct = f"{direct},127.0.0.1,localhost".lstrip(",")
        os.environ |= {"no_proxy": direct, "NO_PROXY": direct}
    if job.command:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        log = memfd_create("server.log")
        server = subprocess.Popen(
            [*job.command, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **job.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        importlib.import_module("vllm.benchmarks.serve")  # seconds, while the server starts
        _wait(url, server, log)
        found: dict[str, Any] = {"startup_s": time.monotonic() - began}
        client = _Client(job, url)
        # Each run has prompts of its own, the same for every row: a server that was there may cache.
        first = job.start * (job.repeat * len(job.loads) + 1)
        for params in list(job.mixes.values())[1:]:
            client.run(params, 3, job.loads[0][2], first)
        # As it will be measured: microbatches are learnt from it; of a trace a quarter, and of
        # several rates the highest (0: all at once).
        part = 4 if "--self-timed" in job.load else 1
        rates: dict[tuple[int, int], float] = {}
        for _, count, prompt, rate in job.loads:
            highest = rates.get((count, prompt), rate)
            rates[count, prompt] = max(highest, rate) if highest and rate else 0
        for (count, prompt), rate in rates.items():
            client.run(next(iter(job.mixes.values())), -(-count // part), prompt, first, rate)
        runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for seed, (name, count, prompt, rate) in enumerate(job.loads * job.repeat, first + 1):
            run = client.run(job.mixes[name], count, prompt, seed, rate)
            more = f" prompt={prompt}" * (prompt > 0) + f" rate={rate}" * (rate > 0)
            runs[f"{name} {count}{more}"].append(run)
        told = r"(?:core plan|Layers of the stages|cpu_sampling auto).*"
        plan = re.findall(told, _read(log) if log else "")
        found |= {"runs": runs, "kv_tokens": kv_tokens(url), "plan": plan}
        found["wall_s"] = time.monotonic() - began
        found["memory_mib"] = memory_mib(server.pid) if server else {}
        if job.draws:
            found |= {"answers": None, "draws": None}
            try:
                found["answers"] = answers(url)
                found["draws"] = draws(url, job.draws)
            except (OSError, ValueError, LookupError) as error:  # what was measured is worth having
                found["refused"] = f"{type(error).__name__}: {error}"
        return found
    finally:
        if server is not None:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(20)  # wait: 20 s; the server, and the parent kills the group then
        if log is not None:
            print(_read(log), file=sys.stderr)


def _read(log: int) -> str:
    return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")


def _wait(url: str, server: subprocess.Popen[bytes] | None, log: int | None) -> None:
    """Until the server answers. Raises ConfigError: it refused an option. SiPipeError: it ended, or
    did not answer within :data:`STARTS`."""
    ends = time.monotonic() + STARTS
    while time.monotonic() < ends:
        try:
            _get(f"{url}/v1/models")
            return
        except urllib.error.HTTPError as error:
            if server is None or error.code in (401, 403):
                key = ": its key is OPENAI_API_KEY's" * (error.code in (401, 403))
                raise SiPipeError(f"{url}/v1/models answers {error}{key}") from None
        except (OSError, http.client.HTTPException):  # no port, or another protocol
            pass
        if server is None:
            break
        if (status := server.poll()) is not None:
            said = "" if log is None else _read(log).strip().rpartition("\n")[2]
            if status == 2 and said:
                raise ConfigError(said)
            why = f": {said}" if said.startswith("sipipe: ") else ""
            raise SiPipeError(f"the server ended with status {status}{why}")
        time.sleep(0.2)  # wait: STARTS in all; the server's start or end
    raise SiPipeError(f"no server answers at {url}")


class _Client:
    """``vllm bench serve``, called as a function: its imports cost seconds."""

    def __init__(self, job: Job, url: str) -> None:
        from vllm.benchmarks.serve import add_cli_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self._parser = FlexibleArgumentParser()
        add_cli_args(self._parser)
        served = json.loads(_get(f"{url}/v1/models"))["data"][0]["id"]
        self._argv = ["--base-url", url, "--model", served, "--tokenizer", job.model]
        self._argv += ["--disable-tqdm", *job.load]
        self._argv += ["--percentile-metrics", "ttft,tpot"]
        self._argv += ["--metric-percentiles", ",".join(map(str, PERCENTILES))]

    def run(
        self, params: dict[str, Any], count: int, prompt: int, seed: int, rate: float = 0
    ) -> dict[str, Any]:
        """One load, whose prompts ``seed`` chooses: speeds, and times to the first token and per
        output token, as ``vllm bench serve`` saves them; its ``span`` on the monotonic clock, seconds."""
        from vllm.benchmarks.serve import main_async

        argv = [*self._argv, "--num-prompts", str(count), "--seed", str(seed)]
        argv += ["--random-input-len", str(prompt)] * bool(prompt)
        argv += ["--request-rate", str(rate)] * bool(rate)
        argv += ["--extra-body", json.dumps(params)]
        args: argparse.Namespace = self._parser.parse_args(argv)
        began = time.monotonic()
        result: dict[str, Any] = asyncio.run(main_async(args))
        if result["failed"]:
            raise SiPipeError(f"{result['failed']} of {count} requests failed")
        kept = {key: value for key, value in result.items() if _KEPT.fullmatch(key)}
        return kept | {"span": [began, time.monotonic()]}


_KEPT = re.compile(
    "completed|duration|request_goodput|.*_throughput|mean_(ttft|tpot)_ms|p[0-9]+_(ttft|tpot)_ms"
)


def kv_tokens(url: str) -> int | None:
    """How many tokens the server's KV cache holds, by its metrics; None: they do not say."""
    with suppress(OSError, http.client.HTTPException):
        for line in _get(f"{url}/metrics").splitlines():
            if line.startswith("vllm:cache_config_info{"):
                names = "block_size", "num_gpu_blocks"
                size, blocks = (re.search(rf'\b{name}="(\d+)"', line) for name in names)
                return int(size[1]) * int(blocks[1]) if size and blocks else None
    return None


def memory_mib(pid: int) -> dict[str, int]:
    """What each process of a tree holds, MiB, a shared page in equal parts; of one that ended, nothing."""
    found: Counter[str] = Counter()
    tree: list[psutil.Process] = []
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        tree = [top, *top.children(recursive=True)]
    for process in tree:
        with suppress(psutil.Error):
            words = process.cmdline()
            title = " ".join(words[:1]).split() or [process.name()]  # some give themselves none
            module = words[words.index("-m") + 1] if "-m" in words[:-1] else title[0]
            found[module.rpartition("/")[2]] += process.memory_full_info().pss >> 20
    return dict(found)


def answers(url: str, requests: int = 16, tokens: int = 16) -> list[Any]:
    """Greedy tokens of some prompts (texts, where a server does not tell tokens)."""
    body = {"max_tokens": tokens, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    choices = _complete(url, _prompts(requests), body)
    return [choice.get("token_ids") or choice["text"] for choice in choices]


def draws(url: str, count: int) -> dict[str, float] | None:
    """Chi-square of ``count`` draws against the probabilities that the server tells for each.

    One prompt, temperature 1, top-k. In 16 bits the k-th token may be as likely as the next ones,
    and engines differ in whether they keep those (vLLM does): draws of any of them do not count
    then. The last two of the k, and those expected less than five times, are taken together. None: a
    server that does not tell probabilities, or only such draws.
    """
    how = {"max_tokens": 1, "return_tokens_as_token_ids": True, "logprobs": SHOWN}
    among = SHOWN // 2
    expected: defaultdict[str, float] = defaultdict(float)
    drawn: Counter[str] = Counter()
    for first in range(0, count, 256):
        body = {**how, "temperature": 1.0, "top_k": among}
        for choice in _complete(url, _prompts(1) * min(256, count - first), body):
            logprobs = choice.get("logprobs") or {}
            told = (logprobs.get("top_logprobs") or [{}])[0]
            likely = sorted(told, key=lambda token: -told[token])[:SHOWN]
            if len(likely) < SHOWN:
                return None
            least = told[likely[among - 1]]
            kept = [token for token in likely if told[token] >= least]
            if (token := logprobs["tokens"][0]) not in kept:
                drawn["outside"] += 1
                continue
            if len(kept) > among:
                kept = [token for token in kept if told[token] > least]
                if token not in kept:
                    continue
            whole = sum(math.exp(told[token]) for token in kept)
            cells = {t: t if rank < among - 2 else "rest" for rank, t in enumerate(kept)}
            for other, cell in cells.items():
                expected[cell] += math.exp(told[other]) / whole
            drawn[cells[token]] += 1
    total = sum(drawn.values())
    if drawn["outside"]:
        return {"p": 0.0, "outside": drawn["outside"], "draws": total}
    if not total:
        return None
    seen: Counter[str] = Counter()
    wanted: defaultdict[str, float] = defaultdict(float)
    for token, mass in expected.items():
        cell = token if mass >= 5 else "rest"
        seen[cell] += drawn[token]
        wanted[cell] += mass
    square = sum((seen[cell] - mass) ** 2 / mass for cell, mass in wanted.items())
    free = max(1, len(wanted) - 1)
    # Wilson and Hilferty: the cube root is close to normal.
    spread = 2 / (9 * free)
    normal = ((square / free) ** (1 / 3) - 1 + spread) / math.sqrt(spread)
    return {"p": math.erfc(normal / math.sqrt(2)) / 2, "chi_square": square, "draws": total}


def _prompts(count: int) -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(3, 300) for _ in range(16)] for _ in range(count)]


def _complete(url: str, prompts: list[list[int]], body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of one request with many prompts, in the prompts' order."""
    served = json.loads(_get(f"{url}/v1/models"))["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({"model": served, "prompt": prompts, **body}).encode(),
        {"Content-Type": "application/json", **_key()},
    )
    # wait: 600 s between two bytes; the server's answer
    with urllib.request.urlopen(request, timeout=600) as response:
        return sorted(json.load(response)["choices"], key=lambda choice: choice["index"])


def _get(url: str) -> str:
    request = urllib.request.Request(url, headers=_key())
    with urllib.request.urlopen(request, timeout=10) as response:  # wait: 10 s; the server's answer
        return str(response.read(), "utf-8")


def _key() -> dict[str, str]:
    """The header that ``vllm bench serve`` sends too."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


if __name__ == "__main__":
    answer(lambda job: run(Job(**job)))
