"""A Unix packet socket between two stages of one host, and the process behind it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time

from sipipe.ipc.link.errors import PeerDiedError

__all__ = ["PacketConnection"]

_SLICE = 0.5
"""Seconds."""


class PacketConnection:
    """Wraps a connected socket; refuses a peer of another user.

    The peer's death is the end of the socket, or the end of its process: a child that the peer
    forked (a compiler, say) may hold the socket open long after the peer is gone.

    Raises:
        PermissionError: the peer belongs to another user.
    """

    def __init__(self, sock: socket.socket, who: str) -> None:
        self.sock = sock
        self._who = who
        self._pidfd = -1
        self._sliced = False
        pid, uid, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if uid != os.getuid():
            raise PermissionError(f"{who}: a process of user {uid} connected")
        if pid != os.getpid():
            with contextlib.suppress(OSError):  # another pid namespace: the socket must do
                self._pidfd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if self._pidfd >= 0:
            self._poll.register(self._pidfd, select.POLLIN)

    def wait(self, timeout: float) -> bool:
        """Whether there is something to read within ``timeout`` seconds; raises for a dead peer."""
        events = dict(self._poll.poll(timeout * 1000))
        if self.sock.fileno() in events:
            return True
        if events:
            raise self.died()
        return False

    def next_packet(self, packet: bytearray, timeout: float) -> int | None:
        """Bytes of the next packet, 0 at the end; None when ``timeout`` seconds passed.

        Waits in recv(2) itself, by slices: asking poll(2) first costs some microseconds where
        they count. A peer that a forked child outlives is so noticed within a slice.
        """
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) >= _SLICE:
            if not self._sliced:
                self.sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(_SLICE * 1e6))
                )
                self._sliced = True
            try:
                return self.sock.recv_into(packet)
            except BlockingIOError:
                if self.wait(0.0):
                    break
            except OSError:
                break
        return self.receive_into(packet) if self.wait(max(0.0, left)) else None

    def receive_into(self, packet: bytearray) -> int:
        """Bytes of the packet that is there, 0 at the end.

        A peer that closes with packets unread makes the kernel report a reset first; what it
        sent before is still there behind it.
        """
        for _ in range(2):
            try:
                return self.sock.recv_into(packet)
            except ConnectionResetError:
                continue
            except OSError:
                break
        return 0

    def look(self, packet: bytearray) -> tuple[bool, int]:
        """Whether the peer is gone, and the bytes of the next packet, which stays where it is."""
        events = dict(self._poll.poll(0))
        size = 0
        if self.sock.fileno() in events:
            with contextlib.suppress(OSError):
                size = self.sock.recv_into(packet, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return bool(events) and (size == 0 or self._pidfd in events), size

    def receive_descriptor(self, packet: bytes) -> int:
        """The descriptor that comes with the next packet, which is ``packet``.

        Raises:
            PeerDiedError: it did not come.
        """
        with contextlib.suppress(OSError):
            message, descriptors, _, _ = socket.recv_fds(self.sock, len(packet) + 1, 1)
            if message == packet and descriptors:
                return descriptors[0]
        raise self.died()

    def died(self) -> PeerDiedError:
        """What to raise when the peer is gone without a farewell."""
        return PeerDiedError(f"{self._who} died; its own log says why")

    def interrupt(self, farewell: bytes) -> None:
        """Say ``farewell`` and end the connection; the descriptors stay until :meth:`close`."""
        with contextlib.suppress(OSError):
            self.sock.send(farewell, socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptors back."""
        self.sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
