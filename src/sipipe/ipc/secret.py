"""The secret that the hosts of an engine share, and the keys that are made of it.

Both ends of a connection make the same two key pairs: the listening end's and the connecting end's.
Public keys are as secret as the secret here: none is ever sent. CURVE's first message is sealed with
the listener's public key, and its answer with the listener's private key. So a peer without the
secret gets no further than the handshake, on either side. Everything after the handshake is
encrypted with keys of that connection alone: a secret that leaks later opens nothing recorded.

A handshake that somebody has recorded can be tried for ever. scrypt makes each guess at a short
secret as dear as a login.

Rejected: a list of public keys (ZAP), which takes a thread more, for peers that all have one secret.
"""

import functools
import hashlib
import os
from pathlib import Path

import zmq
from zmq.utils import z85

from sipipe.errors import ConfigError

SECRET = "SIPIPE_SECRET"
SECRET_FILE = "SIPIPE_SECRET_FILE"
USER = "sipipe"
"""Name of the user whose password is a token."""
_LEAST = 16
"""Characters that a secret has at least."""


def read_secret() -> bytes:
    """The secret of this process's environment, as a word of ASCII. Raises ConfigError: there is
    none, it cannot be read, others can read it, or it is too short."""
    secret = os.fsencode(os.environ.get(SECRET, ""))
    path = os.environ.get(SECRET_FILE)
    if not secret and path:
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                secret = file.read()
        except OSError as error:
            raise ConfigError(f"{SECRET_FILE}: {path} cannot be read ({error.strerror})") from None
        if mode & 0o077:
            raise ConfigError(f"{SECRET_FILE}: others can read {path}: chmod 600 {path}")
    secret = secret.strip()
    if not secret:
        raise ConfigError(
            f"several hosts need a secret: set {SECRET} or {SECRET_FILE} to the same value on "
            "each (openssl rand -hex 32 makes one)"
        )
    if len(secret) < _LEAST:
        raise ConfigError(
            f"{SECRET} has {len(secret)} characters: use {_LEAST} or more (openssl rand -hex 32)"
        )
    # A file may hold any bytes, such as /dev/urandom's. Ray takes the secret to the other hosts as an
    # environment variable, where it is read again, so it has to be a printable word.
    return secret if secret.isascii() and secret.decode().isprintable() else secret.hex().encode()


@functools.lru_cache(maxsize=4)
def private_keys(secret: bytes) -> tuple[bytes, bytes]:
    """The listening end's CURVE key and the connecting end's, in ZeroMQ's text form."""

    def key_of(end: bytes) -> bytes:
        return z85.encode(hashlib.scrypt(secret, salt=end, n=1 << 14, r=8, p=1, dklen=32))

    return key_of(b"sipipe listener 1"), key_of(b"sipipe connector 1")


def curve_options(listens: bool) -> dict[int, int | bytes]:
    """ZeroMQ's options for an encrypted connection between two ends with the secret."""
    listener, connector = private_keys(read_secret())
    if listens:
        return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: listener}
    return {
        zmq.CURVE_SERVERKEY: zmq.curve_public(listener),
        zmq.CURVE_PUBLICKEY: zmq.curve_public(connector),
        zmq.CURVE_SECRETKEY: connector,
    }


def plain_options(token: str, listens: bool) -> dict[int, int | bytes]:
    """ZeroMQ's options for a connection between two ends with ``token``."""
    if listens:
        return {zmq.PLAIN_SERVER: 1}
    return {zmq.PLAIN_USERNAME: USER.encode(), zmq.PLAIN_PASSWORD: token.encode()}
