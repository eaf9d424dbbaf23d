"""How a dispatch message lies in memory, and what a reader gets to see of it.

    ┌ 8-byte length of each part ┬ part 0 ┬ part 1 ┬ …   parts start at multiples of 16

The same in a ring entry and in the memory in which a reader puts a cut message together.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

Part = bytes | bytearray | memoryview
"""What a part may be: any C-contiguous buffer, a NumPy array too."""

_MASK = -16  # parts begin at multiples of 16: & _MASK rounds down


@dataclass(slots=True)
class Message:
    """One received message, a context manager that gives the memory back at its end. ``parts`` are
    read-only, and can be read until then, at the latest until the next receive; afterwards the
    content of an array made from one changes: copy what must live longer. ``sequence`` counts from
    the producer's first message."""

    sequence: int
    parts: Sequence[memoryview]
    _unlock: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            try:  # noqa: SIM105 - suppress() costs as much as all the rest
                part.release()
            except BufferError:
                pass
        self.parts = ()
        self._unlock()


@functools.cache  # as many as there are numbers of parts: a few
def _table(count: int) -> struct.Struct:
    """The lengths of so many parts."""
    return struct.Struct(f"<{count}Q")


def measure(parts: Sequence[Part]) -> tuple[list[Part], int]:
    """The bytes of each part, and how many bytes the message takes with table and padding."""
    views = []
    total = (8 * len(parts) + 15) & _MASK
    for part in parts:
        view = part if type(part) is bytes else _bytes_of(part)
        views.append(view)
        total += (len(view) + 15) & _MASK
    return views, total


def lay_out(target: memoryview, views: Sequence[Part]) -> None:
    """Write the table and the parts of a message."""
    count = len(views)
    _table(count).pack_into(target, 0, *map(len, views))
    place = (8 * count + 15) & _MASK
    for view in views:
        end = place + len(view)
        target[place:end] = view
        place = (end + 15) & _MASK


def parts_in(view: memoryview, count: int) -> list[memoryview]:
    """The parts of the message at the start of ``view``, in place."""
    place = (8 * count + 15) & _MASK
    parts = []
    for size in _table(count).unpack_from(view):
        end = place + size
        parts.append(view[place:end])
        place = (end + 15) & _MASK
    return parts


def _bytes_of(part: Part) -> Part:
    """``part`` itself or a view of its bytes."""
    if isinstance(part, bytes | bytearray):
        return part
    view = memoryview(part)
    return view.cast("B") if view.nbytes else b""
