"""The receiving end of a TCP link; :mod:`.tcp` says how the two work together."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from typing import TYPE_CHECKING

from sipipe.errors import ResourceError
from sipipe.ipc.link.arena import Arena, HostArena, slot_bytes
from sipipe.ipc.link.errors import LinkClosedError, PeerDiedError, TransferMismatchError
from sipipe.ipc.link.records import RECORD_BYTES, Kind, Record, RecordCodec, RecordError
from sipipe.ipc.link.structure import Structure
from sipipe.ipc.link.tcp_stream import SEAL, configure, prove, read_exactly
from sipipe.ipc.link.transport import Arrival

if TYPE_CHECKING:
    from sipipe.ipc.link.endpoint import LinkEndpoint

__all__ = ["TcpReceiving"]

_MAX_DESCRIPTION = 1 << 20


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

    def receive(
        self,
        timeout: float,
        expected: Arrival | None,  # noqa: ARG002 - our thread has read the record already
    ) -> Arrival | None:
        try:
            arrival = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(arrival, Exception):
            raise arrival
        return arrival

    def complete(self, arrival: Arrival, timeout: float) -> None:
        """Nothing is left: our thread has read the frame to its end."""

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
            self._welcome(sock)
            while True:
                self._inbox.put(self._read_frame(sock))
        except RecordError as error:
            self._failed(TransferMismatchError(f"{self._endpoint.describe()}: {error}"))
        except Exception as error:
            self._failed(error)

    def _welcome(self, sock: socket.socket) -> None:
        """What comes before the first frame."""

    def _failed(self, error: Exception) -> None:
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
        structure = self._structures.get(record.structure)
        if structure is None or self._arena is None:
            raise RecordError(f"frame {record.sequence} has a structure never announced")
        if record.num_tokens > self._endpoint.max_tokens or record.slot >= self._endpoint.depth:
            raise RecordError(f"frame {record.sequence} is larger than max_tokens")
        self._read_body(sock, record, structure, self._arena)
        return Arrival(record, structure, self._arena)

    def _read_body(
        self, sock: socket.socket, record: Record, structure: Structure, arena: Arena
    ) -> None:
        assert self._memory is not None
        start = record.slot * arena.size
        memory = self._memory
        buffers = [
            memory[start + offset : start + offset + extent.nbytes]
            for offset, extent in zip(
                structure.offsets(self._endpoint.max_tokens),
                structure.extents(record.num_tokens),
                strict=False,
            )
        ]
        seal = bytearray(SEAL.size)
        self._fill(sock, [*buffers, memoryview(seal)])
        if SEAL.unpack(seal)[0] != record.sequence ^ record.value:
            raise RecordError(f"frame {record.sequence} does not end where it should")

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
            self._arena = self._make_arena(need)
        self._structures[number] = structure
        if len(self._structures) > 64:
            del self._structures[next(iter(self._structures))]
        self.metadata_messages += 1

    def _make_arena(self, size: int) -> Arena:
        arena = HostArena.private(self._endpoint.depth, size, self._endpoint.max_tokens)
        self._memory = arena.bytes()
        return arena
