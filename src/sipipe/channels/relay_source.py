"""The relay, and its end on the producer's host: a source follows a channel for one replica.

Who runs here: on the producer's host a source, on the other host a replica, each best in a
process of its own (:mod:`sipipe.channels.relay`), so that no engine's GIL is on
the way. The source has a thread that follows the channel and sends, and the one that runs it,
which accepts the replica's connection and reads its acknowledgements. The replica
(:mod:`sipipe.channels.relay_replica`) has one thread.

Guarantees: the replica's readers see the same messages in the same order with the same sequence
numbers, each once. The source keeps a message until the replica has published and acknowledged
it; after a dropped connection the replica says which it wants next, and gets it. Both ends wait
``retry`` seconds for a connection and then report: the source by leaving the original's readers
without a farewell (its producer gets ChannelPeerDied with the relay's name), the replica by
leaving its ring as a dead producer does. Close and death of the original arrive as such. A
replica or source that is too slow makes the relay a late reader of the original, which names it.

Relies on: TCP with keep-alive, the handshake of :mod:`sipipe.channels.handshake`. Frames are
those of :mod:`sipipe.channels.relay_frames`.

Rejected: sending from the accepting thread (one more switch on every message); acknowledging
what was received but not published (a replica that is killed would lose it for its readers, who
cannot tell).
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import threading
import time
from typing import Protocol

from sipipe.channels.dispatch_reader import DispatchReader
from sipipe.channels.errors import ChannelClosed, ChannelError, ChannelPeerDied
from sipipe.channels.handshake import accept_peer, new_token
from sipipe.channels.layout import Layout
from sipipe.channels.logits import LogitsReader
from sipipe.channels.logits_shape import LogitsShape
from sipipe.channels.memory import Endpoint
from sipipe.channels.relay_frames import (
    CLOSED,
    DIED,
    LOGITS_HEAD,
    MESSAGE,
    Frame,
    RelayEndpoint,
    receive_short,
    send_all,
)
from sipipe.channels.sockets import listen, tune
from sipipe.channels.statistics import ChannelStatistics

__all__ = ["RelaySource"]


class _Tap(Protocol):
    """What a source follows."""

    layout: Layout

    @property
    def shape(self) -> LogitsShape | None: ...

    def next(self) -> tuple[int, list[bytes]]:
        """Wait for the next message and copy it."""

    def abandon(self) -> None:
        """Leave without a farewell."""


class _DispatchTap:
    shape = None

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._reader = DispatchReader.open(endpoint, name)
        self.layout = self._reader.layout

    def next(self) -> tuple[int, list[bytes]]:
        with self._reader.receive() as message:
            return message.sequence, [bytes(part) for part in message.parts]

    def abandon(self) -> None:
        self._reader.abandon()


class _LogitsTap:
    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._reader = LogitsReader.open(endpoint, name)
        self.layout = self._reader.layout
        self.shape = self._reader.shape
        self._count = 0

    def next(self) -> tuple[int, list[bytes]]:
        with self._reader.receive() as slot:
            self._count += 1
            return self._count - 1, [
                LOGITS_HEAD.pack(slot.iteration, slot.batch),
                slot.array.tobytes(),
            ]

    def abandon(self) -> None:
        self._reader.abandon()


class RelaySource:
    """Follows a channel of this host for one replica."""

    def __init__(
        self,
        tap: _Tap,
        name: str,
        address: tuple[str, int],
        *,
        retry: float,
        start_timeout: float,
        window: int,
        max_bytes: int,
    ) -> None:
        """Use :meth:`dispatch` or :meth:`logits`."""
        self._tap = tap
        self._name = name
        self._retry = retry
        self._patience = start_timeout  # for the next connection
        self._window = window
        self._listener, host, port = listen(name, address)
        self.endpoint = RelayEndpoint(
            name,
            host,
            port,
            new_token(),
            max_bytes,
            tap.layout.slots,
            tap.layout.slot_bytes,
            tap.shape,
        )
        self._kept: collections.deque[Frame] = collections.deque()
        self._state = threading.Condition()  # guards _kept and _failed
        self._sending = threading.Lock()  # guards _connection; taken before _state
        self._connection: socket.socket | None = None
        self._failed = False
        self._next = 0
        self._died = False
        self._messages = self._bytes = self._reconnects = 0

    @classmethod
    def dispatch(
        cls,
        endpoint: Endpoint,
        name: str,
        address: tuple[str, int],
        *,
        retry: float = 30.0,
        start_timeout: float = 300.0,
        window: int = 64,
        max_bytes: int = 1 << 30,
    ) -> RelaySource:
        """Follow a dispatch channel as its declared reader ``name``.

        Args:
            address: where the replica will connect to; port 0 for any.
            retry: seconds that a connection may be missing.
            start_timeout: the same for the first connection, while the other host starts.
            window: messages kept for a replica that has not acknowledged them.
        """
        return cls(
            _DispatchTap(endpoint, name),
            name,
            address,
            retry=retry,
            start_timeout=start_timeout,
            window=window,
            max_bytes=max_bytes,
        )

    @classmethod
    def logits(
        cls,
        endpoint: Endpoint,
        name: str,
        address: tuple[str, int],
        *,
        retry: float = 30.0,
        start_timeout: float = 300.0,
        window: int = 3,
        max_bytes: int = 1 << 32,
    ) -> RelaySource:
        """Follow a logits channel as its declared reader ``name``; see :meth:`dispatch`."""
        return cls(
            _LogitsTap(endpoint, name),
            name,
            address,
            retry=retry,
            start_timeout=start_timeout,
            window=window,
            max_bytes=max_bytes,
        )

    def run(self) -> None:
        """Relay until the original is closed and the replica knows it.

        Raises:
            ChannelPeerDied: the original's producer died; or the replica is gone, or its host,
                of which the producer learns too.
        """
        follower = threading.Thread(target=self._follow, name=f"{self._name}-follow", daemon=True)
        follower.start()
        try:
            while not self._serve():
                pass
        finally:
            self._fail()
            self._tap.abandon()
            self._listener.close()
        if self._died:
            raise ChannelPeerDied(f"relay {self._name}: the original's producer died", "producer")

    def statistics(self) -> ChannelStatistics:
        """Messages and bytes followed, messages not acknowledged yet, connections lost."""
        with self._state:
            return ChannelStatistics(
                messages=self._messages,
                bytes=self._bytes,
                depth=len(self._kept),
                dropped=self._reconnects,
            )

    # The following thread.

    def _follow(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # its descriptor was closed: abandoned
            while True:
                try:
                    sequence, data = self._tap.next()
                    item = Frame(MESSAGE, sequence, data)
                except ChannelClosed:
                    item = Frame(CLOSED, self._next, [])
                except ChannelError:
                    item = Frame(DIED, self._next, [])
                    self._died = True
                if not self._keep(item) or item.kind != MESSAGE:
                    return

    def _keep(self, item: Frame) -> bool:
        with self._state:
            self._state.wait_for(lambda: self._failed or len(self._kept) < self._window)
            if self._failed:
                return False
        with self._sending:
            with self._state:
                self._kept.append(item)
                if item.kind == MESSAGE:
                    self._next = item.sequence + 1
                    self._messages += 1
                    self._bytes += sum(map(len, item.data))
            self._send(item)
        return True

    def _send(self, item: Frame) -> None:
        """With the sending lock. A connection that fails is left to the thread that reads it."""
        if self._connection is not None:
            try:
                send_all(self._connection, item.encode())
            except OSError:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                self._connection = None

    # The running thread.

    def _serve(self) -> bool:
        """One connection of the replica; whether the replica has everything."""
        sock = self._accept()
        try:
            _, wanted = receive_short(sock)
            self._forget(wanted)
            with self._sending:
                self._connection = sock
                with self._state:
                    again = list(self._kept)
                for item in again:
                    self._send(item)
            while True:
                _, wanted = receive_short(sock)
                if self._forget(wanted):
                    return True
        except (OSError, EOFError):
            with self._state:
                self._reconnects += 1
            return False
        finally:
            with self._sending:
                self._connection = None
            sock.close()

    def _accept(self) -> socket.socket:
        """The replica's next connection, authentic."""
        patience, self._patience = self._patience, self._retry
        end = time.monotonic() + patience
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            if not poll.poll(left * 1000):
                break
            sock, _ = self._listener.accept()
            try:
                _, _, proof = accept_peer(sock, self.endpoint.token, 5.0)
                tune(sock)
                sock.sendall(proof)
                sock.settimeout(None)
            except (ChannelError, OSError):
                sock.close()
                continue
            return sock
        raise ChannelPeerDied(
            f"relay {self._name}: no connection from its replica for {patience} s; "
            "is its host up, and may it connect to this one?",
            self._name,
        )

    def _forget(self, wanted: int) -> bool:
        """Drop what is acknowledged; whether the end of the channel is."""
        with self._state:
            ended = False
            while self._kept and self._kept[0].sequence < wanted:
                ended = self._kept.popleft().kind != MESSAGE
            self._state.notify_all()
            return ended

    def _fail(self) -> None:
        with self._state:
            self._failed = True
            self._state.notify_all()
