"""Another user of the machine, and strangers at each local port, while a server starts and serves.

The user is uid 65534 without groups, of whom nothing may be let in: no memory, environment or
descriptor of a process, no shared memory, no socket, no file that could be changed. Strangers
connect to every port and socket that the server's processes listen on, but that of HTTP, and send
what is nothing. Other clients' tokens are those of a quiet server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from tests.faults.served import Clients, Row, amid, scratch_directory, server_options

LOOKS = "another user looks into every process of a server"
SENDS = "strangers send bytes to every local port of a server"
STARTS = "strangers send bytes to every local port while a server starts"
KINDS = {LOOKS: 1, SENDS: 12, STARTS: 2}
"""Rounds of each kind; a fault is one thing looked at, or one connection."""
OTHER = 65534
DISTURBED = "something else has connected to their ports"
"""What the last line of a start says that a stranger has ended."""

LOOK = r"""
import json, os, socket, sys
asked = json.load(sys.stdin)
tried, let_in = 0, []

def look(what, attempt):
    global tried
    tried += 1
    try:
        attempt()
    except (OSError, ValueError):
        return
    let_in.append(what)

def read(path):
    with open(path, "rb", buffering=0) as file:
        if not file.read(1):
            raise ValueError("nothing to read")

def connect(path):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        connection.connect(path)

for pid in asked["pids"]:
    for name in ("environ", "mem", "maps", "auxv", "syscall"):
        look(f"{name} of {pid}", lambda: read(f"/proc/{pid}/{name}"))
    look(f"descriptors of {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
    look(f"directory of {pid}", lambda: os.readlink(f"/proc/{pid}/cwd"))
    look(f"signal to {pid}", lambda: os.kill(pid, 0))
    for fd in range(64):
        look(f"descriptor {fd} of {pid}", lambda: os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)))
for path in asked["sockets"]:
    look(f"socket {path}", lambda: connect("\0" + path[1:] if path[0] == "@" else path))
for path in asked["shared"]:
    look(f"shared memory {path}", lambda: os.close(os.open(path, os.O_RDONLY)))
    look(f"shared memory {path}, to write", lambda: os.close(os.open(path, os.O_RDWR)))
for path in asked["files"]:
    if os.path.isdir(path):
        look(f"directory {path}, to write", lambda: os.rmdir(os.mkdir(path + "/x") or path + "/x"))
    else:
        look(f"file {path}, to write", lambda: os.close(os.open(path, os.O_WRONLY)))
