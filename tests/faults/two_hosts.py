"""Two hosts (network namespaces) of one server, and what their network and processes may do to requests.

A network that is slow, in small packets, that loses packets or holds them all for a moment, strangers who
stay at every port, and a host that is stopped for a moment change no token. What is longer ends both
hosts, and so does a worker, server or agent that is killed: every request hears of it once, the last
line of both logs names the cause, and no process, socket or file is left on either. Started again, by
hand or by ``--restart``, they find each other. It needs root.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tests import hosts
from tests.faults.host_faults import (
    OPEN,
    Fault,
    Struck,
    cable_out,
    held,
    killed,
    lossy,
    slow,
    sockets,
    stopped_host,
    strangers_stay,
)
from tests.faults.served import Row, scratch_directory

CLIENT = r"""
import http.client, json, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

PATIENCE = float(sys.argv[2])
begun = threading.Event()

def read(answer, streamed, end):
    if not streamed:
        end["tokens"] = json.load(answer)["choices"][0]["token_ids"]
        return
    end["error"] = "cut off"
    for line in answer:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            end["error"] = end.pop("said", "")
        elif data:
            piece = json.loads(data)
            if "error" in piece:
                end["said"] = str(piece["error"])
            else:
                end["tokens"] += piece["choices"][0]["token_ids"]
                begun.set()

def ask(request):
    end = {"tokens": [], "error": "", "hung": False}
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=PATIENCE)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(request), headers)
        answer = connection.getresponse()
        if answer.status == 200:
            read(answer, request["stream"], end)
        else:
            end["error"] = f"{answer.status} {answer.read().decode()}"
    except TimeoutError:
        end["hung"] = True
    except (OSError, http.client.HTTPException) as error:
        end["error"] = f"{type(error).__name__} {error}"
    connection.close()
    begun.set()
    return end | {"at": time.monotonic()}

requests = json.load(open(sys.argv[1]))
with ThreadPoolExecutor(len(requests)) as pool:
    ends = pool.map(ask, requests)
    begun.wait()
    print("begun", flush=True)
    print(json.dumps(list(ends)), flush=True)
"""
"""Run on the main host: what became of each request of a file, once a first token was there."""
SERVES = "Application startup complete"
"""In the main host's log when both serve."""
STREAMS = 8
"""Requests at once; half of them are streams."""
PATIENCE = 300.0
"""Seconds without a byte after which a request hangs: many times what any fault may take."""
STARTED = 1200.0
"""Seconds for both to start, on a busy machine; the start's own bound is 600 after the imports."""
GONE = 120.0
"""Seconds for everybody to end, on a busy machine; the documented ones are 8 after the error."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A fault, and what becomes of two hosts."""

    fault: Fault
    times: int
    cause: str = ""
    """Pattern of the last line of both logs, if they end; empty if they go on."""
    restarts: bool = False
    """True if both run under ``--restart``, and have to come back by themselves."""


LOST_HOST = r"(host 1 \(.*\)|the main host \(.*\)) (died or cannot be reached|was ended)"
LOST_WORKER = r"stage worker stage\d\.0 \(pid \d+\).* died"
SERVER = "sipipe.engine.start.server"
WORKER = "Worker_PP"
KINDS = {
    "the network between two hosts is slow, in small packets": Kind(slow, 2),
    "a tenth of the packets between two hosts is lost": Kind(lossy, 4),
    "the network between two hosts is held for up to 2 s": Kind(held(0.2, 2), 4),
    "the cable between two hosts is out for up to 2 s": Kind(cable_out, 4),
    "strangers hold connections to all ports of two hosts": Kind(strangers_stay, 2),
    "a host of two is stopped for up to 3 s": Kind(stopped_host(0.5, 3), 4),
    "the network between two hosts is held for 10 s": Kind(held(10, 10), 2, LOST_HOST),
    "a host of two is stopped for 15 s": Kind(stopped_host(15, 15), 2, LOST_HOST),
    "a worker of two hosts is killed": Kind(killed((1, WORKER), (0, WORKER)), 2, LOST_WORKER),
    "the server or agent of two hosts is killed": Kind(
        killed((1, SERVER), (0, SERVER)),
        2,
        rf"{LOST_HOST}|the engine ended|the server was killed \(SIGKILL\)",
    ),
    "a worker of two hosts is killed under --restart": Kind(
        killed((1, WORKER), (0, WORKER)), 2, LOST_WORKER, restarts=True
    ),
}


