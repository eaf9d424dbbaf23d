"""Hidden states through memory that two processes of one host share.

Who runs here: the sender's caller and thread (see :mod:`.sender`), and the receiver's thread in
``receive``. The data lie in a memfd of ``depth`` slots, made by the sender and handed over on a
Unix socket, which also carries the records, one packet each: the data record is what wakes the
receiver, and the end of the socket is what tells each side that the other died.

Guarantees: one copy per hidden state, made by the sender; the receiver works in place. A record
leaves some megabytes before the end of the copy, so that the receiver wakes up beside it; what it
then waits for is the seal, a word behind the data that is stored when all of them are. Nothing
has a name in the file system: memfd and abstract socket vanish with their last process, whatever
ended it. Relies on: release and acquire of the seal (:mod:`.memory_kernels`), and, in the other
direction, a system call on a socket to order memory (a slot is read before its release is sent);
the receiver's process id, from the socket, to notice a death that an inherited descriptor would
hide.

Rejected: a futex on a word in shared memory (needs a thread that also watches for death, and
wakes no faster than a socket through the interpreter); eventfd (no end of file when the peer
dies); a named segment in /dev/shm (outlives kill -9, and containers limit it to 64 MB); spinning
until something comes (it takes the core that the forward pass needs; for the rest of a frame that
has begun to come, half a millisecond at most, the receiver has nothing else to do); the record
behind the data (a sleeping core takes 50 to 100 µs to wake up and to run Python).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from sipipe.errors import ResourceError, StallError
from sipipe.ipc.link.arena import Arena, HostArena, slot_bytes
from sipipe.ipc.link.errors import LinkClosedError, PeerDiedError, TransferMismatchError
from sipipe.ipc.link.frames import RowKind
from sipipe.ipc.link.records import KIND_AT, RECORD_BYTES, Kind, Record, RecordCodec, RecordError
from sipipe.ipc.link.shm_connection import PacketConnection
from sipipe.ipc.link.structure import Structure
from sipipe.ipc.link.transport import Arrival, HostSending

if TYPE_CHECKING:
    import torch

    from sipipe.ipc.link.endpoint import LinkEndpoint

__all__ = ["MEMORY", "ShmReceiving", "ShmSending"]

_ARENA = struct.Struct("<QI")  # bytes of a slot, whether a memfd comes behind it
MEMORY = b"memory"
"""The packet that the memfd comes with. A packet of its own: reading every packet in the way that
takes descriptors would cost every iteration some microseconds."""
_POPULATE_BELOW = 64 << 20
_MAX_PACKET = 1 << 16
_RETRY_SECONDS = 0.02
_POLL_NANOSECONDS = 500_000
"""That a receiver looks for the rest of a frame without sleeping; a wake-up takes half as long."""
_PAUSE_SECONDS = 0.0001


def _address(endpoint: LinkEndpoint) -> str:
    return f"\0sipipe-{endpoint.secret.hex()}"


def _map(descriptor: int, size: int) -> mmap.mmap:
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if size <= _POPULATE_BELOW else 0)
    return mmap.mmap(descriptor, size, flags)


class ShmSending(HostSending):
    """The sender's end."""

    inline_bytes = 256 << 10
    """Copied in 3 to 15 µs; more is cheaper to hand to a thread, as far as the caller goes."""
    row_kind: RowKind | None = RowKind.COPY
    inline_rows = True

    def __init__(self, endpoint: LinkEndpoint) -> None:
        super().__init__(endpoint)
        self._codec = RecordCodec(endpoint.secret)
        self._connection: PacketConnection | None = None
        self._arena: HostArena | None = None
        self._size = 0  # bytes of a slot, so far
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
        self._descriptor = sock.fileno()
        if self._closed.is_set():  # interrupt() may have looked before the line above
            self.interrupt(farewell=True)
        self._send(self._codec.pack(Record(Kind.HELLO)))

    def announce(self, number: int, structure: Structure) -> None:
        endpoint = self._endpoint
        need = slot_bytes(structure, endpoint.max_tokens, endpoint.bytes_per_token_hint)
        grow = need > self._size
        if grow:
            self._size = need
        description = structure.encode()
        record = Record(Kind.STRUCTURE, structure=number, value=_ARENA.size + len(description))
        self._send(self._codec.pack(record) + _ARENA.pack(self._size, grow) + description)
        if grow:
            self._make_room(self._size * endpoint.depth)

    def _make_room(self, total: int) -> None:
        endpoint = self._endpoint
        descriptor = os.memfd_create("sipipe-transfer", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, total)
            memory = _map(descriptor, total)
            self._send(MEMORY, descriptor)
        except OSError as error:
            raise ResourceError(
                f"{endpoint.describe()}: no {total / 2**20:.0f} MiB of memory for "
                f"{endpoint.depth} slots of max_tokens={endpoint.max_tokens}: {error}"
            ) from error
        finally:
            os.close(descriptor)
        self._arena = HostArena(memory, endpoint.depth, self._size, endpoint.max_tokens)

    def places(self, structure: Structure, slot: int, num_tokens: int) -> tuple[int, ...]:
        arena = self._arena
        assert arena is not None, "announce comes first"
        places: list[int] = []
        for to, extent in zip(
            arena.places(structure, slot), structure.extents(num_tokens), strict=True
        ):
            places += (to, extent.nbytes)
        return (*places, arena.seal(slot), self._descriptor)

    def transmit(
        self,
        record: Record,
        structure: Structure,
        parts: list[torch.Tensor],
        *,
        after: Any,
        wait: bool,  # noqa: ARG002 - a copy never waits
    ) -> bool:
        assert self._arena is not None, "announce comes first"
        if after is not None:
            after.synchronize()
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
            if not connection.receive_into(self._packet):
                raise connection.died()
            record = self._codec.unpack(self._packet)
            if record.kind == Kind.BYE:
                raise LinkClosedError(f"{self._endpoint.describe()}: the next stage closed it")
            slots.append(record.slot)
        return slots

    def interrupt(self, *, farewell: bool) -> None:  # noqa: ARG002 - packets never interleave
        self._closed.set()
        if self._connection is not None:
            self._connection.interrupt(self._codec.pack(Record(Kind.BYE)))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._arena = None

    def failure(self, error: int) -> Exception:  # noqa: ARG002 - whatever it was, the peer is gone
        if self._closed.is_set():
            return LinkClosedError(f"{self._endpoint.describe()}: closed")
        assert self._connection is not None
        return self._connection.died()

    def _send(self, packet: bytes, descriptor: int = -1) -> None:
        assert self._connection is not None
        try:
            if descriptor < 0:
                self._connection.sock.send(packet)
            else:
                socket.send_fds(self._connection.sock, [packet], [descriptor])
        except OSError as error:
            raise self.failure(error.errno or 0) from error


