"""Messages of any size over a ZeroMQ socket that takes frames of a bounded size.

ZeroMQ's limit on a frame holds for strangers too, so it is small. A part of ``FRAME`` bytes or more
travels as frames of ``FRAME`` bytes and a shorter last one, which may be empty. Each frame is also a
sign of life.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import zmq

FRAME = 256 << 10
"""Bytes of a frame. 512 KB that are encrypted arrive after 0.75 ms as two frames, and after 0.9 ms as
one."""
MOST_BYTES = FRAME + 64
"""Bytes of a frame that ZeroMQ lets in, at most. Encryption adds 33."""

Place = Callable[[bytes], Sequence[memoryview]]
"""Where the parts behind a message's first one go, each with its exact size."""


def send(socket: zmq.Socket[bytes], parts: Sequence[bytes | memoryview]) -> None:
    """Queue one message, which has been copied on return. Raises zmq.ZMQError: nobody is connected."""
    socket.send_multipart(list(_cut(parts)), zmq.NOBLOCK)


def receive(socket: zmq.Socket[bytes], place: Place | None) -> list[bytes] | None:
    """The parts of the next message, without those that went where ``place`` says. None: a part had
    another size than its place, or there were too few. Raises zmq.Again: there is no message."""
    parts = [_join(socket, socket.recv(zmq.NOBLOCK))]
    targets = place(parts[0]) if place is not None else []
    fits = True
    filled = 0
    while socket.getsockopt(zmq.RCVMORE):
        if filled < len(targets):
            fits = _fill(socket, targets[filled]) and fits
            filled += 1
        else:
            # wait: none: messages come whole
            parts.append(_join(socket, socket.recv()))
    return parts if fits and filled == len(targets) else None


def _cut(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The frames in which ``parts`` travel."""
    for part in parts:
        if memoryview(part).nbytes < FRAME:
            yield part
        else:
            data = np.frombuffer(part, np.uint8).data
            for start in range(0, len(data) + 1, FRAME):
                yield data[start : start + FRAME]


def _join(socket: zmq.Socket[bytes], frame: bytes) -> bytes:
    """The part that begins with ``frame``."""
    frames = [frame]
    while len(frames[-1]) == FRAME:
        frames.append(socket.recv())  # wait: none: messages come whole
    return frame if len(frames) == 1 else b"".join(frames)


def _fill(socket: zmq.Socket[bytes], target: memoryview) -> bool:
    """Put a part into ``target``; True if it has that size."""
    size = 0
    last = FRAME
    while last == FRAME:
        room = target[size : size + FRAME]
        # wait: none: messages come whole
        last = socket.recv_into(room) if len(room) else len(socket.recv())
        size += last
    return size == len(target)
