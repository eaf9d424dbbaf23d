"""BIC-O: what the samplers send for an iteration, complete or not at all, at one receiver.

Who runs here
    At the receiver one thread calls :meth:`GatherReceiver.collect`; any thread may call ``expect``,
    ``replace`` and ``close`` meanwhile. At a sampler one thread sends. Sampler i has one end of a
    socket pair, which the process that starts it makes, and the receiver has the other.
Guarantees
    ``collect`` returns iterations in the order in which they were declared, each when its last
    answer is in. An answer that came already, or late, is dropped: a sampler that was started again
    may repeat its predecessor's. When a sampler closes its end or dies, all that it sent is taken,
    and ``collect`` goes on for the others. Whoever started its process sees its end, and brings in
    another. An answer may travel in several frames, so that no buffer has to be as large as one.
Relies on
    The kernel closes the ends of a process that dies, and no other process has a copy of them.
    Invariant: ``_lock`` is held wherever a socket is read or closed; ``_collecting`` wherever
    ``_epoll`` and ``_end`` are slept on or closed.

A frame is a header (payload bytes, whether more frames of this answer follow, iteration) and the
payload; nothing is unpickled here.

Rejected: shared memory for the way back (for some hundred bytes it would save microseconds).
"""

import ctypes
import dataclasses
import os
import select
import socket
import struct
import threading
from collections.abc import Iterable, Sequence

from sipipe.errors import StallError
from sipipe.ipc.errors import ChannelClosed, PeerDiedError
from sipipe.linux import receive_now

_HEADER = struct.Struct("<I?xxxQ")  # payload bytes, more follows, iteration
_RECEIVE_BYTES = 1 << 18
"""Bytes that are read from a socket at once, at most."""


@dataclasses.dataclass(slots=True)
class _Sampler:
    """One sampler's end, and the bytes of a frame that is not complete yet."""

    index: int
    sock: socket.socket
    data: bytearray = dataclasses.field(default_factory=bytearray)


@dataclasses.dataclass(slots=True)
class _Pending:
    """An iteration that is declared and was not returned yet."""

    missing: set[int]
    """Samplers whose last frame is still to come."""
    frames: dict[int, list[bytes]] = dataclasses.field(default_factory=dict)


