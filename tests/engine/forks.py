"""Processes that have imported vLLM already: see :mod:`.fork_server`."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

SERVER = Path(__file__).with_name("fork_server.py")

_server: tuple[subprocess.Popen, socket.socket] | None = None


@atexit.register
def _end() -> None:
    if _server is not None:
        process, requests = _server
        requests.close()
        process.wait()


class Forked:
    """Runs a Python ``file`` in a process group of its own; what tests need of ``Popen``.

    ``ends``: descriptors that it gets, their numbers as its first arguments. ``host``: a process in
    whose namespaces it runs.
    """

    def __init__(
        self,
        file: Path,
        arguments: Sequence[str] = (),
        *,
        env: dict,
        out: IO,
        ends: Sequence[int] = (),
        host: int | None = None,
    ) -> None:
        theirs, ours = os.pipe()
        asked = {"file": str(file), "arguments": [*arguments], "environment": env, "host": host}
        try:
            socket.send_fds(_socket(), [json.dumps(asked).encode()], [theirs, out.fileno(), *ends])
        finally:
            os.close(theirs)
        self.stdin = os.fdopen(ours, "w", encoding="utf-8")
        answer = _socket().recv(64)
        assert answer, "the fork server ended: see its message above"
        self.pid = int(answer)
        self._ended = os.pidfd_open(self.pid)  # the server leaves it a zombie until the next one

    def poll(self) -> int | None:
        """None while it runs."""
        return 0 if select.select([self._ended], [], [], 0)[0] else None

    def wait(self, seconds: float | None = None) -> None:
        if not select.select([self._ended], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), seconds or 0)

    def kill(self) -> None:
        """End it and what it started, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()
        with suppress(OSError):  # what it was told last and never read
            self.stdin.close()

    def close(self) -> None:
        """Forget it; it has been killed, or ends by itself."""
        with suppress(OSError):
            self.stdin.close()
        os.close(self._ended)


def start() -> None:
    """Have the server run, which the first process starts else."""
    _socket()


def _socket() -> socket.socket:
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, str(SERVER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
            )
        _server = process, ours
    return _server[1]
