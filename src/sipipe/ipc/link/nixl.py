"""Hidden states between stages on different hosts: one-sided writes into the next stage's memory.

NIXL moves the bytes (:mod:`.nixl_agent`), a ZeroMQ connection (:mod:`sipipe.ipc.connection`) the
packets: it authenticates the two ends, carries what they need to find each other's memory, and
notices a death. Both ends have memory that NIXL has registered, page-locked where a GPU copies::

    sender's thread     copy to its buffer ─► write to buffer b ───────────► it has arrived
                                              └► DATA                        └► next frame
    receiver's thread                            wakes ─► notification of b ─┐
    thread that takes                                                        └► forward ─► RELEASE

Who runs here: the threads of :mod:`.shm`, and one of the receiver's. NIXL has none of its own: these
two threads drive a write over TCP, also while the later stage computes; network cards do one by RDMA.
Guarantees: those of :mod:`.zeromq`, but encryption of the hidden states. ``transmit`` returns when the
bytes have arrived, so that one buffer is enough here; while nothing is under way no thread runs. Relies
on: a notification that comes behind its bytes.

Rejected: NIXL's notification alone as the header (nothing that the kernel wakes a thread for, so the
receiver would spin for as long as no request comes); no thread at the receiver (over TCP nothing would
move until it takes, and a stage on a CPU waits for what it has sent); DATA after the write (NIXL's order of bytes and
notification holds on its own connection, not between it and ours); writing from the stage's own
tensors (registering them takes longer than a copy); a GPU's memory at either end, which NIXL can write
to directly: two copies over PCIe less, to be tried where there is a GPU with RDMA.
"""

import ipaddress
import itertools
import queue
import secrets
import socket
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import msgspec
import torch

from sipipe.errors import ResourceError, StallError
from sipipe.ipc.errors import LinkClosedError, PeerDiedError
from sipipe.ipc.link.host_copies import Departures, map_memory
from sipipe.ipc.link.nixl_agent import NixlAgent
from sipipe.ipc.link.packets import HEADER_BYTES, Header, Kind, pack, unpack
from sipipe.ipc.link.schema import Buffers, TensorSchema, buffer_bytes
from sipipe.ipc.link.shm import Announcement, Lost, ShmReceiving, ShmSending
from sipipe.ipc.link.zeromq import connect
from sipipe.messages.link import LinkEndpoint

POLL_SECONDS = 50e-6
"""Seconds between two looks at a write that is under way. NIXL has nothing that wakes a thread."""
_LOOKS_BETWEEN_PACKETS = 20
"""Looks at a write after which the sender also looks for packets: 2 ms or so."""
_IDLE_SECONDS = 3600.0
"""Seconds after which a thread that has received nothing waits again."""
_MAX_PACKET = 1 << 16


class _Room(msgspec.Struct, array_like=True, frozen=True):
    """Body of a ROOM packet: the receiver's buffers."""

    metadata: bytes
    """Description by which NIXL writes there."""
    start: int
    """Address of buffer 0 in the receiver's process."""