class GatherReceiver:
    """The receiver of all samplers' answers. The module's text says which thread may call what."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        """``sockets[i]`` is the receiver's end of sampler i; this object closes it."""
        self._count = len(sockets)
        self._lock = threading.Lock()  # wait: held for moments; nobody waits under it
        # wait: held while the one that collects sleeps; `close`, which takes it too, has woken that
        self._collecting = threading.Lock()
        self._samplers: dict[int, _Sampler] = {}
        """Samplers whose end is open, by descriptor."""
        self._pending: dict[int, _Pending] = {}
        """Invariant: iterations ascend, so the first is the next to return."""
        self._last = -1
        """Iteration that was declared last."""
        self._closed = False
        # One buffer for all sockets. It is filled by calls that keep the GIL (`receive_now`): they do
        # not wait, and to take the GIL again costs more than they do.
        self._buffer = ctypes.create_string_buffer(_RECEIVE_BYTES)
        self._epoll = select.epoll()
        self._end = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once this object is closed."""
        self._epoll.register(self._end, select.EPOLLIN)
        for index, sock in enumerate(sockets):
            self._add(index, sock)

    def replace(self, index: int, sock: socket.socket) -> None:
        """Listen to a new sampler ``index``; any thread may call. It answers anew what its predecessor
        had answered in part or not at all. What ``collect`` has not read of the predecessor is
        dropped."""
        with self._lock:
            if self._closed:
                sock.close()
                return
            predecessors = [old for old in self._samplers.values() if old.index == index]
            for predecessor in predecessors:
                self._remove(predecessor)
            for pending in self._pending.values():
                if index in pending.missing:
                    pending.frames.pop(index, None)
            self._add(index, sock)

    def expect(self, iteration: int, indices: Iterable[int]) -> None:
        """Declare which samplers answer ``iteration``; any thread may call. Iterations are declared in
        ascending order, each before the samplers learn of it. Some sampler answers each."""
        missing = set(indices)
        assert missing, iteration
        assert missing <= set(range(self._count)), missing
        with self._lock:
            assert iteration > self._last, (iteration, self._last)
            self._last = iteration
            self._pending[iteration] = _Pending(missing)

    def collect(self) -> tuple[int, dict[int, list[bytes]]]:
        """Wait until the next iteration is complete. Returns its number, and the frames of each sampler
        by index. Raises ChannelClosed: this receiver was closed, perhaps by another thread just now."""
        with self._collecting:
            while True:
                with self._lock:
                    if self._closed:
                        raise ChannelClosed("channel bic-o: closed")
                    complete = self._take()
                    if complete is not None:
                        return complete
                # wait: none, for the engine has one for each iteration; tokens, a sampler's
                # death, `close`
                ready = self._epoll.poll(None)
                with self._lock:
                    for descriptor, _ in ready:
                        self._read(descriptor)

    def close(self) -> None:
        """Close all ends; a ``collect`` in another thread ends with ChannelClosed. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for sampler in list(self._samplers.values()):
                self._remove(sampler)
            os.eventfd_write(self._end, 1)
        with self._collecting:  # the collecting thread has left, or is about to
            self._epoll.close()
            os.close(self._end)

    # ---- with `_lock` held ----------------------------------------------------------------------

    def _take(self) -> tuple[int, dict[int, list[bytes]]] | None:
        """The next iteration with its answers, if it is complete."""
        iteration, pending = next(iter(self._pending.items()), (-1, None))
        if pending is None or pending.missing:
            return None
        del self._pending[iteration]
        return iteration, pending.frames

    def _add(self, index: int, sock: socket.socket) -> None:
        """Read from ``sock`` what sampler ``index`` sends."""
        sock.setblocking(False)
        self._samplers[sock.fileno()] = _Sampler(index, sock)
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _remove(self, sampler: _Sampler) -> None:
        """Close the end of a sampler that sends nothing any more."""
        descriptor = sampler.sock.fileno()
        del self._samplers[descriptor]
        self._epoll.unregister(descriptor)
        sampler.sock.close()

    def _read(self, descriptor: int) -> None:
        """Take the bytes that are there from one sampler, or its end."""
        sampler = self._samplers.get(descriptor)
        if sampler is None:  # the end, or a sampler that was replaced meanwhile
            return
        try:
            size = receive_now(descriptor, self._buffer)
        # The event may be of the predecessor that had this descriptor before.
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        if size:
            sampler.data += memoryview(self._buffer)[:size]
            self._parse(sampler)
        else:
            self._remove(sampler)

    def _parse(self, sampler: _Sampler) -> None:
        """Take the complete frames from the sampler's bytes."""
        data = sampler.data
        start = 0
        while len(data) - start >= _HEADER.size:
            size, more, iteration = _HEADER.unpack_from(data, start)
            begin = start + _HEADER.size
            end = begin + size
            if len(data) < end:
                break
            pending = self._pending.get(iteration)
            if pending is not None and sampler.index in pending.missing:
                frames = pending.frames.setdefault(sampler.index, [])
                frames.append(bytes(memoryview(data)[begin:end]))
                if not more:
                    pending.missing.remove(sampler.index)
            start = end
        del data[:start]


class GatherSender:
    """A sampler's end. It is not for two threads at once."""

    def __init__(self, sock: socket.socket) -> None:
        """``sock`` is the end that the executor handed over; this object closes it."""
        self._sock = sock

    def send(
        self, iteration: int, data: bytes, timeout: float = 60.0, *, more: bool = False
    ) -> None:
        """Answer ``iteration`` with one frame. With ``more``, other frames of the same answer follow.

        Raises StallError: the frame was not taken within ``timeout`` seconds. This end is closed then,
        since nothing could follow half a frame. PeerDiedError: the executor is gone, or this end is
        closed."""
        try:
            self._sock.settimeout(timeout)
            # wait: 60 s; the executor, or its death
            self._sock.sendall(_HEADER.pack(len(data), more, iteration) + data)
        except (TimeoutError, BlockingIOError):  # the latter with a `timeout` of 0
            self._sock.close()
            raise StallError(
                f"channel bic-o: the executor took nothing for {timeout:g} s"
            ) from None
        except OSError as error:
            raise PeerDiedError(f"channel bic-o: the executor is gone ({error.strerror})") from None

    def close(self) -> None:
        """Close this end, after what was sent. Idempotent."""
        self._sock.close()
