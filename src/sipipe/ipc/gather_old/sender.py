"""A sampler's end of the gather ring; what it guarantees is in :mod:`sipipe.ipc.gather_old.receiver`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from sipipe.ipc.errors import ChannelError, ChannelPeerDied, ChannelTimeout
from sipipe.ipc.gather_old.ends import End
from sipipe.ipc.gather_old.handshake import introduce
from sipipe.ipc.gather_old.receiver import FAREWELL, FRAME
from sipipe.ipc.gather_old.statistics import ChannelStatistics
from sipipe.ipc.ring.message import Part
from sipipe.ipc.sockets import SocketEndpoint, connect

__all__ = ["GatherSender"]


class GatherSender(End):
    """One sampler's end. Not for two threads at once."""

    def __init__(self, endpoint: SocketEndpoint, name: str, sock: socket.socket) -> None:
        """Use :meth:`connect`."""
        self._endpoint = endpoint
        self._name = name
        self._sock = sock
        self._messages = 0
        self._bytes = 0

    @classmethod
    def connect(
        cls, endpoint: SocketEndpoint, name: str, incarnation: int = 0, timeout: float = 10.0
    ) -> GatherSender:
        """Connect as ``name``; ``incarnation`` grows by one at each restart of that sampler.

        Raises:
            ChannelPeerDied: the receiver is gone, or does not take this name and incarnation.
        """
        sock = connect(endpoint, timeout)
        try:
            introduce(sock, endpoint.token, name, incarnation, timeout, endpoint.channel)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        return cls(endpoint, name, sock)

    def send(self, iteration: int, parts: Sequence[Part], timeout: float | None = 60.0) -> None:
        """Send this sender's sub-slot of ``iteration``: the parts, one after the other.

        Raises:
            ChannelPeerDied: the receiver is gone. ChannelTimeout: it takes nothing; the
                connection is then closed. ChannelError: more than ``max_bytes``.
        """
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        size = sum(map(len, views))
        if size > self._endpoint.max_bytes:
            raise ChannelError(
                f"channel {self._endpoint.channel}: {size:,} bytes are more than max_bytes "
                f"({self._endpoint.max_bytes:,})"
            )
        self._send([memoryview(FRAME.pack(size, iteration)), *views], timeout)
        self._messages += 1
        self._bytes += size

    def _send(self, views: list[memoryview], timeout: float | None) -> None:
        self._sock.settimeout(timeout)
        try:
            while views:
                sent = self._sock.sendmsg(views[:64])
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
        except TimeoutError:
            self._sock.close()
            raise ChannelTimeout(
                f"channel {self._endpoint.channel}: the receiver took nothing for {timeout} s",
                ("receiver",),
            ) from None
        except OSError as error:
            raise ChannelPeerDied(
                f"channel {self._endpoint.channel}: the receiver is gone ({error.strerror})",
                "receiver",
            ) from None

    def statistics(self) -> ChannelStatistics:
        """Sub-slots and bytes sent."""
        return ChannelStatistics(messages=self._messages, bytes=self._bytes)

    def close(self) -> None:
        """Say farewell and hang up; the receiver does not report a death. Idempotent."""
        with contextlib.suppress(OSError, ChannelError):
            self._send([memoryview(FRAME.pack(0, FAREWELL))], 1.0)
        self._sock.close()
