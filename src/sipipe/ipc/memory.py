"""Shared memory without a name: nothing is left behind, however the processes end.

It is a memfd. Other processes of this user open it through ``/proc/<pid>/fd/<n>`` of its creator,
each with an open file description of its own, which locks are bound to. It goes with the last
process, and does not count against ``/dev/shm``.

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
from sipipe.errors import ResourceError, remedy
from sipipe.ipc.errors import PeerDiedError
from sipipe.linux import memfd_create

PAGE = mmap.PAGESIZE
_IDENTITY_BYTES = 16
_GROUP_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Files of a control group, of version 2 and of version 1: its limit, its use, and the prefix with
which ``memory.stat`` names sums that include its subgroups."""


def round_up(size: int, unit: int) -> int:
    """``size`` or the next multiple of ``unit``."""
    return -(-size // unit) * unit


class Endpoint(msgspec.Struct, frozen=True):
    """Address of a channel's memory."""

    channel: str
    """The channel's name, for messages."""
    path: str
    """Path ``/proc/<pid>/fd/<n>`` of the creator's descriptor."""
    identity: str
    """32 hexadecimal digits of the bytes that the memory starts with. They tell it from what another
    process has there, to which the system has given the same process id."""
    size: int
    """Bytes."""


class SharedMemory:
    """One mapping, ``map``, of a channel's memory; its first 16 bytes are the channel's identity."""

    def __init__(self, endpoint: Endpoint, fd: int, keep_fd: bool) -> None:
        self.endpoint = endpoint
        self._fd = fd if keep_fd else -1
        # Populated now: the first lap of a ring would otherwise take a page fault every 4 KB.
        self.map = mmap.mmap(fd, endpoint.size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        if not keep_fd:
            os.close(fd)

    @classmethod
    def create(cls, channel: str, size: int) -> SharedMemory:
        """Allocate ``size`` bytes, rounded up to pages, all zero. The memory is really there, so no
        later write can fail. Raises ResourceError: there is not that much."""
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
                f"channel {channel}: cannot get {size:,} bytes of shared memory "
                f"({error.strerror}){remedy(error)}"
            ) from None
        identity = secrets.token_bytes(_IDENTITY_BYTES)
        os.pwrite(fd, identity, 0)
        endpoint = Endpoint(channel, f"/proc/{os.getpid()}/fd/{fd}", identity.hex(), size)
        return cls(endpoint, fd, keep_fd=True)

    @classmethod
    def attach(cls, endpoint: Endpoint) -> SharedMemory:
        """Map the memory that another process, or this one, created. Raises PeerDiedError: the process
        is gone. ResourceError: it is another user's."""
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
        """Close the creator's descriptor, so that nobody can attach any more. Idempotent. The mapping
        lives as long as there are views of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_room(size: int, what: str) -> None:
    """Raise ResourceError if ``size`` bytes, which ``what`` needs, are more than :func:`free_bytes`."""
    room = free_bytes()
    if size > room:
        raise ResourceError(
            f"memory has {room / 2**20:,.1f} MiB free, too little for {what}: lower "
            "--max-num-seqs, --max-num-batched-tokens or --inflight"
        )


def free_bytes() -> int:
    """Bytes of memory that are free on this machine and within its control groups' limits, such as a
    container's."""
    available = _read_number("/proc/meminfo", "MemAvailable:") * 1024
    return min([available or 1 << 62, *(room for _, room in _limits())])


def group_limit() -> int | None:
    """The least limit, in bytes, of the control groups that this process is in; None: none has any."""
    return min((limit for limit, _ in _limits()), default=None)


def group_used() -> int | None:
    """Bytes of :func:`group_limit` that cannot be had any more; None: there is no limit. Another
    group's limit may leave less room than the least one; its use counts then."""
    limits = _limits()
    if not limits:
        return None
    return min(limit for limit, _ in limits) - min(room for _, room in limits)


def _limits() -> list[tuple[int, int]]:
    """The limit and the room, in bytes, of each control group that has a limit."""
    limits = []
    for group in control_groups("memory"):
        for limit_file, use_file, prefix in _GROUP_FILES:
            limit = _read_number(f"{group}/{limit_file}")
            # Version 1 writes a huge number where there is no limit.
            if 0 < limit < 1 << 62:
                room = limit - _read_number(f"{group}/{use_file}")
                # The kernel gives back what it caches of files when the memory is needed.
                for cached in ("inactive_file ", "active_file "):
                    room += _read_number(f"{group}/memory.stat", prefix + cached)
                limits.append((limit, min(limit, max(0, room))))
    return limits


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
