"""Messages of any size over a ZeroMQ socket that takes frames of a bounded size.

ZeroMQ's limit on a frame holds for strangers too. So a part of ``FRAME`` bytes or more travels as
frames of so many and a shorter last one, which may be empty; each is also a sign of life.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import zmq

FRAME = 256 << 10
"""Bytes. Of 512 KB encrypted, two frames arrive after 0.75 ms and one after 0.9 ms."""
MOST_BYTES = FRAME + 64
"""Of a frame, with what encryption adds (33)."""

Place = Callable[[bytes], Sequence[memoryview]]
"""Where the parts behind a message's first one go, each with its exact size."""


def send(socket: zmq.Socket[bytes], parts: Sequence[bytes | memoryview]) -> None:
    """Send one message; it has been copied on return. Raises zmq.ZMQError: nobody is connected."""
    socket.send_multipart(list(_cut(parts)), zmq.NOBLOCK)


def receive(socket: zmq.Socket[bytes], place: Place | None) -> list[bytes] | None:
    """The parts of the next message, but for those that go to their places; None: one did not fit.
    Raises zmq.Again: there is no message."""
    parts = [_join(socket, socket.recv(zmq.NOBLOCK))]
    targets = place(parts[0]) if place is not None else []
    fits = True
    came = 0
    while socket.getsockopt(zmq.RCVMORE):
        if came < len(targets):
            fits = _fill(socket, targets[came]) and fits
            came += 1
        else:
            # wait: none: messages come whole
            parts.append(_join(socket, socket.recv()))
    return parts if fits and came == len(targets) else None


def _cut(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for part in parts:
        if memoryview(part).nbytes < FRAME:
            yield part
        else:
            whole = np.frombuffer(part, np.uint8).data
            for start in range(0, len(whole) + 1, FRAME):
                yield whole[start : start + FRAME]


def _join(socket: zmq.Socket[bytes], frame: bytes) -> bytes:
    """The part that begins with ``frame``."""
    frames = [frame]
    while len(frames[-1]) == FRAME:
        frames.append(socket.recv())  # wait: none: messages come whole
    return frame if len(frames) == 1 else b"".join(frames)


def _fill(socket: zmq.Socket[bytes], target: memoryview) -> bool:
    """Put a part into ``target``; whether it has that size."""
    came = 0
    last = FRAME
    while last == FRAME:
        room = target[came : came + FRAME]
        # wait: none: messages come whole
        last = socket.recv_into(room) if len(room) else len(socket.recv())
        came += last
    return came == len(target)
