"""Addresses, listening and connecting: an abstract Unix socket on one host, TCP between hosts.

An abstract Unix socket has no file, so nothing is left after a crash.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import Any

import msgspec

from sipipe.errors import ResourceError
from sipipe.ipc.errors import ChannelPeerDied

__all__ = ["SocketEndpoint", "connect", "listen"]


class SocketEndpoint(msgspec.Struct, frozen=True):
    """Where a socket channel listens, and the secret to be let in. Keep it off command lines."""

    channel: str
    host: str
    """Host name or address for TCP; ``"@"`` and a name for an abstract Unix socket."""
    port: int
    token: str
    max_bytes: int
    """No message may be larger."""

    def __repr__(self) -> str:
        return f"SocketEndpoint({self.channel!r}, {self.host!r}, {self.port})"


def listen(channel: str, address: tuple[str, int] | None) -> tuple[socket.socket, str, int]:
    """A listening socket, its host and its port. None: an abstract Unix socket.

    Raises:
        ResourceError: the address cannot be bound.
    """
    if address is None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"sipipe-{channel}-{secrets.token_hex(8)}"
        sock.bind("\0" + name)
        host, port = "@" + name, 0
    else:
        host, port = address
        try:
            sock = socket.create_server((host, port), family=_family(host), backlog=64)
        except OSError as error:
            raise ResourceError(
                f"channel {channel}: cannot listen on {host}:{port} ({error.strerror}); "
                "name an address of this host and a free port"
            ) from None
        port = sock.getsockname()[1]
    sock.listen(64)
    return sock, host, port


def connect(endpoint: SocketEndpoint, timeout: float) -> socket.socket:
    """A connected socket, not yet introduced.

    Raises:
        ChannelPeerDied: nobody listens there.
    """
    try:
        if endpoint.host.startswith("@"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout)
                sock.connect("\0" + endpoint.host[1:])
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout)
    except OSError as error:
        raise ChannelPeerDied(
            f"channel {endpoint.channel}: nobody listens at {endpoint.host}:{endpoint.port} "
            f"({error.strerror or error})",
            "receiver",
        ) from None
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """No delay for small messages; a peer host that vanished is noticed within half a minute."""
    if sock.family == socket.AF_UNIX:
        return
    options: list[tuple[int, int, Any]] = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
    ]
    for level, name, value in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, name, value)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
