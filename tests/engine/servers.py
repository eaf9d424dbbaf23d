"""Servers of tests, and their clients."""

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

import aiohttp
import psutil
import pytest
from tests.engine.engines import HERE, engine_environment, kill, named
from tests.engine.forks import Forked
from tests.ipc.link.conftest import free_port

STREAMS = 200
"""Streamed completions of :func:`load`."""

MODEL = "tiny"
"""Name that servers give the model."""

VLLM = "vllm.entrypoints.cli.main"
"""Module of vLLM's own command."""


class Server(contextlib.AbstractContextManager):
    """A server, ``python -m MODULE serve`` with two stages, in a process group of its own. It is ready
    when the constructor returns.

    Args:
        path: the model's directory.
        log: the file that it writes to.
        options: more words of its command line.
        temporary: its directory for temporary files.
        module: ``sipipe`` or :data:`VLLM`.
        forked: True if it and what it starts begin with vLLM imported (``serve_run.py``).
        more: more variables of its environment.
        port: the port that it listens on; None for a free one.
    """

    def __init__(
        self,
        path,
        log,
        *options,
        temporary="/tmp",
        module="sipipe",
        forked=False,
        more=None,
        port=None,
    ):
        self.log = log
        self.port = port or free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        words = ["serve", str(path), "-pp", "2", *options, "--host", "127.0.0.1"]
        words += ["--port", str(self.port), "--served-model-name", MODEL]
        environment = {**engine_environment(), "TMPDIR": str(temporary), **(more or {})}
        with log.open("w") as out:
            if forked:
                self.process = Forked(
                    HERE / "serve_run.py", [module, *words], env=environment, out=out
                )
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module, *words],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
        try:
            wait_until(self._is_ready, seconds=480)  # two ranks a stage, and a busy machine
        except BaseException:
            self.close()
            raise

    def _is_ready(self):
        """True if the server answers. Fails the test, with the log's end, if it has ended."""
        if self.process.poll() is not None:
            pytest.fail(f"the server did not start:\n{self.log.read_text()[-4000:]}")
        return health(self.address) == 200

    def everybody(self) -> list[psutil.Process]:
        """The server's first process, and all that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        return []

    def find(self, pattern) -> psutil.Process:
        """The first of its processes whose command line has ``pattern``."""
        return named(self.everybody(), pattern)[0]

    def close(self) -> None:
        """Kill the server and what it started."""
        kill(self.everybody())
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_):
        self.close()


def stock(path, log, *options, **more) -> Server:
    """Stock vLLM's server, each of whose two workers has a core."""
    cores = sorted(os.sched_getaffinity(0))
    bind = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    return Server(path, log, *options, module=VLLM, more=bind, **more)


def wait_until(condition, seconds=240):
    """Return once ``condition()`` is true. Fails the test after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def health(address) -> int:
    """The status of /health; 0 where nobody listens."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


async def stream(session, address, index, rng, model):
    """Stream one completion; every third client hangs up after a few pieces. Returns how it ended:
    "done", "given up" or "cut off"."""
    body = {
        "model": model,
        "prompt": [rng.randrange(3, 900) for _ in range(rng.randint(1, 60))],
        "max_tokens": rng.randint(4, 40),
        "ignore_eos": True,
        "stream": True,
        "temperature": rng.choice([0.0, 0.8]),
        "top_p": rng.choice([1.0, 0.9]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "stream_options": {"include_usage": True},
    }
    give_up = rng.randint(1, 5) if index % 3 == 0 else None
    async with session.post(f"{address}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        pieces = 0
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                return "done"
            piece = json.loads(data)
            assert "error" not in piece, piece
            if piece.get("usage"):
                assert piece["usage"]["completion_tokens"] == body["max_tokens"]
            pieces += 1
            if pieces == give_up:
                return "given up"
    return "cut off"


async def load(address, model=MODEL):
    """Stream :data:`STREAMS` completions at once. Returns how each ended, as :func:`stream` has it."""
    rng = random.Random(5)
    timeout = aiohttp.ClientTimeout(total=200)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        streams = [
            stream(session, address, index, random.Random(rng.random()), model)
            for index in range(STREAMS)
        ]
        return await asyncio.gather(*streams)


def metric(address, name) -> float:
    """The value of the metric ``name``, whatever its labels. Fails the test if there is none."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    line = re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert line, f"no {name} in /metrics"
    return float(line.group(1))


def post(address, body, seconds=60):
    """Ask for a completion. Returns the response, which the caller closes."""
    data = json.dumps({"model": MODEL, **body}).encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", data, kind)
    return urllib.request.urlopen(request, timeout=seconds)


def complete(address, prompt, parameters):
    """The tokens of one completion, and the log-probabilities at each, from the lowest."""
    body = {"prompt": prompt, "return_tokens_as_token_ids": True, **parameters}
    with post(address, body) as answer:
        logprobs = json.load(answer)["choices"][0]["logprobs"]
    chosen = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
    return chosen, [sorted(position.values()) for position in logprobs["top_logprobs"]]