class NixlSending(ShmSending):
    """The sender's end, which connects."""

    def __init__(self, endpoint: LinkEndpoint, lost: Lost) -> None:
        self._endpoint = endpoint
        self._departures = Departures() if endpoint.by_host else None
        self._buffers: Buffers | None = None
        self._size = 0
        """Bytes of a buffer so far."""
        self._packet = bytearray(_MAX_PACKET)
        self._receiver = ""
        """Name of the receiver's agent; empty while there is no room."""
        self._start = 0
        """Address of the receiver's buffer 0, in its process."""
        self._writing: Any = None
        """Write that has not been seen to end. It is kept, since NIXL may still read its memory."""
        # The thread that waits for releases and the one that waits for room read one connection: one of
        # them at a time reads, for both.
        self._news = threading.Condition()  # wait: held for moments; nobody waits under it
        self._reading = False
        """True while a thread reads packets. Written under ``_news``."""
        self._releases: deque[int] = deque()
        self._rooms: deque[_Room] = deque()
        self._said_goodbye = False
        """True once the receiver has closed its end."""
        self._connection: Any = connect(endpoint, lost, listens=False)
        try:
            self._address = _own_address(endpoint)
            self._agent = NixlAgent(_name(endpoint), self._address, tcp=bool(endpoint.data_port))
        except BaseException:
            self._connection.close()
            raise

    def is_quick(self, nbytes: int) -> bool:  # noqa: ARG002
        return False  # it waits for the network

    def announce(self, schema: TensorSchema) -> None:
        size = buffer_bytes(schema, self._endpoint.buffer_tokens)
        grows = size > self._size
        self._size = max(size, self._size)
        body = Announcement(schema, self._size, grows, self._address)
        header = Header(Kind.SCHEMA, fingerprint=schema.fingerprint)
        self._connection.send(pack(header, msgspec.msgpack.encode(body)))
        if grows:
            self._make_room(self._size)

    def _make_room(self, total: int) -> None:
        """Register one buffer, and learn where the receiver has its own. It answers when it takes."""
        endpoint = self._endpoint
        memory = _registered(self._agent, endpoint, total)
        self._buffers = Buffers(memory, total, endpoint.buffer_tokens)
        room = self._next(self._rooms, endpoint.stall_timeout)
        if room is None:
            raise StallError(
                f"{endpoint.describe()}: the next stage gave no memory within "
                f"{endpoint.stall_timeout:g} s; look at its log"
            )
        self._receiver = self._agent.learn(room.metadata)
        self._start = room.start

    def transmit(
        self, header: Header, schema: TensorSchema, parts: list[torch.Tensor], after: Any
    ) -> None:
        sources = self._fill(0, header, schema, parts, after)
        start = self._start + header.frame % self._endpoint.depth * self._size
        offsets = schema.offsets(self._endpoint.buffer_tokens)
        pairs = [
            (source, start + offset)
            for source, offset in zip(sources, offsets, strict=False)  # the last offset is the end
            if source.nbytes
        ]
        if not pairs:
            self._connection.send(pack(header))
            return
        try:
            self._writing = self._agent.write(
                self._receiver,
                [source for source, _ in pairs],
                [target for _, target in pairs],
                str(header.frame).encode(),
            )
            self._connection.send(pack(header))
            self._wait_written(header)
        except ConnectionError:
            raise self._connection.died() from None  # NIXL has seen it before the connection has
        except ResourceError:
            if self._connection.usable:
                raise
            raise self._connection.died() from None
        self._writing = None

    def _wait_written(self, header: Header) -> None:
        """Return when the write that is under way has arrived."""
        bound = self._endpoint.stall_timeout
        deadline = time.monotonic() + bound
        for look in itertools.count(1):
            if self._agent.is_written(self._writing):
                return
            if not self._connection.usable:
                raise self._connection.died()
            if look % _LOOKS_BETWEEN_PACKETS == 0:
                self._next(self._rooms, 0.0)  # no room comes, but perhaps a goodbye
            if time.monotonic() >= deadline:
                raise StallError(
                    f"{self._endpoint.describe()}: iteration {header.iteration} did not arrive "
                    f"within {bound:g} s; look at the next stage's log"
                )
            # wait: 50 µs (`POLL_SECONDS`), up to the link's `stall_timeout`; the network, the peer's
            # death, `interrupt`
            time.sleep(POLL_SECONDS)

    def next_release(self, timeout: float) -> int | None:
        frame: int | None = self._next(self._releases, timeout)
        return frame

    def _next(self, wanted: deque[Any], timeout: float) -> Any:
        """The next of ``wanted``, read by this thread or by the other one; None after ``timeout``
        seconds. Raises PeerDiedError, LinkClosedError: none will come."""
        deadline = time.monotonic() + timeout
        looked = False
        while True:
            with self._news:
                if wanted:
                    return wanted.popleft()
                if self._said_goodbye:
                    raise LinkClosedError(f"{self._endpoint.describe()}: the next stage closed it")
                left = deadline - time.monotonic()
                if looked and left <= 0:
                    return None
                looked = True
                if self._reading:
                    # wait: the caller's, at most the link's `stall_timeout`; the thread that reads
                    self._news.wait(max(0.0, left))
                    continue
                self._reading = True
            try:
                self._sort(self._connection.receive(self._packet, max(0.0, left)))
            finally:
                with self._news:
                    self._reading = False
                    self._news.notify_all()

    def _sort(self, size: int | None) -> None:
        """Put the packet that has come, if one has, where its reader looks for it."""
        if size is None:
            return
        packet = memoryview(self._packet)[:size]
        header = unpack(packet)
        match header.kind:
            case Kind.BYE:
                self._said_goodbye = True
            case Kind.ROOM:
                self._rooms.append(msgspec.msgpack.decode(packet[HEADER_BYTES:], type=_Room))
            case Kind.RELEASE:
                self._releases.append(header.frame)

    def close(self) -> None:
        if self._writing is not None:
            self._agent.give_up(self._writing)
            self._writing = None
        self._agent.close()
        super().close()


class _Frame(NamedTuple):
    """A frame whose bytes have come."""

    header: Header
    schema: TensorSchema | None
    tensors: dict[str, torch.Tensor]
    """The tensors, in place; none if their schema was never announced."""


