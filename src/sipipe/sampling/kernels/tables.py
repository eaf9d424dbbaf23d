"""Open-addressing tables of seen tokens in shared arrays; see `sipipe.sampling.seen`."""

from __future__ import annotations

from typing import Any

import numpy as np

from sipipe.sampling.kernels._jit import entry, kernel


@kernel
def _enter(tokens: Any, counts: Any, first: int, room: int, token: int, times: int) -> Any:
    """Add ``times`` to the count of ``token``, entering it if new; 1 if it was new."""
    mask = room - 1
    slot = (np.uint32(token) * np.uint32(2654435769)) & np.uint32(mask)
    at = first + np.int64(slot)
    while tokens[at] != token and tokens[at] >= 0:
        slot = (slot + np.uint32(1)) & np.uint32(mask)
        at = first + np.int64(slot)
    new = 0
    if tokens[at] < 0:
        tokens[at] = token
        counts[at] = 0
        new = 1
    counts[at] += times
    return new


@entry
def enter_all(tokens: Any, counts: Any, first: int, room: int, added: Any, times: int) -> Any:
    """Enter every token of ``added`` into one table with room; how many were new."""
    new = 0
    for i in range(added.size):
        new += _enter(tokens, counts, first, room, added[i], times)
    return new


@entry
def append_all(
    tokens: Any,
    counts: Any,
    firsts: Any,
    rooms: Any,
    used: Any,
    positions: Any,
    columns: Any,
    added: Any,
    start: int,
) -> Any:
    """Count one output token per column, from entry ``start`` on.

    Stops before a column whose table would become too full; the number of entries done.
    """
    for i in range(start, columns.size):
        c = columns[i]
        room = rooms[c]
        if room:
            if (used[c] + 1) * 4 > room * 3:
                return i
            used[c] += _enter(tokens, counts, firsts[c], room, added[i], 1)
        positions[c] += 1
    return columns.size


@entry
def move_table(
    tokens: Any, counts: Any, first: int, room: int, target: int, target_room: int
) -> None:
    """Re-enter one table into a larger, empty one."""
    for at in range(first, first + room):
        if tokens[at] >= 0:
            _enter(tokens, counts, target, target_room, tokens[at], counts[at])
