"""Calls of Linux: two that a Python built for an older one lacks, as uv's (until July 2026) and
conda's, and two that never wait, for which Python's own would let another thread go on. To have the
interpreter back takes :data:`sipipe.core_binding.HAND_OVER` each time, where that one computes. And the
standard streams that a process may have been started without."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import sys

_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_PIDFD_OPEN = 434
_CLOEXEC = 1
_DONTWAIT = 0x40
_LIBC = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter


def memfd_create(name: str) -> int:
    """A descriptor of new memory, which programs that are started do not get. OSError: there is none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    number = _MEMFD_CREATE[platform.machine()]
    return _call(number, ctypes.c_char_p(name.encode()), ctypes.c_uint(_CLOEXEC))


def pidfd_open(pid: int) -> int:
    """A descriptor, readable once the process has ended. OSError: none such, or a Linux before 5.3."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def receive_now(descriptor: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Receive what a socket has into ``buffer``; returns the number of bytes, 0 at the stream's end.

    Raises BlockingIOError: nothing has come yet. OSError: the socket is broken.
    """
    # wait: none: does not block
    return _checked(_LIBC.recv(descriptor, buffer, len(buffer), _DONTWAIT))


def set_lock(descriptor: int, command: int, flock: bytes) -> None:
    """``fcntl`` with a ``struct flock`` and a command that does not wait. OSError: not to be had."""
    # wait: none: F_OFD_SETLK
    _checked(_LIBC.fcntl(descriptor, command, flock))


def open_standard_streams() -> None:
    """Open ``/dev/null`` for each standard stream that this process was started without, as by
    ``>&-``, and for output whose reader is gone. Does nothing where all are open.

    A socket would get the number of a closed one, and every process that is started later would print
    into it. Python has None for such a stream, and whoever flushes it fails. So does whoever flushes
    what nobody reads, as `multiprocessing` does before it starts a process.
    """
    null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    while null <= 2:
        os.set_inheritable(null, True)
        null = os.open(os.devnull, os.O_RDWR)
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)  # errors and a peer that has gone are always reported
    # With a timeout of 0 it does not wait.
    for descriptor, _ in outputs.poll(0):
        os.dup2(null, descriptor)
    os.close(null)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the process's life


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _call(number: int, *arguments: ctypes.c_char_p | ctypes.c_int | ctypes.c_uint) -> int:
    return _checked(_LIBC.syscall(ctypes.c_long(number), *arguments))
