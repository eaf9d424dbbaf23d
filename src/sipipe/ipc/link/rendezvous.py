"""How two stage workers get a socket between them.

They meet at an abstract name made from the link's secret. Any user of the host can read that name,
so each side refuses a process of another user. The kernel removes the name with its last process.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from sipipe.errors import ResourceError, StallError
from sipipe.messages.link import LinkEndpoint

__all__ = ["accept", "connect"]

_RETRY_SECONDS = 0.02


def connect(endpoint: LinkEndpoint) -> socket.socket:
    """The earlier stage's end. The later stage may start later.

    Raises:
        StallError: the later stage was not there within the link's ``start_timeout``.
    """
    deadline = time.monotonic() + endpoint.start_timeout
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(_address(endpoint))
            if _is_ours(sock):
                return sock
        except ConnectionRefusedError:
            pass
        sock.close()
        if time.monotonic() > deadline:
            raise StallError(
                f"{endpoint.describe()}: the next stage did not start within "
                f"{endpoint.start_timeout:g} s; look at its log"
            )
        time.sleep(_RETRY_SECONDS)


def accept(endpoint: LinkEndpoint) -> socket.socket:
    """The later stage's end. The earlier stage may start later.

    Raises:
        ResourceError: the link is open already.
        StallError: the earlier stage was not there within the link's ``start_timeout``.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_address(endpoint))
        except OSError as error:
            raise ResourceError(
                f"{endpoint.describe()}: cannot listen ({error}); is it open already?"
            ) from error
        listener.listen(1)
        listener.settimeout(endpoint.start_timeout)
        try:
            while True:
                sock, _ = listener.accept()
                if _is_ours(sock):
                    sock.settimeout(None)
                    return sock
                sock.close()
        except TimeoutError:
            raise StallError(
                f"{endpoint.describe()}: the previous stage did not start within "
                f"{endpoint.start_timeout:g} s; look at its log"
            ) from None


def _address(endpoint: LinkEndpoint) -> str:
    return f"\0sipipe-{endpoint.secret.hex()}"


def _is_ours(sock: socket.socket) -> bool:
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())