def run(only: str, seed: int, scale: float, each: Any = lambda *_: None) -> list[dict[str, Any]]:
    """A row of the table for each kind whose name matches ``only``."""
    names = [name for name in KINDS if re.search(only, name)]
    if not names:
        return []
    if reason := hosts.why_not():
        print(f"two hosts: left out, {reason}", flush=True)
        return []
    rows = []
    with scratch_directory() as scratch, _pair(scratch, seed) as pair:
        for name, following in zip(names, [*names[1:], ""], strict=True):
            kind = KINDS[name]
            row = Row(name)
            rng = Random(f"{seed} {name}")
            for number in range(max(1, round(kind.times * scale))):
                pair.strike(row, kind, rng, number)
            if not following or KINDS[following].restarts != kind.restarts:
                for left in pair.end():
                    row.add("leaked", left)
            rows.append(row.finished())
            each(name, rows[-1]["injected"], rows[-1]["why"])
    return rows


@contextmanager
def _pair(scratch: Path, seed: int) -> Iterator[Pair]:
    cluster = hosts.Cluster()
    try:
        yield Pair(cluster, scratch, seed)
    finally:
        cluster.close()


class Pair:
    """Two hosts that serve a tiny model, started again where a fault has ended them."""

    def __init__(self, cluster: hosts.Cluster, scratch: Path, seed: int) -> None:
        from tests.engine.engines import greedy, model, prompts

        self._cluster = cluster
        self._scratch = scratch
        self._path = model(scratch)
        self._temporary = [scratch / "t0", scratch / "t1"]
        """Directories for the temporary files of each host."""
        for directory in self._temporary:
            directory.mkdir()
        # Some seconds of requests: a fault begins within one.
        parameters = greedy(STREAMS, shortest=150, longest=450)
        requests = [
            {
                "model": "m",
                "prompt": prompt,
                "return_token_ids": True,
                "stream": number % 2 == 0,
                **parameters[number],
            }
            for number, prompt in enumerate(prompts(STREAMS, longest=40, seed=seed))
        ]
        self._requests = scratch / "requests.json"
        self._requests.write_text(json.dumps(requests))
        self._expected: list[list[int]] = []
        """Tokens of each request, of servers without a fault."""
        self._served: Any = None
        self._starts = 0
        """Times that the servers which run now have started."""

    def strike(self, row: Row, kind: Kind, rng: Random, number: int) -> None:
        """Put in one fault, amid requests, and count in ``row`` what became of it."""
        if self._served is None:
            self._start(restarts=kind.restarts)
        processes = tuple(host.processes() for host in self._cluster.hosts)
        client = self._ask()
        time.sleep(rng.random())  # at another moment each time
        began = time.monotonic()
        with kind.fault(Struck(self._served, processes), rng, number):
            ends = _ends(client)
        verdict, why = self._what_became(kind, ends)
        seconds = [end["at"] - began for end in ends if end["error"]]
        row.add(verdict, f"{why}\n{self._logs()}", max(seconds, default=None))
        for error in sorted({end["error"] for end in ends}):
            print(f"{row.kind}: {verdict}; a client was told {error[:200]!r}", flush=True)
        if verdict not in ("recovered", "error"):
            self._drop()

    def end(self) -> list[str]:
        """End the servers as Ctrl-C does; returns what is left of them."""
        if self._served is None:
            return []
        for node in (1, 0):  # under --restart each would wait for the other's return
            main = self._served.find(node, "-m sipipe serve")
            for process in main:
                process.send_signal(signal.SIGTERM)
        left = self._left()
        self._drop()
        return left

    def _start(self, *, restarts: bool) -> None:
        """Start both servers, and compare their answers with those of the first."""
        from tests.engine.served_hosts import Served

        options = ["-pp", "2"]
        if restarts:
            options.append("--restart")
        environments = tuple({"TMPDIR": str(directory)} for directory in self._temporary)
        self._served = Served(
            self._cluster, self._path, self._scratch, *options, environments=environments
        )
        self._served.wait_for(0, SERVES, seconds=STARTED)
        self._starts = 1
        tokens = [end["tokens"] for end in _ends(self._ask())]
        self._expected = self._expected or tokens
        assert all(tokens), f"a request had no answer\n{self._logs()}"
        assert tokens == self._expected, "other tokens after both were started again"

    def _ask(self) -> Any:
        """Send all requests, and wait for the first token; returns the client's process."""
        client = self._cluster.hosts[0].python(CLIENT, str(self._requests), str(PATIENCE))
        assert client.stdout.readline() == "begun\n"
        return client

    def _what_became(self, kind: Kind, ends: list[dict[str, Any]]) -> tuple[str, str]:
        """The verdict on a fault, and why."""
        if any(end["hung"] for end in ends):
            return "hung", str([len(end["tokens"]) for end in ends])
        for end, expected in zip(ends, self._expected, strict=True):
            length = len(end["tokens"]) if end["error"] else len(expected)
            if end["tokens"] != expected[:length]:
                return "wrong", str(end)
        if not kind.cause:
            return self._goes_on(ends)
        if kind.restarts:
            return self._comes_back(kind)
        if left := self._left():
            return "leaked", str(left)
        last = [self._served.log(node).rstrip().rpartition("\n")[2] for node in (0, 1)]
        self._drop()
        for line in last:
            print(f"the last line: {line}", flush=True)
        clear = all(re.search(kind.cause, line) for line in last)
        return ("error", "") if clear else ("unclear", f"the last lines: {last}")

    def _goes_on(self, ends: list[dict[str, Any]]) -> tuple[str, str]:
        """The verdict where no request may hear of the fault, and the next ones neither."""
        if errors := {end["error"] for end in ends} - {""}:
            return "unclear", str(errors)
        ends = _ends(self._ask())
        if [end["tokens"] for end in ends] == self._expected:
            return "recovered", ""
        hung = any(end["hung"] for end in ends)
        return ("hung" if hung else "wrong"), f"when the fault was over: {ends}"

    def _comes_back(self, kind: Kind) -> tuple[str, str]:
        """The verdict where both have to come back by themselves."""
        from tests.engine.servers import wait_until

        self._starts += 1
        try:
            wait_until(lambda: self._served.log(0).count(SERVES) >= self._starts, STARTED)
        except AssertionError:
            return "hung", "they did not come back"
        again = rf"{kind.cause}.*\n.* the server ended by itself"
        for node in (0, 1):
            if len(re.findall(again, self._served.log(node))) != self._starts - 1:
                return "unclear", f"host {node} did not say why it was started again"
        verdict, why = self._goes_on([])
        return ("error" if verdict == "recovered" else verdict), why

    def _left(self) -> list[str]:
        """What is left of the servers once they had the time to end."""
        left = []
        for node, host in enumerate(self._cluster.hosts):
            left += host.wait_empty(GONE)
            left += [f"port {port}" for state, port in sockets(host) if state in OPEN]
            left += Path(f"/proc/{host.pid}/net/unix").read_text().splitlines()[1:]
            left += [str(path) for path in self._temporary[node].iterdir()]
        return left

    def _logs(self) -> str:
        """The ends of both logs."""
        logs = [self._scratch / f"host{node}.log" for node in (0, 1)]
        return "\n".join(log.read_text()[-1500:] for log in logs)

    def _drop(self) -> None:
        """Kill what still runs on both hosts."""
        if self._served is not None:
            self._served.close()
            self._served = None


def _ends(client: Any) -> list[dict[str, Any]]:
    """What became of a client's requests, which all have an end by its patience."""
    output, _ = client.communicate(timeout=3 * PATIENCE)
    return list(json.loads(output))