class NixlReceiving(ShmReceiving):
    """The receiver's end, which listens. A thread of its own receives, and drives writes over TCP."""

    def __init__(self, endpoint: LinkEndpoint, lost: Lost) -> None:
        self._endpoint = endpoint
        self._packet = bytearray(_MAX_PACKET)
        self._view = memoryview(self._packet)
        self._buffers: Buffers | None = None
        self._schemas: dict[int, TensorSchema] = {}
        self._notified = -1
        """Last frame all of whose bytes have come."""
        self._is_open = False
        """True while NIXL's port lets the sender's host in."""
        self._frame: _Frame | None = None
        """Frame whose header the caller got last."""
        self._came: queue.SimpleQueue[_Frame | Exception] = queue.SimpleQueue()
        """Frames in order, and at last what ended the link. At most ``depth`` frames are sent."""
        port = endpoint.data_port
        self._lost = lost
        self._gpu = torch.cuda.current_device() if endpoint.by_host else None
        self._agent = NixlAgent(_name(endpoint), endpoint.address, tcp=bool(port), port=port)
        try:
            self._connection: Any = connect(endpoint, lost, listens=True)
        except BaseException:
            self._agent.close()
            raise
        name = f"sipipe-receive-{endpoint.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def receive(self, timeout: float) -> Header | None:
        try:
            # wait: the caller's, at most the link's `stall_timeout`; the receiving thread
            came = self._came.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None
        if isinstance(came, Exception):
            self._came.put(came)  # for the next call
            raise came
        self._frame = came
        return came.header

    def schema(self, header: Header) -> TensorSchema | None:
        assert self._frame is not None
        assert self._frame.header == header
        return self._frame.schema

    def tensors(self, header: Header) -> dict[str, torch.Tensor]:
        assert self._frame is not None
        return self._frame.tensors if self._frame.schema else super().tensors(header)

    def close(self) -> None:
        self._thread.join()  # wait: none; the receiving thread, which `interrupt` has let go
        self._agent.close()
        self._frame = None
        self._came = queue.SimpleQueue()  # frames that nobody has taken hold memory
        super().close()

    # -- our thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._gpu is not None:
                # A new thread's is GPU 0: locking memory would make a context there.
                torch.cuda.set_device(self._gpu)
            while True:
                # The previous stage sends, dies, or `interrupt` ends it.
                header = super().receive(_IDLE_SECONDS)
                if header is not None:
                    self._came.put(self._complete(header))
        except Exception as error:
            self._came.put(error)
            if not isinstance(error, LinkClosedError | PeerDiedError):
                self._lost(error)  # else nobody may hear of it while no iteration is under way

    def _complete(self, header: Header) -> _Frame:
        """The frame, once all its bytes have come."""
        # Resolved here, since the next schema may bring other buffers before this frame is asked for.
        schema = self._schemas.get(header.fingerprint)
        if schema is None or self._buffers is None:
            return _Frame(header, None, {})
        if schema.at(header.num_tokens).nbytes:
            self._wait_written(header)
        buffer = header.frame % self._endpoint.depth
        return _Frame(header, schema, self._buffers.views(schema, buffer, header.num_tokens))

    def _wait_written(self, header: Header) -> None:
        """Return when the write of a frame has been notified."""
        bound = self._endpoint.stall_timeout
        deadline = time.monotonic() + bound
        while self._notified < header.frame:
            gone = not self._connection.usable  # looked at first: what was written has come by then
            for notification in self._agent.notifications():
                self._notified = int(notification)
            if self._notified >= header.frame:
                break
            if gone:
                super().receive(0.0)  # raises the goodbye, if there is one
                raise self._connection.died()
            if time.monotonic() >= deadline:
                raise StallError(
                    f"{self._endpoint.describe()}: iteration {header.iteration} was announced and did "
                    f"not arrive within {bound:g} s; look at the previous stage's log"
                )
            # wait: 50 µs (`POLL_SECONDS`), up to the link's `stall_timeout`; the network, the peer's
            # death, `interrupt`
            time.sleep(POLL_SECONDS)
        if self._is_open:  # the sender is connected, and nobody else has to be
            self._is_open = False
            self._agent.admit("")

    def _take_room(self, news: Announcement) -> Buffers:
        endpoint = self._endpoint
        self._agent.admit(news.address)
        self._is_open = True
        memory = _registered(self._agent, endpoint, news.buffer_bytes * endpoint.depth)
        room = _Room(metadata=self._agent.metadata(), start=memory.data_ptr())
        self._connection.send(pack(Header(Kind.ROOM), msgspec.msgpack.encode(room)))
        return Buffers(memory, news.buffer_bytes, endpoint.buffer_tokens)


def _registered(agent: NixlAgent, endpoint: LinkEndpoint, size: int) -> torch.Tensor:
    """Memory that NIXL may use. Raises ResourceError: there is not that much."""
    locked_for = endpoint.describe() if endpoint.by_host else ""
    try:
        memory = map_memory(-1, size, locked_for=locked_for)
        agent.register(memory)
    except Exception as error:
        raise ResourceError(
            f"{endpoint.describe()}: no {size / 2**20:.0f} MiB of memory that NIXL can use for buffers "
            f"of {endpoint.buffer_tokens} tokens (ulimit -l): {error}"
        ) from error
    return memory


def _name(endpoint: LinkEndpoint) -> str:
    """A name for an agent that no other has."""
    return f"{endpoint.name}-{secrets.token_hex(8)}"


def _own_address(endpoint: LinkEndpoint) -> str:
    """This host's address on the way to the next stage's."""
    version = ipaddress.ip_address(endpoint.address).version
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((endpoint.address, endpoint.port))  # sends nothing
        return str(probe.getsockname()[0])
