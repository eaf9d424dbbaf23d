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
import queue
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from sipipe.errors import ResourceError
from sipipe.transfer.arena import Arena, slot_bytes
from sipipe.transfer.errors import LinkClosedError, PeerDiedError, TransferMismatchError
from sipipe.transfer.records import RECORD_BYTES, Kind, Record, RecordCodec, RecordError
from sipipe.transfer.structure import Structure
from sipipe.transfer.tcp_stream import (
    bytes_of,
    challenge,
    configure,
    prove,
    read_exactly,
    rest,
)
from sipipe.transfer.transport import Arrival

if TYPE_CHECKING:
    import torch

    from sipipe.transfer.endpoint import LinkEndpoint

__all__ = ["TcpReceiving", "TcpSending"]

_SEAL = struct.Struct("<Q")
_RETRY_SECONDS = 0.05
_MAX_DESCRIPTION = 1 << 20


class TcpSending:
    """The sender's end."""

    inline_bytes = 64 << 10
    """The kernel takes so much in about 20 µs; what it does not take at once, a thread sends."""

    def __init__(self, endpoint: LinkEndpoint) -> None:
        self._endpoint = endpoint
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
        if self._closed.is_set():  # interrupt() may have looked before there was a socket
            self.interrupt()

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

    def transmit(
        self,
        record: Record,
        structure: Structure,  # noqa: ARG002 - the parts say it all here
        parts: list[torch.Tensor],
        *,
        wait: bool,
    ) -> bool:
        frame = [memoryview(self._codec.pack(record))]
        frame += [buffer for part in parts if len(buffer := bytes_of(part))]
        frame.append(memoryview(_SEAL.pack(record.sequence ^ record.value)))
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
            if self._closed.is_set():
                raise LinkClosedError(f"{self._endpoint.describe()}: closed") from None
            raise self._died() from error
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

    def interrupt(self) -> None:
        self._closed.set()
        sock = self._sock
        if sock is None:
            return
        # Only between two frames: inside one, BYE would be read as data.
        if self._writing.acquire(blocking=False):
            if not self._left:
                with contextlib.suppress(OSError):
                    sock.send(self._codec.pack(Record(Kind.BYE)), socket.MSG_DONTWAIT)
            self._writing.release()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()

    def _died(self) -> PeerDiedError:
        return PeerDiedError(
            f"{self._endpoint.describe()}: the next stage died or the network lost it; "
            "its own log says why"
        )


