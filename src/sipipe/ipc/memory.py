"""Shared memory without a name: nothing is left behind, however the processes end.

A memfd. Other processes of this user open it through ``/proc/<pid>/fd/<n>`` of its creator, each
with a description of its own (locks need that). It goes with the last process, and does not count
against ``/dev/shm``.

Rejected: a named file in ``/dev/shm`` unlinked "when all have opened it" (left behind by a crash
before that); passing descriptors over a socket (shares the description, and with it the locks).
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

import msgspec

from sipipe.control_groups import control_groups
from sipipe.errors import ResourceError
from sipipe.ipc.errors import PeerDiedError
from sipipe.linux import memfd_create

PAGE = mmap.PAGESIZE
_IDENTITY_BYTES = 16
_GROUP_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Of version 2 and 1: a group's limit, what it takes, and how ``memory.stat`` names all in it."""


def round_up(size: int, unit: int) -> int:
    """``size`` or the next multiple of ``unit``."""
    return -(-size // unit) * unit


class Endpoint(msgspec.Struct, frozen=True):
    """Where a channel's memory, of ``size`` bytes, is."""

    channel: str
    path: str
    """``/proc/<pid>/fd/<n>`` of the creator."""
    identity: str
    """32 hexadecimal digits that the memory starts with: a reused process id is recognised."""
    size: int


class SharedMemory:
    """One mapping, ``map``, of a channel's memory; its first 16 bytes are the channel's identity."""

    def __init__(self, endpoint: Endpoint, fd: int, keep_fd: bool) -> None:
        self.endpoint = endpoint
        self._fd = fd if keep_fd else -1
        # Populated: the first lap would otherwise take a page fault every 4 KB.
        self.map = mmap.mmap(fd, endpoint.size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        if not keep_fd:
            os.close(fd)

    @classmethod
    def create(cls, channel: str, size: int) -> SharedMemory:
        """Allocate ``size`` bytes or the rest of the last page more, all zero and really there, so
        that no later write can fail. ResourceError: there is not that much."""
        size = round_up(size, PAGE)
        check_room(size, f"channel {channel} ({size / 2**20:,.1f} MiB)")
        try:
            fd = memfd_create(f"sipipe-{channel}")
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            raise ResourceError(
                f"channel {channel}: cannot get {size:,} bytes of shared memory ({error.strerror})"
            ) from None
        identity = secrets.token_bytes(_IDENTITY_BYTES)
        os.pwrite(fd, identity, 0)
        endpoint = Endpoint(channel, f"/proc/{os.getpid()}/fd/{fd}", identity.hex(), size)
        return cls(endpoint, fd, keep_fd=True)

    @classmethod
    def attach(cls, endpoint: Endpoint) -> SharedMemory:
        """Map the memory that another process (or this one) created. PeerDiedError: it is gone."""
        try:
            fd = os.open(endpoint.path, os.O_RDWR | os.O_CLOEXEC)
        except PermissionError:
            raise ResourceError(
                f"channel {endpoint.channel}: not allowed to open {endpoint.path}; run all of "
                "SiPipe's processes as the same user"
            ) from None
        except OSError:
            raise _creator_gone(endpoint) from None
        if os.pread(fd, _IDENTITY_BYTES, 0).hex() != endpoint.identity:
            os.close(fd)
            raise _creator_gone(endpoint)
        return cls(endpoint, fd, keep_fd=False)

    def close(self) -> None:
        """Let go of the memory. Idempotent; views that are still out keep the mapping alive."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_room(size: int, what: str) -> None:
    """Raise ResourceError if ``what`` needs more than :func:`free_bytes`: ``size`` bytes."""
    if size > (room := free_bytes()):
        raise ResourceError(
            f"memory has {room / 2**20:,.1f} MiB free, too little for {what}: lower "
            "--max-num-seqs, --max-num-batched-tokens or --inflight"
        )


def free_bytes() -> int:
    """Bytes of memory that there is room for, the container's limit (its cgroup's) included."""
    room = _read_number("/proc/meminfo", "MemAvailable:") * 1024
    return min([room or 1 << 62, *(room for _, room in _limits())])


def group_limit() -> int | None:
    """The least limit of the control groups that this process is in, in bytes; None: there is none."""
    return min((limit for limit, _ in _limits()), default=None)


def group_used() -> int | None:
    """What of :func:`group_limit` is taken, in bytes, also by other limits; None: there is none."""
    found = _limits()
    return min(limit for limit, _ in found) - min(room for _, room in found) if found else None


def _limits() -> list[tuple[int, int]]:
    """The limit and the room, in bytes, of each control group that has a limit."""
    found = []
    for group in control_groups("memory"):
        for most, taken, total in _GROUP_FILES:
            limit = _read_number(f"{group}/{most}")
            if 0 < limit < 1 << 62:  # version 1 writes no limit as a number
                room = limit - _read_number(f"{group}/{taken}")
                for cached in ("inactive_file ", "active_file "):  # given back when it is needed
                    room += _read_number(f"{group}/memory.stat", total + cached)
                found.append((limit, min(limit, max(0, room))))
    return found


def _read_number(path: str, key: str = "") -> int:
    """The number after ``key`` in a file of the kernel; 0 where there is none."""
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return int(line[len(key) :].split()[0])
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _creator_gone(endpoint: Endpoint) -> PeerDiedError:
    return PeerDiedError(
        f"channel {endpoint.channel}: the process that made it is gone; start the engine again"
    )
