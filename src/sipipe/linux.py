"""Two calls of Linux that a Python built for an older one lacks, as uv's (until July 2026) and conda's."""

from __future__ import annotations

import ctypes
import os
import platform

_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_PIDFD_OPEN = 434
_CLOEXEC = 1


def memfd_create(name: str) -> int:
    """A descriptor of new memory, as a file without a name; programs that are started do not get it.
    OSError: there is none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    number = _MEMFD_CREATE[platform.machine()]
    return _call(number, ctypes.c_char_p(name.encode()), ctypes.c_uint(_CLOEXEC))


def pidfd_open(pid: int) -> int:
    """A descriptor that is readable once the process has ended. OSError: there is no such process, or
    Linux is older than 5.3."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def _call(number: int, *arguments: ctypes.c_char_p | ctypes.c_int | ctypes.c_uint) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    descriptor = int(libc.syscall(ctypes.c_long(number), *arguments))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor
