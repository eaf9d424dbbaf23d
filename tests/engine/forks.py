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
    """End the fork server, which ends with its socket."""
    if _server is not None:
        process, requests = _server
        requests.close()
        process.wait()


class Forked:
    """A process that runs a Python ``file``, in a group of its own, with those methods of ``Popen`` that
    tests need.

    Args:
        file: the program.
        arguments: its arguments, behind the numbers of ``ends``.
        env: its environment.
        out: the file that its output goes to.
        ends: descriptors that it gets; their numbers are its first arguments.
        host: a process in whose namespaces it runs; None for this process's.
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
        reading, writing = os.pipe()
        request = {"file": str(file), "arguments": [*arguments], "environment": env, "host": host}
        data = json.dumps(request).encode()
        try:
            socket.send_fds(_socket(), [data], [reading, out.fileno(), *ends])
        finally:
            os.close(reading)
        self.stdin = os.fdopen(writing, "w", encoding="utf-8")
        answer = _socket().recv(64)
        assert answer, "the fork server ended: see its message above"
        self.pid = int(answer)
        # The process id stays that of this process: the server reaps it at the next request only.
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """None while the process runs, else 0: its status is the server's to know."""
        return 0 if select.select([self._ended], [], [], 0)[0] else None

    def wait(self, seconds: float | None = None) -> None:
        """Wait for its end. Raises TimeoutExpired: it runs after ``seconds``."""
        if not select.select([self._ended], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), seconds or 0)

    def kill(self) -> None:
        """Kill the process and those that it started in its group, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()
        with suppress(OSError):  # it may never have read the last words
            self.stdin.close()

    def close(self) -> None:
        """Close what this process has of it. It has been killed, or ends by itself."""
        with suppress(OSError):
            self.stdin.close()
        os.close(self._ended)


def start() -> None:
    """Start the fork server, which otherwise starts with the first process."""
    _socket()


def _socket() -> socket.socket:
    """The socket of the fork server, which is started if it does not run."""
    global _server
    if _server is None:
        requests, servers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with servers_end:
            process = subprocess.Popen(
                [sys.executable, str(SERVER), str(servers_end.fileno())],
                pass_fds=[servers_end.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
            )
        _server = (process, requests)
    return _server[1]
