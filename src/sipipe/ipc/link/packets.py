"""Packets of a link, and the Unix packet socket that carries them within a host.

``DATA`` announces one frame and is the only packet of a steady iteration. ``SCHEMA`` precedes the
first frame of a new tensor schema and has its description as body. ``ROOM`` flows backwards too, where
the sender writes into the receiver's memory (:mod:`.nixl`), and has what it needs to know as body. ``RELEASE`` flows backwards
and gives a frame's buffer back. ``HELLO`` comes first, from both sides. ``BYE`` ends the link in
good order: an end of the connection without it is a dead peer.
"""

import contextlib
import enum
import os
import select
import socket
import struct
from typing import NamedTuple

from sipipe.ipc.errors import PeerDiedError
from sipipe.linux import pidfd_open

SLICE = 5.0
"""Seconds of one wait. While this process is stopped the clock goes on, and of that time no more than
one slice counts."""
_FIELDS = struct.Struct("<BQQIQ")
HEADER_BYTES = _FIELDS.size


class Kind(enum.IntEnum):
    """Kinds of packets."""

    SCHEMA = 1
    DATA = 2
    RELEASE = 3
    HELLO = 4
    BYE = 5
    ROOM = 6


class Header(NamedTuple):
    """Header of a packet. Fields that a kind does not need are 0."""

    kind: int
    frame: int = 0
    """Number of the frame, from 0 on each link. Frame f lies in buffer f mod ``depth``. A HELLO has the
    sender's process id here."""
    iteration: int = 0
    num_tokens: int = 0
    fingerprint: int = 0
    """Fingerprint of the tensors' schema."""


def pack(header: Header, body: bytes = b"") -> bytes:
    """A packet."""
    return _FIELDS.pack(*header) + body


def unpack(packet: memoryview) -> Header:
    """The header of a packet, whose body is ``packet[HEADER_BYTES:]``."""
    return Header._make(_FIELDS.unpack_from(packet))


class PacketConnection:
    """A connected socket, which this object closes. One thread at a time receives; any number send.

    The peer is dead at the end of its socket or, once :meth:`watch` was called, at the end of its
    process: a child that the peer has forked, such as a compiler, may hold the socket open for
    long."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        self._sock = sock
        self._who = who
        self._pidfd = -1
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def watch(self, pid: int) -> None:
        """Watch process ``pid``, which is the peer's. Called by the thread that receives."""
        if pid != os.getpid() and self._pidfd < 0:
            # The process is gone already, and so is its end of the socket; or it is no process id.
            with contextlib.suppress(OSError, OverflowError):
                self._pidfd = pidfd_open(pid)
                self._poll.register(self._pidfd, select.POLLIN)

    def send(self, packet: bytes, descriptor: int | None = None) -> None:
        """Send one packet, with ``descriptor`` if there is one. Raises PeerDiedError: the peer is gone, or
        :meth:`interrupt` was called."""
        try:
            if descriptor is None:
                # wait: none: there is room for the packets of all frames that may be on their
                # way; the peer's death, `interrupt`
                self._sock.send(packet)
            else:
                # wait: none: there is room for the packets of all frames that may be on their
                # way; the peer's death, `interrupt`
                socket.send_fds(self._sock, [packet], [descriptor])
        except OSError:
            raise self.died() from None

    def receive(self, packet: bytearray, timeout: float) -> int | None:
        """Wait for the next packet; returns its bytes, or None after ``timeout`` seconds. Raises
        PeerDiedError: the peer is gone, and everything that it sent has been received."""
        gone = False
        waited = False
        while True:
            try:
                size = self._sock.recv_into(packet, 0, socket.MSG_DONTWAIT)
                if size:
                    return size
                break
            except BlockingIOError:
                if gone:  # a dead process has left nothing in the socket
                    break
                if waited:
                    return None
            except ConnectionResetError:
                # The peer closed with packets unread. What it sent before comes behind this error.
                continue
            except OSError:
                break
            part = min(timeout, SLICE)
            timeout -= part
            waited = timeout <= 0
            # wait: the link's `stall_timeout`, in slices; a packet, the peer's death, `interrupt`
            gone = any(fd == self._pidfd for fd, _ in self._poll.poll(part * 1e3))
        raise self.died()

    def receive_descriptor(self) -> int:
        """The descriptor that comes with the next packet; the caller closes it. Raises PeerDiedError:
        none came."""
        with contextlib.suppress(OSError):
            # wait: none of its own, `stall_timeout` for the iteration: the peer sends it with the
            # packet before; it, the peer's death, `interrupt`
            _, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1)
            if descriptors:
                return descriptors[0]
        raise self.died()

    def died(self) -> PeerDiedError:
        """The error to raise when the peer is gone without a goodbye."""
        return PeerDiedError(f"{self._who} died; its own log says why")

    def interrupt(self, goodbye: bytes) -> None:
        """Send ``goodbye`` and end the connection. The descriptors stay open until :meth:`close`, so
        that a thread that waits on one never waits on another file of that number."""
        with contextlib.suppress(OSError):
            self._sock.send(goodbye, socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptors."""
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
