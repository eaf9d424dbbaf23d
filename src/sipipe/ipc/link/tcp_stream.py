"""What both ends of a TCP link share: socket options, the handshake, whole reads.

The handshake is a challenge in both directions: each side proves by HMAC-SHA-256 over both nonces
that it knows the link's secret, without sending it::

    sender                         receiver
    nonce s, 16 B            ──►
                             ◄──   nonce r, 16 B · HMAC(secret, "receive" s r)
    HMAC(secret, "send" r s) ──►
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["SEAL", "bytes_of", "challenge", "configure", "prove", "read_exactly", "rest"]

SEAL = struct.Struct("<Q")
"""What stands behind a frame's data."""

_NONCE = 16
_PROOF = 32
_HANDSHAKE_SECONDS = 5.0


def configure(sock: socket.socket) -> None:
    """Frames leave at once; a host that vanished is noticed; reads and writes wait in the kernel."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    sock.settimeout(None)


def challenge(sock: socket.socket, secret: bytes) -> bool:
    """The sender's half of the handshake: whether the other side is this link's receiver.

    Raises:
        OSError: it hung up or did not answer in time.
    """
    sock.settimeout(_HANDSHAKE_SECONDS)
    nonce = secrets.token_bytes(_NONCE)
    sock.sendall(nonce)
    answer = memoryview(bytearray(_NONCE + _PROOF))
    if not read_exactly(sock, [answer]):
        raise ConnectionError("the other side hung up")
    theirs, proof = bytes(answer[:_NONCE]), bytes(answer[_NONCE:])
    if not hmac.compare_digest(proof, _proof(secret, b"receive", nonce, theirs)):
        return False
    sock.sendall(_proof(secret, b"send", theirs, nonce))
    return True


def prove(sock: socket.socket, secret: bytes) -> bool:
    """The receiver's half of the handshake: whether the other side is this link's sender.

    Raises:
        OSError: it hung up or did not answer in time.
    """
    sock.settimeout(_HANDSHAKE_SECONDS)
    theirs = bytearray(_NONCE)
    if not read_exactly(sock, [memoryview(theirs)]):
        return False
    nonce = secrets.token_bytes(_NONCE)
    sock.sendall(nonce + _proof(secret, b"receive", bytes(theirs), nonce))
    proof = bytearray(_PROOF)
    if not read_exactly(sock, [memoryview(proof)]):
        return False
    return hmac.compare_digest(bytes(proof), _proof(secret, b"send", nonce, bytes(theirs)))


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, role + first + second, "sha256")


def read_exactly(sock: socket.socket, buffers: list[memoryview]) -> bool:
    """Fill all ``buffers``; False at the end of the stream, or when it broke."""
    pending = [buffer for buffer in buffers if len(buffer)]
    while pending:
        try:
            count, _, _, _ = sock.recvmsg_into(pending, 0, socket.MSG_WAITALL)
        except OSError:
            return False
        if count == 0:
            return False
        pending = rest(pending, count)
    return True


def rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What remains of ``buffers`` after their first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's memory; a copy's, where it is on a GPU or not contiguous."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
