"""Open-file-description locks, for any thread of a channel's process.

Guarantees: two ``Locks`` on one file exclude each other even within a process. When the process
ends, however it ends, the kernel frees its locks and wakes whoever waits for them, asleep.

Relies on: ``F_OFD_SETLK`` and ``F_OFD_SETLKW`` (Linux 3.15), the same ``struct flock`` on all
64-bit Linux; that nobody else holds the same description: it is opened anew, never duplicated,
close-on-exec, and closed in a forked child. The mapped file is a second description, because a
mapping keeps its own, and the locks, alive. The kernel's spinlock of the file orders memory: what
was written before a lock was freed is read by whoever takes it afterwards, on any CPU.

The kernel has no time-out for these locks; the peer's death or close ends a wait. Who needs a bound
tries again and again (:mod:`sipipe.ipc.ring.ends`).

Rejected: a timer signal (only a process's main thread can handle one in Python, and the signal
would be taken from whoever embeds us); a helper thread that sleeps for the one that may not (60
lines for a wait that happens when a reader is stuck); ``FUTEX_WAIT`` (has a time-out, but nobody
wakes it when its waker is killed).
"""

import contextlib
import fcntl
import functools
import os
import struct
import weakref

_SETLK, _SETLKW = 37, 38  # F_OFD_*, absent from Python's fcntl before 3.14
_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid

SHARED, EXCLUSIVE, _UNLOCK = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK
"""The kinds of a lock: many may hold a byte shared, or one exclusively."""


@functools.lru_cache(maxsize=4096)
def _flock(kind: int, first: int, count: int) -> bytes:
    return _FLOCK.pack(kind, 0, first, count, 0)


class Locks:
    """The locks of one open file description, on bytes that need not exist in the file."""

    def __init__(self, path: str) -> None:
        """Open ``path`` anew. Raises OSError."""
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _open.add(self)

    def try_lock(self, kind: int, first: int, count: int = 1) -> bool:
        """Take bytes ``first`` to ``first + count - 1`` if nobody stands against it."""
        try:
            fcntl.fcntl(self.fd, _SETLK, _flock(kind, first, count))
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX has it
            return False
        return True

    def wait_lock(self, kind: int, first: int, count: int = 1) -> None:
        """Sleep in the kernel until the bytes are ours. All of them at once, or none yet."""
        # wait: none, as an idle engine publishes nothing; the writer's next message, its death or
        # close, for which the kernel frees its lock
        fcntl.fcntl(self.fd, _SETLKW, _flock(kind, first, count))

    def unlock(self, first: int, count: int = 1) -> None:
        """Free the bytes; whoever waits for them wakes up."""
        fcntl.fcntl(self.fd, _SETLK, _flock(_UNLOCK, first, count))

    def close(self) -> None:
        """Free all locks and the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            # Unlock first: another thread may still be inside the kernel with this description.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, _SETLK, _flock(_UNLOCK, 0, 0))
            os.close(fd)


_open: weakref.WeakSet[Locks] = weakref.WeakSet()


def _close_in_child() -> None:
    for locks in list(_open):
        if locks.fd >= 0:
            os.close(locks.fd)  # without unlocking: the locks are the parent's
            locks.fd = -1


os.register_at_fork(after_in_child=_close_in_child)