def _readable(sock: socket.socket, timeout: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


class TcpReceiving:
    """The receiver's end."""

    def __init__(self, endpoint: LinkEndpoint) -> None:
        self._endpoint = endpoint
        self._codec = RecordCodec(endpoint.secret)
        self._sock: socket.socket | None = None
        self._arena: Arena | None = None
        self._memory: memoryview | None = None
        self._structures: dict[int, Structure] = {}
        self._closed = threading.Event()
        self._releasing = threading.Lock()
        self.metadata_messages = 0
        self._inbox: queue.SimpleQueue[Arrival | Exception] = queue.SimpleQueue()
        host, port = endpoint.address
        try:
            self._listener = socket.create_server((host, port), backlog=8)
        except OSError as error:
            raise ResourceError(
                f"{endpoint.describe()}: cannot listen at {host}:{port} ({error}); choose "
                "another port"
            ) from error
        self._thread = threading.Thread(
            target=self._run, name=f"sipipe-receive-{endpoint.name}", daemon=True
        )
        self._thread.start()

    def receive(self, timeout: float) -> Arrival | None:
        try:
            arrival = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(arrival, Exception):
            raise arrival
        return arrival

    def release(self, slot: int) -> None:
        sock = self._sock
        assert sock is not None, "nothing is held before the first frame"
        # A sender that is gone needs no slots; the next receive() says what became of it. The
        # records of all slots together always fit into the socket's buffer.
        with self._releasing, contextlib.suppress(OSError):
            sock.sendall(self._codec.pack(Record(Kind.RELEASE, slot)))

    def interrupt(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        sock = self._sock
        if sock is not None:
            with self._releasing, contextlib.suppress(OSError):
                sock.send(self._codec.pack(Record(Kind.BYE)), socket.MSG_DONTWAIT)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._inbox.put(LinkClosedError(f"{self._endpoint.describe()}: closed"))

    def close(self) -> None:
        self._thread.join()  # its socket was shut down: it has nothing to wait for
        self._listener.close()
        if self._sock is not None:
            self._sock.close()

    # -- our thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            sock = self._accept()
            if sock is None:
                return
            self._sock = sock
            if self._closed.is_set():  # interrupt() may have looked before the line above
                return
            while True:
                self._inbox.put(self._read_frame(sock))
        except RecordError as error:
            self._inbox.put(TransferMismatchError(f"{self._endpoint.describe()}: {error}"))
        except Exception as error:
            self._inbox.put(error)

    def _accept(self) -> socket.socket | None:
        # No bound: take() has one, and interrupt() shuts the listener down.
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return None
            with contextlib.suppress(OSError):
                if prove(sock, self._endpoint.secret):
                    configure(sock)
                    return sock
            sock.close()  # a stranger, or a sender that gave up
        return None

    def _read_frame(self, sock: socket.socket) -> Arrival:
        header = bytearray(RECORD_BYTES)
        while True:
            self._fill(sock, [memoryview(header)])
            record = self._codec.unpack(header)
            if record.kind == Kind.BYE:
                raise LinkClosedError(f"{self._endpoint.describe()}: the previous stage closed it")
            if record.kind == Kind.DATA:
                return self._read_data(sock, record)
            if record.kind != Kind.STRUCTURE or record.value > _MAX_DESCRIPTION:
                raise RecordError(f"a record of kind {record.kind} has no place here")
            description = bytearray(record.value)
            self._fill(sock, [memoryview(description)])
            self._learn(record.structure, Structure.decode(bytes(description)))

    def _read_data(self, sock: socket.socket, record: Record) -> Arrival:
        endpoint = self._endpoint
        structure = self._structures.get(record.structure)
        if structure is None or self._arena is None or self._memory is None:
            raise RecordError(f"frame {record.sequence} has a structure never announced")
        if record.num_tokens > endpoint.max_tokens or record.slot >= endpoint.depth:
            raise RecordError(f"frame {record.sequence} is larger than max_tokens")
        start = record.slot * self._arena.size
        memory = self._memory
        buffers = [
            memory[start + offset : start + offset + extent.nbytes]
            for offset, extent in zip(
                structure.offsets(endpoint.max_tokens),
                structure.extents(record.num_tokens),
                strict=False,
            )
        ]
        seal = bytearray(_SEAL.size)
        self._fill(sock, [*buffers, memoryview(seal)])
        if _SEAL.unpack(seal)[0] != record.sequence ^ record.value:
            raise RecordError(f"frame {record.sequence} does not end where it should")
        return Arrival(record, structure, self._arena)

    def _fill(self, sock: socket.socket, buffers: list[memoryview]) -> None:
        if not read_exactly(sock, buffers):
            raise PeerDiedError(
                f"{self._endpoint.describe()}: the previous stage died or the network lost it; "
                "its own log says why"
            )

    def _learn(self, number: int, structure: Structure) -> None:
        endpoint = self._endpoint
        need = slot_bytes(structure, endpoint.max_tokens, endpoint.bytes_per_token_hint)
        if self._arena is None or need > self._arena.size:
            self._arena = Arena.private(endpoint.depth, need, endpoint.max_tokens)
            self._memory = self._arena.bytes()
        self._structures[number] = structure
        if len(self._structures) > 64:
            del self._structures[next(iter(self._structures))]
        self.metadata_messages += 1
