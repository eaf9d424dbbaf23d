"""The relay's end on another host: a replica feeds a ring there; see the source's module."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from sipipe.channels.dispatch import DispatchProducer
from sipipe.channels.errors import ChannelError, ChannelPeerDied
from sipipe.channels.handshake import introduce, receive_exactly
from sipipe.channels.locks import deadline_after, remaining
from sipipe.channels.logits import LogitsChannel, LogitsWriter
from sipipe.channels.memory import Endpoint
from sipipe.channels.relay_frames import ACKNOWLEDGE, CLOSED, HEAD, HELLO, MAX_PARTS, MESSAGE, short
from sipipe.channels.sockets import SocketEndpoint, connect
from sipipe.channels.statistics import ChannelStatistics

__all__ = ["RelayReplica"]


class _Sink(Protocol):
    """What a replica feeds."""

    endpoint: Endpoint

    def put(self, sequence: int, parts: Sequence[memoryview]) -> None:
        """Publish one message."""

    def close(self) -> None:
        """End in good order."""

    def abandon(self) -> None:
        """End as a dead producer does."""


class _DispatchSink:
    def __init__(self, producer: DispatchProducer, stall: float) -> None:
        self.producer = producer
        self.endpoint = producer.endpoint
        self.close = producer.close
        self.abandon = producer.abandon
        self.died: list[str] = []
        self.lock = threading.Lock()
        self._stall = stall

    def put(self, sequence: int, parts: Sequence[memoryview]) -> None:
        while True:
            try:
                with self.lock:
                    self.producer.publish(parts, self._stall, sequence=sequence)
                return
            except ChannelPeerDied as died:  # its executor hears it from the gather ring
                with self.lock:
                    self.producer.remove_reader(died.name)
                    self.died.append(died.name)


class _LogitsSink:
    def __init__(self, channel: LogitsChannel, stall: float) -> None:
        self._channel = channel
        self._writer = LogitsWriter.open(channel.endpoint)
        self._stall = stall
        self.endpoint = channel.endpoint

    def put(self, sequence: int, parts: Sequence[memoryview]) -> None:  # noqa: ARG002
        iteration, batch = struct.unpack("<qq", parts[0])
        with self._writer.acquire(iteration, batch, self._stall) as region:
            flat = region.reshape(-1)
            flat.view("u1")[:] = parts[1]

    def close(self) -> None:
        self._writer.close()
        self._channel.close()

    def abandon(self) -> None:
        self._writer.abandon()
        self._channel.abandon()


class RelayReplica:
    """Feeds a channel of this host with what a source on another host sends."""

    def __init__(self, source: SocketEndpoint, sink: _Sink, retry: float) -> None:
        """Use :meth:`dispatch` or :meth:`logits`."""
        self._source = source
        self._sink = sink
        self._retry = retry
        self._wanted = 0
        self._sock: socket.socket | None = None
        self._messages = self._bytes = self._reconnects = 0

    @classmethod
    def dispatch(
        cls,
        source: SocketEndpoint,
        *,
        readers: Sequence[str],
        slots: int = 16,
        slot_bytes: int = 1 << 16,
        directory: str | None = None,
        retry: float = 30.0,
        stall: float = 300.0,
    ) -> RelayReplica:
        """Make a dispatch channel here, with readers of its own, fed by ``source``.

        Args:
            retry: seconds to try to reach the source.
            stall: seconds that a local reader may be late.
        """
        producer = DispatchProducer.create(source.channel, slots, slot_bytes, readers, directory)
        return cls(source, _DispatchSink(producer, stall), retry)

    @classmethod
    def logits(
        cls,
        source: SocketEndpoint,
        channel: LogitsChannel,
        *,
        retry: float = 30.0,
        stall: float = 300.0,
    ) -> RelayReplica:
        """Feed ``channel``, made on this host with one rank and the original's vocab, batch,
        dtype and layout."""
        return cls(source, _LogitsSink(channel, stall), retry)

    @property
    def endpoint(self) -> Endpoint:
        """What this host's readers open."""
        return self._sink.endpoint

    def add_reader(self, name: str) -> None:
        """Declare a reader of a dispatch replica; its first message is the next. Any thread."""
        assert isinstance(self._sink, _DispatchSink)
        with self._sink.lock:
            self._sink.producer.add_reader(name)

    def remove_reader(self, name: str) -> None:
        """Forget a reader of a dispatch replica. Any thread."""
        assert isinstance(self._sink, _DispatchSink)
        with self._sink.lock:
            self._sink.producer.remove_reader(name)

    def dead_readers(self) -> tuple[str, ...]:
        """Readers of a dispatch replica that died and were removed, in order."""
        return tuple(self._sink.died) if isinstance(self._sink, _DispatchSink) else ()

    def run(self) -> None:
        """Feed the channel until the original is closed; then close it too.

        Raises:
            ChannelPeerDied: the original's producer died, or its host cannot be reached any
                more. The local readers get ChannelPeerDied too.
            ChannelTimeout: a local reader is stuck.
        """
        try:
            while True:
                with self._connect() as self._sock:
                    try:
                        self._feed(self._sock)
                        return
                    except (OSError, EOFError):
                        self._reconnects += 1
        except BaseException:
            self._sink.abandon()
            raise

    def statistics(self) -> ChannelStatistics:
        """Messages and bytes published here, and connections lost."""
        return ChannelStatistics(
            messages=self._messages, bytes=self._bytes, dropped=self._reconnects
        )

    def _connect(self) -> socket.socket:
        deadline = deadline_after(self._retry)
        pause = 0.05
        while True:
            left = remaining(deadline) or 0.0
            try:
                sock = connect(self._source, max(0.1, left))
                try:
                    name = self._source.channel
                    introduce(sock, self._source.token, name, 0, max(0.1, left), name)
                    sock.settimeout(None)
                    sock.sendall(short(HELLO, self._wanted))
                except BaseException:
                    sock.close()
                    raise
                return sock
            except (OSError, ChannelPeerDied) as error:
                if left <= 0:
                    raise ChannelPeerDied(
                        f"relay {self._source.channel}: cannot reach its source for "
                        f"{self._retry} s ({error})",
                        "source",
                    ) from None
                time.sleep(min(pause, left))
                pause = min(pause * 2, 1.0)

    def _feed(self, sock: socket.socket) -> None:
        while True:
            head = receive_exactly(sock, HEAD.size)
            kind, sequence, count, size = HEAD.unpack(head)
            if kind == MESSAGE:
                if count > MAX_PARTS or size > self._source.max_bytes:
                    raise ChannelError(
                        f"relay {self._source.channel}: a message of {count} parts and {size:,} "
                        "bytes is beyond its bound"
                    )
                lengths = struct.unpack(f"<{count}Q", receive_exactly(sock, 8 * count))
                data = memoryview(receive_exactly(sock, size))
                if sum(lengths) != size:
                    raise ChannelError(f"relay {self._source.channel}: a damaged frame")
                parts, place = [], 0
                for length in lengths:
                    parts.append(data[place : place + length])
                    place += length
                assert self._messages == 0 or sequence == self._wanted, (sequence, self._wanted)
                self._sink.put(sequence, parts)
                self._wanted = sequence + 1
                self._messages += 1
                self._bytes += size
                sock.sendall(short(ACKNOWLEDGE, self._wanted))
                continue
            sock.sendall(short(ACKNOWLEDGE, sequence + 1))
            if kind == CLOSED:
                self._sink.close()
                return
            raise ChannelPeerDied(
                f"relay {self._source.channel}: the original's producer died", "producer"
            )
