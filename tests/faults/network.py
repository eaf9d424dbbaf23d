"""What a network does to the connections between hosts: strangers come, and connections are cut."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import socket
import time

import psutil

_GET_DESCRIPTOR = 438  # pidfd_getfd(2), which Python does not have
_libc = ctypes.CDLL(None, use_errno=True)


def strangers(_pid, first):
    """Two hundred connections to each port, some with something to say; none stays."""
    chances = random.Random(first)
    with contextlib.ExitStack() as held:
        ends = [held.enter_context(socket.socket()) for _ in range(400)]
        for number, end in enumerate(ends):
            end.setblocking(False)
            end.connect_ex(("127.0.0.1", first + number % 2))
        time.sleep(0.5)  # the kernel drops who is not the other host, who then waits for nothing
        for end in ends:
            with contextlib.suppress(OSError):
                end.send(chances.randbytes(chances.choice((1, 64, 4096))))


def cut(offset):
    """Shut the connection down that the other host has at a port, for both ends."""

    def now(pid, first):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                for end in process.net_connections("tcp"):
                    ports = {end.laddr.port, end.raddr.port if end.raddr else 0}
                    if first + offset in ports and end.status == psutil.CONN_ESTABLISHED:
                        _shut(process.pid, end.fd)

    return now


def _shut(pid, number):
    process = os.pidfd_open(pid)
    ours = _libc.syscall(_GET_DESCRIPTOR, process, number, 0)
    os.close(process)
    if ours < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    with socket.socket(fileno=ours) as end:
        end.shutdown(socket.SHUT_RDWR)


NETWORK = {"strangers": strangers, "cut engine": cut(0), "cut stages": cut(1)}
