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
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import psutil

from sipipe.errors import ConfigError, SiPipeError, say
from sipipe.linux import memfd_create
from sipipe.messages.measured import MIXES
from sipipe.tools.child import answer

SHOWN = 20
"""Number of most likely tokens whose probabilities a server tells; :func:`draws` uses half of them."""
PERCENTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
"""Percentiles of the times to the first token and per output token."""
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
    """Command of the server, without host and port; empty: a server runs at ``url`` already."""
    env: dict[str, str]
    url: str
    model: str
    """Directory or name of the model, by which the client also finds its tokenizer."""
    mixes: dict[str, dict[str, Any]]
    """Sampling parameters by name; the first are those of the warm-up."""
    load: list[str]
    """Options of ``vllm bench serve`` that choose the requests."""
    loads: list[tuple[str, int, int, float]]
    """Loads, each as the name of its mix, the number of requests, tokens of their prompts (0: as
    ``load`` says), and requests a second (0: all at once, or as a trace has them)."""
    repeat: int
    """Number of times that every load is sent."""
    start: int = 0
    """Number of times that this row was measured before: later ones get other prompts."""
    draws: int
    """Number of tokens that are drawn for the chi-square; 0: no check."""


def run(job: Job) -> dict[str, Any]:
    """Measure one engine.

    Returns a JSON object:
        ``startup_s``: seconds until the server answers; ``wall_s``: with all loads.
        ``runs``: results of :meth:`Client.run`, one a repetition, by mix, number of requests, prompt
        tokens and rate, such as ``"all 64 prompt=8192 rate=2.0"`` (without what is 0).
        ``kv_tokens``: tokens that the KV cache holds; None where the server does not say.
        ``memory_mib``: memory by process, a shared page in equal parts.
        ``plan``: SiPipe's lines on cores, layers and who draws.
        ``answers`` and ``draws``: the checks, where they were asked for; None where the server does
        not answer them, with the reason in ``refused``.

    Raises ConfigError: the server refused an option. SiPipeError: it did not start, or requests failed.
    """
    began = time.monotonic()
    _ask_this_machine_directly()
    with _server(job) as (url, server, log):
        importlib.import_module("vllm.benchmarks.serve")  # seconds, while the server starts
        wait_until_served(url, server, log)
        result: dict[str, Any] = {"startup_s": time.monotonic() - began}
        result["runs"] = _runs(job, Client(job, url))
        plan_lines = r"(?:core plan|Layers of the stages|cpu_sampling auto).*"
        result["kv_tokens"] = kv_tokens(url)
        result["plan"] = re.findall(plan_lines, _read(log) if log else "")
        result["wall_s"] = time.monotonic() - began
        result["memory_mib"] = memory_mib(server.pid) if server else {}
        if job.draws:
            result |= {"answers": None, "draws": None}
            try:
                result["answers"] = answers(url)
                result["draws"] = draws(url, job.draws)
            except Exception as error:
                # The figures are worth having without the checks, whatever the server answers.
                result["refused"] = f"{type(error).__name__}: {error}"
        return result


def _ask_this_machine_directly() -> None:
    """Have no proxy between this process and a server here, which no proxy reaches."""
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if direct != "*":
        direct = f"{direct},127.0.0.1,localhost".lstrip(",")
        os.environ |= {"no_proxy": direct, "NO_PROXY": direct}


