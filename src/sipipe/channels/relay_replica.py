"""The relay's end on another host: a replica feeds a ring there; see the source's module.

Who runs here: one thread that runs the replica; any other may add and remove readers.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from sipipe.channels.dispatch import DispatchProducer
from sipipe.channels.errors import ChannelConfigError, ChannelError, ChannelPeerDied
from sipipe.channels.handshake import introduce, receive_exactly, receive_into
from sipipe.channels.locks import deadline_after, remaining
from sipipe.channels.logits import LogitsChannel, LogitsWriter
from sipipe.channels.memory import Endpoint
from sipipe.channels.relay_frames import (
    ACKNOWLEDGE,
    CLOSED,
    HEAD,
    HELLO,
    LOGITS_HEAD,
    MAX_PARTS,
    MESSAGE,
    RelayEndpoint,
    short,
)
from sipipe.channels.sockets import connect
from sipipe.channels.statistics import ChannelStatistics

__all__ = ["RelayReplica"]


class _Sink(Protocol):
    """What a replica feeds."""

    endpoint: Endpoint

    def take(self, sock: socket.socket, sequence: int, lengths: Sequence[int]) -> None:
        """Receive the parts of one message and publish it. Nothing is published on an error."""

    def add_reader(self, name: str) -> None: ...

    def remove_reader(self, name: str) -> None: ...

    def dead_readers(self) -> tuple[str, ...]: ...

    def close(self) -> None:
        """End in good order."""

    def abandon(self) -> None:
        """End as a dead producer does."""


class _DispatchSink:
    def __init__(self, producer: DispatchProducer, stall: float) -> None:
        self._producer = producer
        self._stall = stall
        self._died: list[str] = []
        # Held from a reader's death until it is removed: its successor is not removed for it.
        self._readers = threading.Lock()
        self.endpoint = producer.endpoint
        self.close = producer.close
        self.abandon = producer.abandon

    def take(self, sock: socket.socket, sequence: int, lengths: Sequence[int]) -> None:
        data = memoryview(bytearray(sum(lengths)))
        receive_into(sock, data)
        parts, place = [], 0
        for length in lengths:
            parts.append(data[place : place + length])
            place += length
        published = False
        while not published:
            with self._readers:
                try:
                    self._producer.publish(parts, self._stall, sequence=sequence)
                    published = True
                except ChannelPeerDied as died:  # its executor hears it from the gather ring
                    self._producer.remove_reader(died.name)
                    self._died.append(died.name)

    def add_reader(self, name: str) -> None:
        with self._readers:
            self._producer.add_reader(name)

    def remove_reader(self, name: str) -> None:
        with self._readers:
            self._producer.remove_reader(name)

    def dead_readers(self) -> tuple[str, ...]:
        return tuple(self._died)


class _LogitsSink:
    def __init__(self, channel: LogitsChannel, stall: float) -> None:
        self._channel = channel
        self._writer = LogitsWriter.open(channel.endpoint)
        self._stall = stall
        self.endpoint = channel.endpoint
        self.add_reader = channel.add_reader
        self.remove_reader = channel.remove_reader

    def take(self, sock: socket.socket, sequence: int, lengths: Sequence[int]) -> None:  # noqa: ARG002
        if len(lengths) != 2 or lengths[0] != LOGITS_HEAD.size:
            raise ChannelError(f"channel {self.endpoint.channel}: a damaged frame of logits")
        iteration, batch = LOGITS_HEAD.unpack(receive_exactly(sock, lengths[0]))
        with self._writer.acquire(iteration, batch, self._stall) as region:
            if region.nbytes != lengths[1]:
                raise ChannelError(
                    f"channel {self.endpoint.channel}: iteration {iteration} has {lengths[1]:,} "
                    f"bytes, a batch of {batch} {region.nbytes:,}; is it the original's shape?"
                )
            receive_into(sock, region.reshape(-1).view("u1").data)  # into the slot itself

    def dead_readers(self) -> tuple[str, ...]:
        return ()  # nobody need remove them: a dead sampler's locks are free

    def close(self) -> None:
        self._writer.close()
        self._channel.close()

    def abandon(self) -> None:
        self._writer.abandon()
        self._channel.abandon()


class RelayReplica:
    """Feeds a channel of this host with what a source on another host sends."""

    def __init__(self, source: RelayEndpoint, sink: _Sink, retry: float) -> None:
        """Use :meth:`create`."""
        self._source = source
        self._sink = sink
        self._retry = retry
        self._wanted = 0
        self._sock: socket.socket | None = None
        self._messages = self._bytes = self._reconnects = 0

    @classmethod
    def create(
        cls,
        source: RelayEndpoint,
        *,
        readers: Sequence[str],
        slots: int | None = None,
        slot_bytes: int | None = None,
        directory: str | None = None,
        retry: float = 30.0,
        stall: float = 300.0,
    ) -> RelayReplica:
        """Make a channel here like the one that ``source`` follows, with readers of its own.

        Args:
            readers: names of this host's readers.
            slots: of the channel here; None: as many as the original has.
            slot_bytes: of a dispatch channel's slots; None: as the original's. A logits slot is
                always as large as the original's.
            directory: where the memory lies; None: a memfd.
            retry: seconds to try to reach the source.
            stall: seconds that a reader here may be late.

        Raises:
            ResourceError: not enough memory. ChannelConfigError: a size that cannot work.
        """
        if stall <= 0 or retry <= 0:
            raise ChannelConfigError(f"relay {source.channel}: retry and stall are seconds above 0")
        slots = slots or source.slots
        sink: _Sink
        if (shape := source.logits) is None:
            sink = _DispatchSink(
                DispatchProducer.create(
                    source.channel, slots, slot_bytes or source.slot_bytes, readers, directory
                ),
                stall,
            )
        else:
            sink = _LogitsSink(
                LogitsChannel.of_shape(
                    source.channel, shape, slots=slots, readers=readers, directory=directory
                ),
                stall,
            )
        return cls(source, sink, retry)

    @property
    def endpoint(self) -> Endpoint:
        """What this host's readers open."""
        return self._sink.endpoint

    def add_reader(self, name: str) -> None:
        """Declare a reader, which begins with the next message, or the oldest logits that are
        there (as with the original). Any thread."""
        self._sink.add_reader(name)

    def remove_reader(self, name: str) -> None:
        """Forget a reader. Any thread; waits for a publish that is stuck on a late one."""
        self._sink.remove_reader(name)

    def dead_readers(self) -> tuple[str, ...]:
        """Readers of a dispatch replica that died and were removed, in order."""
        return self._sink.dead_readers()

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
                    except ChannelError:  # a timeout of ours is an OSError too
                        raise
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
            kind, sequence, count, size = HEAD.unpack(receive_exactly(sock, HEAD.size))
            if kind == MESSAGE:
                self._sink.take(sock, sequence, self._lengths(sock, sequence, count, size))
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

    def _lengths(
        self, sock: socket.socket, sequence: int, count: int, size: int
    ) -> tuple[int, ...]:
        """The lengths of a message's parts, checked before anything of them is believed."""
        if count > MAX_PARTS or size > self._source.max_bytes:
            raise ChannelError(
                f"relay {self._source.channel}: a message of {count} parts and {size:,} "
                "bytes is beyond its bound"
            )
        lengths = struct.unpack(f"<{count}Q", receive_exactly(sock, 8 * count))
        if sum(lengths) != size:
            raise ChannelError(f"relay {self._source.channel}: a damaged frame")
        assert self._messages == 0 or sequence == self._wanted, (sequence, self._wanted)
        return lengths
