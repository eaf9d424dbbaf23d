"""Who may talk on a socket: both ends prove that they hold the token, neither sends it.

    accepting end                                 connecting end
    magic, nonce A (16 bytes)            ──────►
                                         ◄──────  nonce B, incarnation, name, proof
    proof                                ──────►

A proof is HMAC-SHA256, keyed with the token, over the role, both nonces, incarnation and name, so
that nothing recorded can be played again and neither proof serves as the other. What follows on
the connection is not encrypted: on a network that others can read or write, use a private one.
Nothing from a socket is ever unpickled. All sizes are bounded before anything is allocated.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time

from sipipe.ipc.errors import ChannelError, ChannelPeerDied

__all__ = ["accept_peer", "introduce", "new_token", "receive_exactly", "receive_into"]

_MAGIC = b"SiPipe-1"
_HELLO = struct.Struct("<16sQB")  # nonce B, incarnation, bytes of the name
_PROOF = 32


def new_token() -> str:
    """A fresh secret: 64 hexadecimal digits, made at start and handed to the children."""
    return secrets.token_hex(32)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """``size`` bytes, or EOFError; OSError and TimeoutError are the socket's."""
    data = bytearray(size)
    receive_into(sock, memoryview(data))
    return bytes(data)


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill ``view``; EOFError, OSError and TimeoutError as above."""
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def _proof(token: str, role: bytes, first: bytes, hello: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(token), role + first + hello, hashlib.sha256)


def accept_peer(sock: socket.socket, token: str, timeout: float) -> tuple[str, int, bytes]:
    """The accepting end's part; returns name and incarnation of an authentic peer, and the proof
    to send it, once, if it shall be let in.

    Raises:
        ChannelError: the peer is not authentic, or not done after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    try:
        sock.settimeout(timeout)
        nonce = secrets.token_bytes(16)
        sock.sendall(_MAGIC + nonce)
        hello = receive_exactly(sock, _HELLO.size)
        _, incarnation, length = _HELLO.unpack(hello)
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        name = receive_exactly(sock, length)
        proof = receive_exactly(sock, _PROOF)
        if not hmac.compare_digest(proof, _proof(token, b"connect", nonce, hello + name)):
            raise ChannelError("a peer did not prove that it holds the token")
        return name.decode(), incarnation, _proof(token, b"accept", nonce, hello + name)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ChannelError(f"a peer did not introduce itself ({error or 'it hung up'})") from None


def introduce(
    sock: socket.socket, token: str, name: str, incarnation: int, timeout: float, channel: str
) -> None:
    """The connecting end's part.

    Raises:
        ChannelPeerDied: the other end hung up or does not answer; it does so on a wrong token.
        ChannelError: the other end does not hold the token.
    """
    try:
        sock.settimeout(timeout)
        head = receive_exactly(sock, len(_MAGIC) + 16)
        if not head.startswith(_MAGIC):
            raise ChannelError(f"channel {channel}: what answers there is not SiPipe")
        nonce, data = head[len(_MAGIC) :], name.encode()
        hello = _HELLO.pack(secrets.token_bytes(16), incarnation, len(data)) + data
        sock.sendall(hello + _proof(token, b"connect", nonce, hello))
        answer = receive_exactly(sock, _PROOF)
    except (OSError, EOFError) as error:
        raise ChannelPeerDied(
            f"channel {channel}: the other end does not take {name} in ({error or 'it hung up'}); "
            "is it alive, and is the token this run's?",
            "receiver",
        ) from None
    if not hmac.compare_digest(answer, _proof(token, b"accept", nonce, hello)):
        raise ChannelError(f"channel {channel}: the other end does not hold the token")
