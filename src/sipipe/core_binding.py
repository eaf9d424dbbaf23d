"""Binding of a process's threads to its cores of the core plan (:mod:`sipipe.cores`).

Bound threads are made to run soon after they wake up, and other engines of this host are told which
cores are taken.
"""

import ctypes
import os
import platform
import re
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sipipe.cores import CorePlan

CLAIM = "sipipe-cores-"
HAND_OVER = 1e-4
"""Seconds for which a thread computes in Python while another one wants to."""


def claim(plan: CorePlan) -> socket.socket:
    """Tell other engines of this host which CPUs this one takes.

    Returns a socket whose name says it until the socket is closed. The name also ends with the
    process, and belongs to a network namespace; a container has its own.
    """
    mask = sum(1 << cpu for cpu in plan.cpus)
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with suppress(OSError):  # more CPUs than a name can have
        name.bind(f"\0{CLAIM}{mask:x}-{os.getpid()}-{name.fileno()}")
    return name


def claimed(names: Path = Path("/proc/net/unix")) -> set[int]:
    """CPUs of the engines that have said so on this host."""
    text = names.read_text(errors="replace") if names.exists() else ""
    masks = [int(mask, 16) for mask in re.findall(f"@{CLAIM}([0-9a-f]+)-", text)]
    return {cpu for mask in masks for cpu in range(mask.bit_length()) if mask >> cpu & 1}


def bind_threads(cpus: Collection[int]) -> None:
    """Bind every thread of this process, and those that they start."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended, or the container has other CPUs by now
            os.sched_setaffinity(int(thread), cpus)


def run_soon() -> None:
    """Have every thread of this process, and those that they start, run soon after it wakes up.

    It is for processes that sleep, work for a moment and are waited for; their share of the CPU stays
    what it is. Two others may be in the way:

    - Another process that computes on the same CPU: Linux lets it go on for 3 ms or so. A short slice
      ends that, from Linux 6.12 on; earlier ones and other systems take no notice.
    - Another thread of this process that computes in Python: it would go on for 5 ms.
    """
    sys.setswitchinterval(HAND_OVER)
    number = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # sched_setattr
    if number is None:
        return
    system_call = ctypes.CDLL(None).syscall
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended
            if os.sched_getscheduler(thread) != os.SCHED_OTHER:  # who started it has decided
                continue
            nice = os.getpriority(os.PRIO_PROCESS, thread)
            # Bytes, SCHED_OTHER, flags, nice, priority, slice in ns (the least), deadline, period.
            attributes = struct.pack("=IIQiIQQQ", 48, 0, 0, nice, 0, 100_000, 0, 0)
            system_call(number, thread, attributes, 0)


@contextmanager
def running_on(cpus: Collection[int]) -> Iterator[None]:
    """While active, the calling thread runs on ``cpus``: memory that it allocates is of their NUMA
    node, and stays there. Empty: wherever it runs."""
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # the container has other CPUs by now
        os.sched_setaffinity(0, cpus or before)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
