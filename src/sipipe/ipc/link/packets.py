"""What packets of a link say, and the Unix packet socket that carries them within a host.

``DATA`` announces one frame and is the only packet of a steady iteration. ``SCHEMA`` precedes the
first frame of a new tensor schema and has its description as body. ``RELEASE`` flows backwards
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
"""Seconds of one wait."""
_FIELDS = struct.Struct("<BQQIQ")
HEADER_BYTES = _FIELDS.size


class Kind(enum.IntEnum):
    """What a packet says."""

    SCHEMA = 1
    DATA = 2
    RELEASE = 3
    HELLO = 4
    BYE = 5


class Header(NamedTuple):
    """One header; fields that a kind does not need are 0."""

    kind: int
    frame: int = 0
    """Counts a link's frames from 0; frame f lies in buffer f mod ``depth``. HELLO: the process."""
    iteration: int = 0
    num_tokens: int = 0
    fingerprint: int = 0


def pack(header: Header, body: bytes = b"") -> bytes:
    return _FIELDS.pack(*header) + body


def unpack(packet: memoryview) -> Header:
    """The header of a whole packet; the body is ``packet[HEADER_BYTES:]``."""
    return Header(*_FIELDS.unpack_from(packet))


class PacketConnection:
    """Wraps a connected socket, which it owns. One thread at a time receives; any number send. The
    peer's death is the end of the socket or, once :meth:`watch` was called, the end of its process:
    a child that the peer forked (a compiler, say) may hold the socket open long after."""

    def __init__(self, sock: socket.socket, who: str) -> None:
        self._sock = sock
        self._who = who
        self._pidfd = -1
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def watch(self, pid: int) -> None:
        """The peer is process ``pid``. Called by the thread that receives."""
        if pid != os.getpid() and self._pidfd < 0:
            # Gone already, and so is its end of the socket; or no process's number at all.
            with contextlib.suppress(OSError, OverflowError):
                self._pidfd = pidfd_open(pid)
                self._poll.register(self._pidfd, select.POLLIN)

    def send(self, packet: bytes, descriptor: int | None = None) -> None:
        """Send one packet, and a descriptor if given. PeerDiedError: the peer is gone, or `interrupt`."""
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
        """Bytes of the next packet, or None when ``timeout`` seconds passed. Raises PeerDiedError:
        the peer is gone, and everything that it sent has been received."""
        gone = waited = False
        while True:
            try:
                if size := self._sock.recv_into(packet, 0, socket.MSG_DONTWAIT):
                    return size
                break
            except BlockingIOError:
                if gone:  # a dead process has left nothing in the socket
                    break
                if waited:
                    return None
            except ConnectionResetError:
                # A peer that closed with packets unread; what it sent before comes behind this.
                continue
            except OSError:
                break
            # Of time in which this process was stopped no more than one slice counts.
            part = min(timeout, SLICE)
            timeout -= part
            waited = timeout <= 0
            # wait: the link's `stall_timeout`, in slices; a packet, the peer's death, `interrupt`
            gone = any(fd == self._pidfd for fd, _ in self._poll.poll(part * 1e3))
        raise self.died()

    def receive_descriptor(self) -> int:
        """The descriptor with the next packet; the caller closes it. PeerDiedError: none came."""
        with contextlib.suppress(OSError):
            # wait: none of its own, `stall_timeout` for the iteration: the peer sends it with the
            # packet before; it, the peer's death, `interrupt`
            _, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1)
            if descriptors:
                return descriptors[0]
        raise self.died()

    def died(self) -> PeerDiedError:
        """What to raise when the peer is gone without a goodbye."""
        return PeerDiedError(f"{self._who} died; its own log says why")

    def interrupt(self, goodbye: bytes) -> None:
        """Send ``goodbye`` and end the connection; the descriptors stay until :meth:`close`."""
        with contextlib.suppress(OSError):
            self._sock.send(goodbye, socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptors back."""
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