@contextmanager
def _server(job: Job) -> Iterator[tuple[str, subprocess.Popen[bytes] | None, int | None]]:
    """The job's server: its address, process, and the descriptor of its log, which is printed at the
    end. Process and log are None where the server runs already."""
    if not job.command:
        yield job.url, None, None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = memfd_create("server.log")
    server = subprocess.Popen(
        [*job.command, "--host", "127.0.0.1", "--port", str(port)],
        env={**os.environ, **job.env},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    try:
        yield f"http://127.0.0.1:{port}", server, log
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(20)  # wait: 20 s; the server, and the parent kills the group then
        say(_read(log))


def _read(log: int) -> str:
    return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")


def wait_until_served(url: str, server: subprocess.Popen[bytes] | None, log: int | None) -> None:
    """Wait until the server answers.

    Raises ConfigError: it refused an option. SiPipeError: it ended, or did not answer within
    :data:`STARTS`.
    """
    ends = time.monotonic() + STARTS
    while time.monotonic() < ends:
        try:
            _get(f"{url}/v1/models")
            return
        except urllib.error.HTTPError as error:
            if server is None or error.code in (401, 403):
                hint = ": set OPENAI_API_KEY to its key" if error.code in (401, 403) else ""
                raise SiPipeError(f"{url}/v1/models answers {error}{hint}") from None
        except (OSError, http.client.HTTPException):  # no port, or another protocol
            pass
        if server is None:
            break
        if (status := server.poll()) is not None:
            last_line = "" if log is None else _read(log).strip().rpartition("\n")[2]
            if status == 2 and last_line:
                raise ConfigError(last_line)
            why = f": {last_line}" if last_line.startswith("sipipe: ") else ""
            raise SiPipeError(f"the server ended with status {status}{why}")
        time.sleep(0.2)  # wait: STARTS in all; the server's start or end
    raise SiPipeError(f"no server answers at {url}")


class Client:
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
        """Send one load, whose prompts ``seed`` chooses.

        Returns speeds, and times to the first token and per output token, as ``vllm bench serve``
        saves them; and its ``span`` on the monotonic clock, seconds. Raises SiPipeError: requests
        failed.
        """
        from vllm.benchmarks.serve import main_async

        argv = [*self._argv, "--num-prompts", str(count), "--seed", str(seed)]
        if prompt:
            argv += ["--random-input-len", str(prompt)]
        if rate:
            argv += ["--request-rate", str(rate)]
        argv += ["--extra-body", json.dumps(params)]
        args: argparse.Namespace = self._parser.parse_args(argv)
        began = time.monotonic()
        result: dict[str, Any] = asyncio.run(main_async(args))
        if result["failed"]:
            raise SiPipeError(f"{result['failed']} of {count} requests failed")
        figures = {key: value for key, value in result.items() if _FIGURES.fullmatch(key)}
        return figures | {"span": [began, time.monotonic()]}


_FIGURES = re.compile(
    "completed|duration|request_goodput|.*_throughput|mean_(ttft|tpot)_ms|p[0-9]+_(ttft|tpot)_ms"
)


def _runs(job: Job, client: Client) -> dict[str, list[dict[str, Any]]]:
    """Warm the server up and send all loads; returns what :func:`run` does as ``runs``."""
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
        title = f"{name} {count}"
        if prompt:
            title += f" prompt={prompt}"
        if rate:
            title += f" rate={rate}"
        runs[title].append(client.run(job.mixes[name], count, prompt, seed, rate))
    return runs


def kv_tokens(url: str) -> int | None:
    """Read from the server's metrics how many tokens its KV cache holds; None: they do not say."""
    with suppress(OSError, ValueError, http.client.HTTPException):
        for line in _get(f"{url}/metrics").splitlines():
            if line.startswith("vllm:cache_config_info{"):
                names = "block_size", "num_gpu_blocks"
                size, blocks = (re.search(rf'\b{name}="(\d+)"', line) for name in names)
                return int(size[1]) * int(blocks[1]) if size and blocks else None
    return None


def memory_mib(pid: int) -> dict[str, int]:
    """Measure the memory of each process of a tree, in MiB, a shared page in equal parts.

    A process that ends meanwhile is left out.
    """
    memory: Counter[str] = Counter()
    tree: list[psutil.Process] = []
    with suppress(psutil.Error):
        top = psutil.Process(pid)
        tree = [top, *top.children(recursive=True)]
    for process in tree:
        with suppress(psutil.Error):
            words = process.cmdline()
            title = " ".join(words[:1]).split() or [process.name()]  # some give themselves none
            module = words[words.index("-m") + 1] if "-m" in words[:-1] else title[0]
            memory[module.rpartition("/")[2]] += process.memory_full_info().pss >> 20
    return dict(memory)


def answers(url: str, requests: int = 16, tokens: int = 16) -> list[Any]:
    """Ask for greedy tokens of some prompts; texts, where a server does not tell tokens."""
    body = {"max_tokens": tokens, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    choices = _complete(url, _prompts(requests), body)
    return [choice.get("token_ids") or choice["text"] for choice in choices]


def draws(url: str, count: int) -> dict[str, float] | None:
    """Compute the chi-square of ``count`` draws against the probabilities that the server tells.

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
            logprob = (logprobs.get("top_logprobs") or [{}])[0]
            likely = sorted(logprob, key=lambda token: -logprob[token])[:SHOWN]
            if len(likely) < SHOWN:
                return None
            least = logprob[likely[among - 1]]
            candidates = [token for token in likely if logprob[token] >= least]
            if (token := logprobs["tokens"][0]) not in candidates:
                drawn["outside"] += 1
                continue
            if len(candidates) > among:
                candidates = [token for token in candidates if logprob[token] > least]
                if token not in candidates:
                    continue
            mass = sum(math.exp(logprob[candidate]) for candidate in candidates)
            cells = {t: t if rank < among - 2 else "rest" for rank, t in enumerate(candidates)}
            for candidate, cell in cells.items():
                expected[cell] += math.exp(logprob[candidate]) / mass
            drawn[cells[token]] += 1
    total = sum(drawn.values())
    if drawn["outside"]:
        return {"p": 0.0, "outside": drawn["outside"], "draws": total}
    if not total:
        return None
    seen: Counter[str] = Counter()
    wanted: defaultdict[str, float] = defaultdict(float)
    for token, draws_expected in expected.items():
        cell = token if draws_expected >= 5 else "rest"
        seen[cell] += drawn[token]
        wanted[cell] += draws_expected
    square = sum((seen[cell] - number) ** 2 / number for cell, number in wanted.items())
    free = max(1, len(wanted) - 1)
    # Wilson and Hilferty: the cube root is close to normal.
    spread = 2 / (9 * free)
    normal = ((square / free) ** (1 / 3) - 1 + spread) / math.sqrt(spread)
    return {"p": math.erfc(normal / math.sqrt(2)) / 2, "chi_square": square, "draws": total}


def _prompts(count: int) -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(3, 300) for _ in range(16)] for _ in range(count)]


def _complete(url: str, prompts: list[list[int]], body: dict[str, Any]) -> list[dict[str, Any]]:
    """Send one request with many prompts; returns its choices in the prompts' order."""
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
    answer(lambda job: run(msgspec.convert(job, Job)))