class ShmReceiving:
    """The receiver's end."""

    def __init__(self, endpoint: LinkEndpoint) -> None:
        self._endpoint = endpoint
        self._codec = RecordCodec(endpoint.secret)
        self._connection: PacketConnection | None = None
        self._arena: Arena | None = None
        self._structures: dict[int, Structure] = {}
        self.metadata_messages = 0
        from sipipe.ipc.link.memory_kernels import await_word

        self._await_word = await_word
        self._scratch = np.zeros(2, np.int64)
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

    def receive(self, timeout: float, expected: Arrival | None) -> Arrival | None:
        deadline = time.monotonic() + timeout
        packet = self._codec.pack(expected.record) if expected is not None else b""
        while True:
            left = max(0.0, deadline - time.monotonic())
            if self._connection is None:
                if not self._accept(left):
                    return None
                continue
            size = self._connection.next_packet(self._packet, left)
            if size is None:
                return None
            if expected is not None and self._packet[:size] == packet:
                return expected
            expected = None  # something is new, memory perhaps
            arrival = self._read(self._connection, size)
            if arrival is not None:
                return arrival

    def complete(self, arrival: Arrival, timeout: float) -> None:
        record, arena = arrival.record, arrival.arena
        assert isinstance(arena, HostArena)
        assert self._connection is not None, "the record came through it"
        seal, word = arena.seal(record.slot), record.sequence ^ record.value
        if self._await_word(seal, word, _POLL_NANOSECONDS, self._scratch):
            return
        # The sender's thread has lost its core amid the copy, or died.
        deadline = time.monotonic() + timeout
        while True:
            time.sleep(_PAUSE_SECONDS)
            gone, next_size = self._connection.look(self._packet)
            if self._await_word(seal, word, 0, self._scratch):
                return
            if gone:
                raise self._connection.died()
            if next_size and self._packet[KIND_AT] == Kind.DATA:
                # Rows run in order: that one's is only sent when this one's seal is stored.
                raise TransferMismatchError(
                    f"{self._endpoint.describe()}: slot {record.slot} was overwritten while frame "
                    f"{record.sequence} was in it"
                )
            if time.monotonic() > deadline:
                raise StallError(
                    f"{self._endpoint.describe()}: iteration {record.iteration} began to arrive "
                    f"and was not complete within {timeout:g} s; look at the previous stage's log"
                )

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

    def _read(self, connection: PacketConnection, size: int) -> Arrival | None:
        if size == 0:
            raise connection.died()
        try:
            return self._interpret(connection, memoryview(self._packet)[:size])
        except RecordError as error:
            raise TransferMismatchError(f"{self._endpoint.describe()}: {error}") from error

    def _interpret(self, connection: PacketConnection, packet: memoryview) -> Arrival | None:
        record = self._codec.unpack(packet)
        if record.kind == Kind.HELLO:
            return None
        if record.kind == Kind.BYE:
            raise LinkClosedError(f"{self._endpoint.describe()}: the previous stage closed it")
        if record.kind == Kind.STRUCTURE:
            self._learn(record, packet[RECORD_BYTES:], connection)
            return None
        structure = self._structures.get(record.structure)
        if structure is None or self._arena is None:
            raise RecordError(f"frame {record.sequence} has a structure never announced")
        if record.slot >= self._arena.depth:
            raise RecordError(f"frame {record.sequence} is in slot {record.slot}")
        return Arrival(record, structure, self._arena)

    def _open_room(self, descriptor: int, size: int) -> Arena:
        endpoint = self._endpoint
        memory = _map(descriptor, size * endpoint.depth)
        return HostArena(memory, endpoint.depth, size, endpoint.max_tokens)

    def _learn(self, record: Record, body: memoryview, connection: PacketConnection) -> None:
        size, fresh = _ARENA.unpack_from(body)
        structure = Structure.decode(body[_ARENA.size :])
        if fresh:
            descriptor = connection.receive_descriptor(MEMORY)
            try:
                self._arena = self._open_room(descriptor, size)
            finally:
                os.close(descriptor)
        self._structures[record.structure] = structure
        if len(self._structures) > 64:
            del self._structures[next(iter(self._structures))]
        self.metadata_messages += 1
