"""BIC-O: what many samplers send for an iteration, complete or not at all, at one receiver.

Who runs here: at the receiver, one thread that collects (any other may call ``expect``), and one
that sleeps in ``poll`` until somebody connects and then checks the token; at each sender, one
thread. Slot i has one sub-slot per sender that is expected for iteration i.

Guarantees: ``collect`` returns iterations in order, each when its last sub-slot is in. A sub-slot
that came already, or that belongs to an iteration that was returned, is dropped and counted: a
sampler started again may send what its predecessor sent. A connection is of one incarnation of
one sender; a later incarnation takes the place of an earlier one, never the other way round. A
sender whose connection ends without a farewell is reported once, by ChannelPeerDied out of
``collect``, after everything that it sent before was taken; the receiver stays usable.

Relies on: the kernel ends the connections of a dead process; TCP keep-alive for a dead host. The
state is guarded by ``_lock``; collect sleeps in ``epoll`` without it and is woken by an eventfd.

Rejected: UDP or shared memory for the way back (a sub-slot is some hundred bytes: the saving is a
few microseconds, and the paper's reason stands: the same code serves several hosts); an acceptor
in the collecting thread (a sampler that connects would wait until somebody collects).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence

from sipipe.ipc.errors import ChannelClosed, ChannelError, ChannelPeerDied, ChannelTimeout
from sipipe.ipc.gather_old.ends import End
from sipipe.ipc.gather_old.handshake import accept_peer, new_token
from sipipe.ipc.gather_old.slots import Gathered, GatherSlots
from sipipe.ipc.gather_old.statistics import ChannelStatistics, Waits
from sipipe.ipc.locks import deadline_after, remaining
from sipipe.ipc.sockets import SocketEndpoint, listen, tune

__all__ = ["GatherReceiver"]

FRAME = struct.Struct("<IQ")  # payload bytes, iteration
FAREWELL = (1 << 64) - 1
_HANDSHAKE_SECONDS = 5.0
_RECEIVE_BYTES = 1 << 18


@dataclasses.dataclass(slots=True)
class _Connection:
    name: str
    incarnation: int
    sock: socket.socket
    data: bytearray


class GatherReceiver(End):
    """The one receiver; see the module for who may call what."""

    def __init__(
        self, channel: str, senders: Sequence[str], address: tuple[str, int] | None, max_bytes: int
    ) -> None:
        """Use :meth:`create`."""
        self._listener, host, port = listen(channel, address)
        self.endpoint = SocketEndpoint(channel, host, port, new_token(), max_bytes)
        self._slots = GatherSlots(senders)
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}
        self._current: dict[str, _Connection] = {}
        self._latest: dict[str, int] = {}
        self._events: collections.deque[ChannelError] = collections.deque()
        self._waits = Waits()
        self._closed = False
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._acceptor = threading.Thread(
            target=self._accept, name=f"{channel}-accept", daemon=True
        )
        self._acceptor.start()

    @classmethod
    def create(
        cls,
        senders: Sequence[str],
        address: tuple[str, int] | None = None,
        *,
        name: str = "bic-o",
        max_bytes: int = 1 << 26,
    ) -> GatherReceiver:
        """Listen for ``senders``.

        Args:
            address: ``(host, port)`` for TCP, port 0 for any; None: an abstract Unix socket.
            max_bytes: a larger message ends its sender's connection.
        """
        return cls(name, senders, address, max_bytes)

    def expect(self, iteration: int, senders: Iterable[str]) -> None:
        """Declare who will send for ``iteration``, ascending; any thread may call.

        For an iteration that is declared and not complete, this replaces who is waited for.
        Without any declaration, every sender is expected for every iteration from 0 on.
        """
        names = frozenset(senders)
        if unknown := names - self._slots.senders:
            raise ChannelError(
                f"channel {self.endpoint.channel}: unknown senders {sorted(unknown)}"
            )
        with self._lock:
            self._slots.expect(iteration, names)
        os.eventfd_write(self._wake, 1)

    def collect(self, timeout: float | None = None) -> Gathered:
        """Wait for the next iteration in order to be complete.

        Raises:
            ChannelTimeout: not within ``timeout`` seconds; ``late`` names who is missing.
            ChannelPeerDied: the sender ``name`` went away; call again after dealing with it.
            ChannelError: a sender broke the protocol and was cut off; call again.
            ChannelClosed: this receiver was closed.
        """
        deadline = deadline_after(timeout)
        waited = 0.0
        while True:
            with self._lock:
                if self._closed:
                    raise ChannelClosed(f"channel {self.endpoint.channel}: closed")
                gathered = self._slots.take()
                if gathered is not None or self._events:
                    if waited:
                        self._waits.add(waited)
                    if gathered is not None:
                        return gathered
                    raise self._events.popleft()
            left = remaining(deadline)
            began = time.monotonic()
            try:
                ready = self._epoll.poll(left)
            except (OSError, ValueError):  # closed by another thread
                continue
            waited += time.monotonic() - began
            if not ready and left is not None:
                if (left := remaining(deadline)) is not None and left > 0:
                    continue
                raise self._timeout(timeout)
            for fd, _ in ready:
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                else:
                    self._read(fd)

    def connected(self) -> tuple[str, ...]:
        """The senders that are connected now."""
        with self._lock:
            return tuple(sorted(self._current))

    def statistics(self) -> ChannelStatistics:
        """Iterations, payload bytes, waits, iterations pending, sub-slots dropped."""
        with self._lock:
            return ChannelStatistics(
                messages=self._slots.taken,
                bytes=self._slots.bytes,
                waits=self._waits.count,
                wait_seconds=self._waits.seconds,
                longest_wait=self._waits.longest,
                depth=self._slots.pending(),
                dropped=self._slots.dropped,
            )

    def close(self) -> None:
        """Hang up on everybody. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._stop, 1)
        self._acceptor.join(timeout=_HANDSHAKE_SECONDS)
        os.eventfd_write(self._wake, 1)
        self._listener.close()
        with self._lock:
            for connection in self._connections.values():
                connection.sock.close()
            self._connections.clear()
            self._current.clear()
            # The eventfds are not closed while another thread may be about to use them.
            self._epoll.close()

    def __del__(self) -> None:
        for fd in (getattr(self, "_wake", -1), getattr(self, "_stop", -1)):
            if fd >= 0:
                os.close(fd)

    # The collecting thread.

    def _read(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:
            return
        try:
            chunk = connection.sock.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""
        with self._lock:
            if not chunk:
                self._gone(connection, died=True)
                return
            connection.data += chunk
            try:
                self._parse(connection)
            except ChannelError as error:
                self._gone(connection, died=False)
                self._events.append(error)

    def _parse(self, connection: _Connection) -> None:
        data, place = connection.data, 0
        while len(data) - place >= FRAME.size:
            size, iteration = FRAME.unpack_from(data, place)
            if size > self.endpoint.max_bytes:
                raise ChannelError(
                    f"channel {self.endpoint.channel}: {connection.name} announced {size:,} bytes, "
                    f"more than max_bytes ({self.endpoint.max_bytes:,}); cut off"
                )
            if iteration == FAREWELL:
                self._gone(connection, died=False)
                return
            end = place + FRAME.size + size
            if len(data) < end:
                break
            self._slots.put(connection.name, iteration, bytes(data[place + FRAME.size : end]))
            place = end
        del data[:place]

    def _gone(self, connection: _Connection, *, died: bool) -> None:
        fd = connection.sock.fileno()
        if self._connections.pop(fd, None) is None:
            return
        self._epoll.unregister(fd)
        connection.sock.close()
        if self._current.get(connection.name) is connection:
            del self._current[connection.name]
            if died:
                self._events.append(
                    ChannelPeerDied(
                        f"channel {self.endpoint.channel}: sender {connection.name} died",
                        connection.name,
                    )
                )

    def _timeout(self, timeout: float | None) -> ChannelTimeout:
        with self._lock:
            iteration, late = self._slots.late()
        what = f"{', '.join(late)} sent nothing for it" if late else "it was not declared"
        return ChannelTimeout(
            f"channel {self.endpoint.channel}: iteration {iteration} is not complete after "
            f"{timeout} s: {what}",
            late,
        )

    # The accepting thread, and one for each handshake.

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._stop in ready:
                return
            try:
                sock, _ = self._listener.accept()
            except OSError:
                continue
            threading.Thread(target=self._admit, args=(sock,), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            name, incarnation, proof = accept_peer(sock, self.endpoint.token, _HANDSHAKE_SECONDS)
        except ChannelError:
            sock.close()  # not one of ours: nothing is said about it
            return
        tune(sock)
        sock.setblocking(False)
        with self._lock:
            late = incarnation < self._latest.get(name, 0)
            if self._closed or name not in self._slots.senders or late:
                sock.close()
                return
            if (old := self._current.pop(name, None)) is not None:
                self._gone(old, died=False)
            connection = _Connection(name, incarnation, sock, bytearray())
            self._latest[name] = incarnation
            self._current[name] = connection
            self._connections[sock.fileno()] = connection
            self._epoll.register(sock.fileno(), select.EPOLLIN)
            # Last, so that a sender whose connect has returned is known here.
            with contextlib.suppress(OSError):  # it hung up: epoll says so
                sock.send(proof)
