"""Servers that are all alive and get every load in turn, so that a machine whose speed drifts favours none.

``python -m benchmarks.side_by_side FD`` is a process that starts them, sends the loads by vLLM's own
client, and ends with all of them (:mod:`sipipe.tools.child`). Who has no load sleeps. With every load and
every repetition the servers change places: first to last, then last to first.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from benchmarks.harness import of_the_checkout
from benchmarks.turns import SPIN
from sipipe.tools import load as client
from sipipe.tools.child import TIMEOUT, answer, measured

MODULE = "benchmarks.side_by_side"
COMPILED = 3
"""Requests of each way of sampling by which a server compiles what it needs, beside the others."""


class Load(NamedTuple):
    """What every server is sent at once, or as requests arrive."""

    name: str
    sampling: str
    """Name of a mix of :data:`sipipe.tools.load.SAMPLING`."""
    requests: int
    rate: float
    """Requests a second; 0: all at once."""
    words: Sequence[str]
    """Options of ``vllm bench serve`` that choose prompts and lengths."""
    repeat: int = 1
    """Times in each engine."""
    learnt: int = 0
    """Requests of it that are sent before, alone: SiPipe's scheduler learns from them how many
    microbatches pay."""


Runs = dict[str, dict[str, list[dict[str, Any]]]]
"""By load and server the figures of each repetition, as ``vllm bench serve`` has them."""


def answered(
    servers: Mapping[str, Mapping[str, Any]],
    model: str,
    loads: Sequence[Load],
    *,
    first: int = 0,
    timeout: float = TIMEOUT,
) -> Runs:
    """Start all ``servers``, send each of ``loads`` to one after the other, and end them.

    Args:
        servers: by name what :func:`sipipe.cli.bench_rows.server_job` returns.
        model: directory or name of the model, by which the client finds its tokenizer.
        loads: their names are different.
        first: seed of the first prompts; other engines get other ones.
        timeout: seconds that all of it may take.

    Raises:
        SiPipeError: a server did not start, or requests failed.
    """
    job = {
        "servers": dict(servers),
        "model": model,
        "loads": [load._asdict() for load in loads],
        "first": first,
    }
    title = " and ".join(servers)
    runs: Runs = measured(title, job, of_the_checkout(MODULE), timeout=timeout)["runs"]
    return runs


def drive(job: dict[str, Any]) -> dict[str, Any]:
    """Send every load of ``job``, which :func:`answered` makes, to every server, in turn."""
    loads = [Load(**load) for load in job["loads"]]
    names = list(job["servers"])
    started = {name: _started(**job["servers"][name]) for name in names}
    for process, url in started.values():
        client.wait_until_served(url, process, None)
    clients = {
        (name, load.name): client.Client(_asked(job["model"], load), url)
        for name, (_, url) in started.items()
        for load in loads
    }
    seed = job["first"]
    by_mix = {load.sampling: load for load in loads}
    with ThreadPoolExecutor(len(names)) as pool:
        for load in by_mix.values():
            of_all = [clients[name, load.name] for name in names]
            # wait: those of the requests; the servers, whose end fails them
            list(pool.map(lambda each, of=load: _sent(each, of, COMPILED, seed), of_all))
    time.sleep(SPIN)  # wait: SPIN; nobody
    for load in loads:
        for name in names if load.learnt else ():
            _sent(clients[name, load.name], load, load.learnt, seed)
            time.sleep(SPIN)  # wait: SPIN; nobody
    runs: Runs = {load.name: {name: [] for name in names} for load in loads}
    for repetition in range(max(load.repeat for load in loads)):
        for number, load in enumerate(loads):
            if repetition >= load.repeat:
                continue
            seed += 1
            for name in names[:: -1 if (repetition + number) % 2 else 1]:
                figures = _sent(clients[name, load.name], load, load.requests, seed)
                runs[load.name][name].append(figures)
                time.sleep(SPIN)  # wait: SPIN; nobody
    return {"runs": runs}


def _asked(model: str, load: Load) -> client.Job:
    return client.Job(
        command=[],
        env={},
        url="",
        model=model,
        mixes=client.SAMPLING,
        load=list(load.words),
        loads=[],
        repeat=1,
        draws=0,
    )


def _sent(to: client.Client, load: Load, requests: int, seed: int) -> dict[str, Any]:
    mix = client.SAMPLING[load.sampling]
    return to.run(mix, requests, 0, seed, load.rate)


def _started(
    command: list[str], env: dict[str, str], url: str
) -> tuple[subprocess.Popen[bytes] | None, str]:
    """The process of a server, None for one that runs already, and its address."""
    if not command:
        return None, url
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", port],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env={**os.environ, **env},
    )
    return process, f"http://127.0.0.1:{port}"


if __name__ == "__main__":
    answer(drive)
