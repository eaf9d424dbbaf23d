"""Hidden states over TCP, between hosts (or on one host's loopback).

Who runs here: the sender's caller and thread (see :mod:`.sender`); in the receiver's process one
thread that accepts the sender, then reads each frame straight into its slot and hands it to
``receive`` through a queue. A frame is one ``sendmsg``: record, tensors where they lie, seal::

    ┌──────────────┬────────────┬────────────┬───┬────────────┐
    │ record, 48 B │ tensor 0   │ tensor 1   │ … │ seal, 8 B  │   then, backwards, one
    └──────────────┴────────────┴────────────┴───┴────────────┘   RELEASE record per frame

Guarantees: no copy outside the kernel on either side; a frame is read as soon as it arrives,
while the device works on an earlier one; memory is ``depth`` slots. Both sides prove that they
know the link's secret before anything else is read (the data are not encrypted: use a network
that you trust, or an encrypted one). Relies on: TCP for order and integrity, the seal for a frame
boundary that slipped, keep-alive for a host that vanished (about 5 s idle, 30 s with data on the
way); a process that dies is noticed at once.

Rejected: waiting in ``take`` on the socket itself (nobody would read while the device works, and
a window smaller than a frame would stall the sender); one message for each tensor.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from sipipe.errors import ResourceError
from sipipe.ipc.link.errors import LinkClosedError, PeerDiedError
from sipipe.ipc.link.frames import RowKind
from sipipe.ipc.link.records import RECORD_BYTES, Kind, Record, RecordCodec
from sipipe.ipc.link.structure import Structure
from sipipe.ipc.link.tcp_stream import SEAL, bytes_of, challenge, configure, rest
from sipipe.ipc.link.transport import HostSending

if TYPE_CHECKING:
    import torch

    from sipipe.ipc.link.endpoint import LinkEndpoint

__all__ = ["TcpSending"]

_RETRY_SECONDS = 0.05


class TcpSending(HostSending):
    """The sender's end."""

    inline_bytes = 64 << 10
    """The kernel takes so much in about 20 µs; what it does not take at once, a thread sends."""
    row_kind: RowKind | None = RowKind.STREAM
    inline_rows = False

    def __init__(self, endpoint: LinkEndpoint) -> None:
        super().__init__(endpoint)
        self._codec = RecordCodec(endpoint.secret)
        self._sock: socket.socket | None = None
        self._left: list[memoryview] = []
        self._inbox = bytearray()
        self._writing = threading.Lock()
        self._closed = threading.Event()

    def connect(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            if self._closed.is_set():
                raise LinkClosedError(f"{self._endpoint.describe()}: closed before it connected")
            try:
                self._sock = self._dial()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    host, port = self._endpoint.address
                    raise PeerDiedError(
                        f"{self._endpoint.describe()}: no next stage at {host}:{port} within "
                        f"{timeout:g} s ({error}); look at its log, and at firewalls"
                    ) from None
                # The receiver's process may take minutes to load its model: ask again.
                time.sleep(_RETRY_SECONDS)
        self._descriptor = self._sock.fileno()
        if self._closed.is_set():  # interrupt() may have looked before there was a socket
            self.interrupt(farewell=True)

    def _dial(self) -> socket.socket:
        sock = socket.create_connection(self._endpoint.address, timeout=2.0)
        try:
            if not challenge(sock, self._endpoint.secret):
                raise ResourceError(
                    f"{self._endpoint.describe()}: what answers at {self._endpoint.address} is not "
                    "the next stage of this engine; another program uses the port"
                )
            configure(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def announce(self, number: int, structure: Structure) -> None:
        description = structure.encode()
        record = Record(Kind.STRUCTURE, structure=number, value=len(description))
        self._left = [memoryview(self._codec.pack(record)), memoryview(description)]
        self.flush()

    def places(self, structure: Structure, slot: int, num_tokens: int) -> tuple[int, ...]:  # noqa: ARG002
        places: list[int] = []
        for extent in structure.extents(num_tokens):
            places += (0, extent.nbytes)
        return (*places, 0, self._descriptor)

    def transmit(
        self,
        record: Record,
        structure: Structure,  # noqa: ARG002 - the parts say it all here
        parts: list[torch.Tensor],
        *,
        after: Any,
        wait: bool,
    ) -> bool:
        if after is not None:
            after.synchronize()
        frame = [memoryview(self._codec.pack(record))]
        frame += [buffer for part in parts if len(buffer := bytes_of(part))]
        frame.append(memoryview(SEAL.pack(record.sequence ^ record.value)))
        self._left = frame
        if wait:
            self.flush()
            return True
        self._write(socket.MSG_DONTWAIT)
        return not self._left

    def flush(self) -> None:
        while self._left:
            self._write(0)

    def _write(self, flags: int) -> None:
        assert self._sock is not None
        try:
            with self._writing:
                count = self._sock.sendmsg(self._left, (), flags)
        except BlockingIOError:
            return
        except OSError as error:
            raise self.failure(error.errno or 0) from error
        self._left = rest(self._left, count)

    def collect_releases(self, timeout: float) -> list[int]:
        sock = self._sock
        if sock is None:
            if timeout:
                time.sleep(min(timeout, _RETRY_SECONDS))  # not yet connected: start-up only
            return []
        if not _readable(sock, timeout):
            return []
        try:
            data = sock.recv(64 * RECORD_BYTES)
        except OSError:
            data = b""
        if not data:
            raise self._died()
        self._inbox += data
        slots = []
        while len(self._inbox) >= RECORD_BYTES:
            record = self._codec.unpack(self._inbox)
            del self._inbox[:RECORD_BYTES]
            if record.kind == Kind.BYE:
                raise LinkClosedError(f"{self._endpoint.describe()}: the next stage closed it")
            slots.append(record.slot)
        return slots

    def interrupt(self, *, farewell: bool) -> None:
        self._closed.set()
        sock = self._sock
        if sock is None:
            return
        # Only between two frames: inside one, BYE would be read as data.
        if farewell and self._writing.acquire(blocking=False):
            if not self._left:
                with contextlib.suppress(OSError):
                    sock.send(self._codec.pack(Record(Kind.BYE)), socket.MSG_DONTWAIT)
            self._writing.release()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()

    def failure(self, error: int) -> Exception:  # noqa: ARG002 - whatever it was, the peer is gone
        if self._closed.is_set():
            return LinkClosedError(f"{self._endpoint.describe()}: closed")
        return self._died()

    def _died(self) -> PeerDiedError:
        return PeerDiedError(
            f"{self._endpoint.describe()}: the next stage died or the network lost it; "
            "its own log says why"
        )


def _readable(sock: socket.socket, timeout: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