print(json.dumps([tried, let_in]))
"""
"""Run as the other user: how many things it tried, and those that let it in."""


def run(only: str, seed: int, scale: float, each: Any = lambda *_: None) -> list[dict[str, Any]]:
    """A row of the table for each kind whose name matches ``only``."""
    names = [name for name in KINDS if re.search(only, name)]
    if not names:
        return []
    from tests.engine.engines import model
    from tests.engine.servers import Server

    rows = []
    clients = Clients(6, seed)
    with scratch_directory() as scratch:
        os.chmod(scratch, 0o755)  # of a user whose directories others can enter
        path = model(scratch)

        def server(log: str) -> Server:
            # Two ranks a stage: they connect to each other by gloo.
            return Server(
                path,
                scratch / log,
                "-tp",
                "2",
                *server_options(),
                temporary=scratch,
                more={"SIPIPE_CACHE_DIR": str(scratch / "cache"), "OMP_NUM_THREADS": "1"},
            )

        with server("log") as quiet:
            clients.learn(quiet.address)
            if LOOKS in names:
                rows.append(_look(quiet, scratch, clients))
            if SENDS in names:
                rows.append(_send(quiet, clients, max(1, round(KINDS[SENDS] * scale)), seed))
        if STARTS in names:
            row = Row(STARTS)
            for number in range(max(1, round(KINDS[STARTS] * scale))):
                rng = Random(f"{seed} {number}")
                log = f"log{number}"
                _start(row, lambda log=log: server(log), scratch / log, clients, rng)
            rows.append(row.finished())
    for row in rows:
        each(row["kind"], row["injected"], row["why"])
    return rows


def _start(row: Row, server: Any, log: Path, clients: Clients, rng: Random) -> None:
    """One start. It succeeds, or ends with a line that says who may have disturbed it."""
    with _visited(rng) as connections:
        try:
            with server() as started:
                verdict = clients.verdict(started.address)
        except pytest.fail.Exception:
            last = log.read_text(errors="replace").rstrip().splitlines()[-1]
            verdict = "error" if re.search(DISTURBED, last) else "unclear"
    for _ in connections:
        row.add(verdict, log.read_text(errors="replace")[-1500:])


def _count(row: Row, verdict: str, times: int) -> None:
    for _ in range(times):
        row.add(verdict, verdict)


def _look(server: Any, scratch: Path, clients: Clients) -> dict[str, Any]:
    row = Row(LOOKS)
    everybody = server.everybody()
    links = {link for process in everybody for link in _links(process.pid)}
    sockets = [
        fields[7]
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]
        if len(fields := line.split()) > 7 and f"socket:[{fields[6]}]" in links
    ]
    asked = {
        "pids": [process.pid for process in everybody],
        "sockets": sockets,
        "shared": [str(path) for path in Path("/dev/shm").iterdir() if str(path) in links],
        "files": [str(path) for path in [scratch, *scratch.rglob("*")] if not path.is_socket()],
    }
    other = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
    # A Python that everybody may start: the test's own may lie in a home directory.
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    done = subprocess.run(
        [*other, python, "-c", LOOK], input=json.dumps(asked), capture_output=True, text=True,
        check=True, timeout=120, cwd="/",
    )  # fmt: skip
    tried, let_in = json.loads(done.stdout)
    _count(row, clients.verdict(server.address), tried - len(let_in))
    for what in let_in:
        row.add("unclear", f"another user was let in: {what}")
    return row.finished()


def _links(pid: int) -> Iterator[str]:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            yield os.readlink(fd)
    with contextlib.suppress(OSError):
        yield from re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())


def _ports(processes: list[psutil.Process], but: int) -> list[tuple[str, int]]:
    """Addresses that these processes listen on, without port ``but``."""
    addresses = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                ip, port = connection.laddr
                if connection.status == psutil.CONN_LISTEN and port != but:
                    addresses.add(("127.0.0.1" if ip == "0.0.0.0" else ip, port))
    return sorted(addresses)


def _pieces(rng: Random) -> Iterator[bytes]:
    """What strangers send: HTTP, a whole number that is none of a peer's, noise, nothing."""
    yield b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    yield bytes(8)
    yield b"\xff" * 64
    yield rng.randbytes(rng.randrange(1, 4096))
    yield rng.randrange(64).to_bytes(8, "little") + rng.randbytes(rng.randrange(200))
    yield b""


def _visit(address: tuple[str, int], rng: Random) -> int:
    """How many connections were made; half of them are reset."""
    made = 0
    for piece in _pieces(rng):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(address, timeout=1) as connection,
        ):
            made += 1
            connection.settimeout(0.05)
            connection.sendall(piece)
            if rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:
                connection.recv(4096)
    return made


def _send(server: Any, clients: Clients, rounds: int, seed: int) -> dict[str, Any]:
    from tests.engine.servers import health

    row, rng = Row(SENDS), Random(f"{seed} {SENDS}")
    for _ in range(rounds):
        made = 0
        with amid(clients, server.address) as verdicts:
            for address in _ports(server.everybody(), server.port):
                made += _visit(address, rng)
        bad = [verdict for verdict in verdicts if verdict != "recovered"]
        verdict = bad[0] if bad else clients.verdict(server.address)
        _count(row, verdict if health(server.address) == 200 else "unclear", made)
        if health(server.address) != 200:
            row.why.append(server.log.read_text()[-1500:])
            break
    return row.finished()


@contextlib.contextmanager
def _visited(rng: Random) -> Iterator[list[int]]:
    """Each port of this process's descendants is visited as soon as it is there."""
    made: list[int] = []
    ending = threading.Event()
    seen: set[tuple[str, int]] = set()

    def visit() -> None:
        while not ending.wait(0.02):  # wait: 20 ms; nobody: it looks again
            for address in _ports(psutil.Process().children(recursive=True), 0):
                if address not in seen:
                    seen.add(address)
                    made.extend([1] * _visit(address, rng))

    thread = threading.Thread(target=visit)
    thread.start()
    try:
        yield made
    finally:
        ending.set()
        thread.join()  # wait: a second a connection; the last visit ends
