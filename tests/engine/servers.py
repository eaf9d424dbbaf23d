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
MODEL = "tiny"
VLLM = "vllm.entrypoints.cli.main"


class Server(contextlib.AbstractContextManager):
    """``python -m MODULE serve`` with two stages, in a process group of its own; ready once it is
    made.

    Args:
        temporary: its directory for temporary files.
        module: ``sipipe`` or :data:`VLLM`.
        forked: it and what it starts begin with vLLM imported (``serve_run.py``).
        more: of its environment.
        port: that it listens on; None: one of its own.
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
        self.log, self.port = log, port or free_port()
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
            wait_until(self._is_ready)
        except BaseException:
            self.close()
            raise

    def _is_ready(self):
        if self.process.poll() is not None:
            pytest.fail(f"the server did not start:\n{self.log.read_text()[-4000:]}")
        return health(self.address) == 200

    def everybody(self) -> list[psutil.Process]:
        """It, and what it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        return []

    def find(self, who) -> psutil.Process:
        """One of its processes, by a part of its command line."""
        return named(self.everybody(), who)[0]

    def close(self) -> None:
        kill(self.everybody())
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_):
        self.close()


def stock(path, log, *options, **more) -> Server:
    """Stock vLLM's."""
    cores = sorted(os.sched_getaffinity(0))
    bound = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    return Server(path, log, *options, module=VLLM, more=bound, **more)


def wait_until(true, seconds=240):
    deadline = time.monotonic() + seconds
    while not true():
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
    """One streamed completion; some hang up after a few pieces. Returns how it ended."""
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
            said = json.loads(data)
            assert "error" not in said, said
            if said.get("usage"):
                assert said["usage"]["completion_tokens"] == body["max_tokens"]
            pieces += 1
            if pieces == give_up:
                return "given up"
    return "cut off"


async def load(address, model=MODEL):
    rng = random.Random(5)
    timeout = aiohttp.ClientTimeout(total=200)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        seeds = [rng.random() for _ in range(STREAMS)]
        return await asyncio.gather(
            *(stream(session, address, i, random.Random(s), model) for i, s in enumerate(seeds))
        )


def metric(address, name) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found, f"no {name} in /metrics"
    return float(found.group(1))


def post(address, body, seconds=60):
    """What answers a completion."""
    data = json.dumps({"model": MODEL, **body}).encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", data, kind)
    return urllib.request.urlopen(request, timeout=seconds)


def complete(address, prompt, asked):
    """The tokens of one completion, and the log-probabilities named at each, in any order."""
    with post(address, {"prompt": prompt, "return_tokens_as_token_ids": True, **asked}) as answer:
        said = json.load(answer)["choices"][0]["logprobs"]
    chosen = [int(token.removeprefix("token_id:")) for token in said["tokens"]]
    return chosen, [sorted(at.values()) for at in said["top_logprobs"]]
