"""What is done to a server: clients leave, never read, send half a request or all come at once, and
samplers are killed while it serves an adapter and a grammar.

One ``sipipe serve`` with a tiny model in two stages. While each fault lasts, and after it, other
clients' tokens are those of a quiet server; in the end no request, connection or thread is left.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import psutil

GOOD = 8
"""Streams beside each fault that are looked at."""
SECONDS = 60.0


def disconnects(address, rng, _pid):
    """A stream that is given up after its first piece."""
    with _ask(address, {"stream": True, "max_tokens": 100}) as connection:
        connection.recv(rng.randrange(1, 400))


def never_reads(address, rng, _pid):
    """A stream into a socket that takes a kilobyte, and nobody reads."""
    return _ask(address, {"stream": True, "max_tokens": 150, "logprobs": 5}, small=True)


def half_a_body(address, rng, _pid):
    body = json.dumps({"model": "tiny", "prompt": [5] * 20, "max_tokens": 4}).encode()
    connection = _connect(address)
    connection.sendall(_head(len(body)) + body[: rng.randrange(len(body))])
    return connection


def all_at_once(address, rng, _pid):
    """A thousand requests, each on a connection of its own."""
    held = [_ask(address, {"max_tokens": 2}) for _ in range(1000)]
    for connection in held:
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
    return held


def kills_sampler(_address, rng, pid):
    """Amid the streams that are looked at; a moment later where there is none just then."""

    def strike():
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(pid).children(recursive=True):
                if re.fullmatch(r"sampler\d+", process.name()):
                    process.kill()
                    return
            threading.Timer(0.1, strike).start()

    threading.Timer(rng.random() * 2, strike).start()


KINDS = {
    "a client goes away amid its stream": (disconnects, 40),
    "a client never reads its stream": (never_reads, 12),
    "a client sends half of its request": (half_a_body, 24),
    "1,000 clients come at once": (all_at_once, 1),
    "a sampler of a server with an adapter is killed": (kills_sampler, 3),
    "a sampler of a server is killed amid a grammar": (kills_sampler, 3),
}
ADAPTED, GRAMMAR = [*KINDS][-2:]
MORE = {ADAPTED: {"model": "adapter"}, GRAMMAR: {"structured_outputs": {"regex": "[a-z ]{40,60}"}}}
"""What the streams ask for beside."""


def run(only, seed, scale, each=lambda *_: None, *, stock=False):
    """A row of the table for each kind of such a name; ``stock``: of stock vLLM's server."""
    kinds = {name: kind for name, kind in KINDS.items() if re.search(only, name)}
    if stock:
        kinds = {name: kind for name, kind in kinds.items() if kind[0] is not kills_sampler}
    if not kinds:
        return []
    from tests.engine import servers
    from tests.engine.engines import model, prompts
    from tests.engine.servers import complete, metric
    from tests.engine.test_features import make_adapter

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    scratch = Path(tempfile.mkdtemp(prefix="f"))
    path = model(scratch)
    adapter = make_adapter(scratch / "adapter", json.loads((path / "config.json").read_text()))
    options = ["--max-model-len", "256", "--dtype", "float32"]
    options += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={adapter}"]
    options += [] if stock else ["--enforce-eager"]  # stock's second stage needs its warm-up
    rows, start = [], servers.stock if stock else servers.Server
    with start(path, scratch / "log", *options, temporary=scratch) as server:
        where, main = server.address, server.process
        asked = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "logprobs": 1}
        given = prompts(GOOD, longest=40, seed=seed)
        with ThreadPoolExecutor(GOOD) as pool:

            def tokens(name):
                more = asked | MORE.get(name, {})
                return list(pool.map(lambda prompt: complete(where, prompt, more)[0], given))

            for name, (fault, count) in kinds.items():
                expected = tokens(name)
                before = _held(main.pid)
                rng, held = Random(f"{seed} {name}"), []
                row = dict.fromkeys(("injected", "recovered", "error", "hung", "wrong"), 0)
                row |= {"kind": name, "leaked": 0, "unclear": 0, "median_s": None}
                row["longest_s"] = None
                for _ in range(max(1, round(count * scale))):
                    held.append(fault(where, rng, main.pid))
                    row["injected"] += 1
                verdict = "recovered" if tokens(name) == expected else "wrong"
                for connection in held:
                    for one in connection if isinstance(connection, list) else [connection]:
                        with contextlib.suppress(OSError, AttributeError):
                            one.close()
                deadline = time.monotonic() + SECONDS
                while (busy := metric(where, "vllm:num_requests_running")) or _more(
                    _held(main.pid), before
                ):
                    if time.monotonic() > deadline:
                        verdict = "hung" if busy else "leaked"
                        break
                    time.sleep(0.2)
                if tokens(name) != expected:
                    verdict = "wrong"
                row[verdict] += row["injected"]
                rows.append(row)
                each(name, row["injected"], verdict)
    shutil.rmtree(scratch, ignore_errors=True)
    return rows


def _held(pid):
    """Descriptors and threads of all of the server's processes."""
    everybody = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(p.num_fds() for p in everybody), sum(p.num_threads() for p in everybody)


def _more(now, before):
    """Some connections stay open for a while, and pools of threads fill up."""
    return now[0] > before[0] + 2 * GOOD or now[1] > before[1] + 64


def _connect(address, *, small=False):
    host, port = re.search(r"//(.*):(\d+)", address).groups()
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.settimeout(SECONDS)
    connection.connect((host, int(port)))
    return connection


def _head(length):
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: sipipe\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def _ask(address, asked, *, small=False):
    body = {"model": "tiny", "prompt": [5, 6, 7], "ignore_eos": True, "temperature": 0.0} | asked
    connection = _connect(address, small=small)
    data = json.dumps(body).encode()
    connection.sendall(_head(len(data)) + data)
    return connection
