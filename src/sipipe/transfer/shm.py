"""Hidden states through memory that two processes of one host share.

Who runs here: the sender's caller and thread (see :mod:`.sender`), and the receiver's thread in
``receive``. The data lie in a memfd of ``depth`` slots, made by the sender and handed over on a
Unix socket, which also carries the records, one packet each: the data record is what wakes the
receiver, and the end of the socket is what tells each side that the other died.

Guarantees: one copy per hidden state, made by the sender; the receiver works in place. Nothing
has a name in the file system: memfd and abstract socket vanish with their last process, whatever
ended it. Relies on: a system call on a socket orders memory (a slot is written before its record
is sent, and read after the record was received); the receiver's process id, from the socket, to
notice a death that an inherited descriptor would hide.

Rejected: a futex on a word in shared memory (needs a thread that also watches for death, and
wakes no faster than a socket through the interpreter); eventfd (no end of file when the peer
dies); a named segment in /dev/shm (outlives kill -9, and containers limit it to 64 MB); spinning
(it takes the core that the forward pass needs).
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
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
from sipipe.transfer.shm_connection import PacketConnection
from sipipe.transfer.structure import Structure
from sipipe.transfer.transport import Arrival

if TYPE_CHECKING:
    import torch

    from sipipe.transfer.endpoint import LinkEndpoint

__all__ = ["ShmReceiving", "ShmSending"]

_ARENA = struct.Struct("<QI")  # bytes of a slot, whether a memfd comes with it
_POPULATE_BELOW = 64 << 20
_MAX_PACKET = 1 << 16
_RETRY_SECONDS = 0.02


def _address(endpoint: LinkEndpoint) -> str:
    return f"\0sipipe-{endpoint.secret.hex()}"


def _map(descriptor: int, size: int) -> mmap.mmap:
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if size <= _POPULATE_BELOW else 0)
    return mmap.mmap(descriptor, size, flags)


class ShmSending:
    """The sender's end."""

    inline_bytes = 256 << 10
    """Copied in 3 to 15 µs; more is cheaper to hand to a thread, as far as the caller goes."""

    def __init__(self, endpoint: LinkEndpoint) -> None:
        self._endpoint = endpoint
        self._codec = RecordCodec(endpoint.secret)
        self._connection: PacketConnection | None = None
        self._arena: Arena | None = None
        self._packet = bytearray(RECORD_BYTES)
        self._closed = threading.Event()

    def connect(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.connect(_address(self._endpoint))
                break
            except ConnectionRefusedError:
                sock.close()
                if self._closed.is_set():
                    raise LinkClosedError(
                        f"{self._endpoint.describe()}: closed before it connected"
                    ) from None
                if time.monotonic() > deadline:
                    raise PeerDiedError(
                        f"{self._endpoint.describe()}: the next stage did not start within "
                        f"{timeout:g} s; look at its log"
                    ) from None
                # The receiver's process may take minutes to load its model: ask again.
                time.sleep(_RETRY_SECONDS)
            except BaseException:
                sock.close()
                raise
        self._connection = PacketConnection(sock, f"{self._endpoint.describe()}: the next stage")
        if self._closed.is_set():  # interrupt() may have looked before the line above
            self.interrupt()
        self._send(self._codec.pack(Record(Kind.HELLO)))

    def announce(self, number: int, structure: Structure) -> None:
        endpoint = self._endpoint
        need = slot_bytes(structure, endpoint.max_tokens, endpoint.bytes_per_token_hint)
        descriptor = -1
        if self._arena is None or need > self._arena.size:
            total = need * endpoint.depth
            descriptor = os.memfd_create("sipipe-transfer", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, total)
                memory = _map(descriptor, total)
            except OSError as error:
                os.close(descriptor)
                raise ResourceError(
                    f"{endpoint.describe()}: no {total / 2**20:.0f} MiB of memory for "
                    f"{endpoint.depth} slots of max_tokens={endpoint.max_tokens}: {error}"
                ) from error
            self._arena = Arena(memory, endpoint.depth, need, endpoint.max_tokens)
        description = structure.encode()
        packet = (
            self._codec.pack(
                Record(Kind.STRUCTURE, structure=number, value=_ARENA.size + len(description))
            )
            + _ARENA.pack(self._arena.size, descriptor >= 0)
            + description
        )
        try:
            self._send(packet, descriptor)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def transmit(
        self,
        record: Record,
        structure: Structure,
        parts: list[torch.Tensor],
        *,
        wait: bool,  # noqa: ARG002 - a copy never waits
    ) -> bool:
        assert self._arena is not None, "announce comes first"
        self._arena.fill(structure, record.slot, record.num_tokens, parts)
        self._arena.write_check(record.slot, record.sequence ^ record.value)
        self._send(self._codec.pack(record))
        return True

    def flush(self) -> None:
        raise AssertionError("transmit leaves nothing")

    def collect_releases(self, timeout: float) -> list[int]:
        connection = self._connection
        slots: list[int] = []
        if connection is None:
            if timeout:
                time.sleep(min(timeout, _RETRY_SECONDS))  # not yet connected: start-up only
            return slots
        while connection.wait(0.0 if slots else timeout):
            if not connection.receive_into(self._packet)[0]:
                raise connection.died()
            record = self._codec.unpack(self._packet)
            if record.kind == Kind.BYE:
                raise LinkClosedError(f"{self._endpoint.describe()}: the next stage closed it")
            slots.append(record.slot)
        return slots

    def interrupt(self) -> None:
        self._closed.set()
        if self._connection is not None:
            self._connection.interrupt(self._codec.pack(Record(Kind.BYE)))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._arena = None

    def _send(self, packet: bytes, descriptor: int = -1) -> None:
        assert self._connection is not None
        try:
            if descriptor < 0:
                self._connection.sock.send(packet)
            else:
                socket.send_fds(self._connection.sock, [packet], [descriptor])
        except OSError as error:
            if self._closed.is_set():
                raise LinkClosedError(f"{self._endpoint.describe()}: closed") from None
            raise self._connection.died() from error


class ShmReceiving:
    """The receiver's end."""

    def __init__(self, endpoint: LinkEndpoint) -> None:
        self._endpoint = endpoint
        self._codec = RecordCodec(endpoint.secret)
        self._connection: PacketConnection | None = None
        self._arena: Arena | None = None
        self._structures: dict[int, Structure] = {}
        self.metadata_messages = 0
        self._packet = bytearray(_MAX_PACKET)
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_address(endpoint))
            self._listener.listen(1)
        except OSError as error:
            self._listener.close()
            raise ResourceError(
                f"{endpoint.describe()}: cannot listen ({error}); is it open already?"
            ) from error

    def receive(self, timeout: float) -> Arrival | None:
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            if self._connection is None:
                if not self._accept(left):
                    return None
                continue
            if not self._connection.wait(left):
                return None
            arrival = self._read(self._connection)
            if arrival is not None:
                return arrival

    def release(self, slot: int) -> None:
        connection = self._connection
        assert connection is not None, "nothing is held before the first frame"
        # A sender that is gone needs no slots; the next receive() says what became of it.
        with contextlib.suppress(OSError):
            connection.sock.send(self._codec.pack(Record(Kind.RELEASE, slot)))

    def interrupt(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes a waiting accept
        if self._connection is not None:
            self._connection.interrupt(self._codec.pack(Record(Kind.BYE)))

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        self._arena = None

    def _accept(self, timeout: float) -> bool:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        if not poll.poll(timeout * 1000):
            return False
        sock, _ = self._listener.accept()
        try:
            self._connection = PacketConnection(
                sock, f"{self._endpoint.describe()}: the previous stage"
            )
        except PermissionError:
            sock.close()  # not ours: the abstract name is visible to every user of the host
        if self._closed.is_set():  # interrupt() may have looked before the connection was there
            self.interrupt()
        return True

    def _read(self, connection: PacketConnection) -> Arrival | None:
        size, ancillary = connection.receive_into(self._packet)
        if size == 0:
            raise connection.died()
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % 4])
        try:
            return self._interpret(memoryview(self._packet)[:size], descriptors)
        except RecordError as error:
            raise TransferMismatchError(f"{self._endpoint.describe()}: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _interpret(self, packet: memoryview, descriptors: array.array[int]) -> Arrival | None:
        record = self._codec.unpack(packet)
        if record.kind == Kind.HELLO:
            return None
        if record.kind == Kind.BYE:
            raise LinkClosedError(f"{self._endpoint.describe()}: the previous stage closed it")
        if record.kind == Kind.STRUCTURE:
            self._learn(record, packet[RECORD_BYTES:], descriptors)
            return None
        structure = self._structures.get(record.structure)
        if structure is None or self._arena is None:
            raise RecordError(f"frame {record.sequence} has a structure never announced")
        if (
            record.slot >= self._arena.depth
            or self._arena.read_check(record.slot) != record.sequence ^ record.value
        ):
            raise RecordError(
                f"slot {record.slot} was overwritten while frame {record.sequence} was in it"
            )
        return Arrival(record, structure, self._arena)

    def _learn(self, record: Record, body: memoryview, descriptors: array.array[int]) -> None:
        size, fresh = _ARENA.unpack_from(body)
        structure = Structure.decode(body[_ARENA.size :])
        if fresh:
            endpoint = self._endpoint
            self._arena = Arena(
                _map(descriptors[0], size * endpoint.depth),
                endpoint.depth,
                size,
                endpoint.max_tokens,
            )
        self._structures[record.structure] = structure
        if len(self._structures) > 64:
            del self._structures[next(iter(self._structures))]
        self.metadata_messages += 1
