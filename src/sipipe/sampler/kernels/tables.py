"""Seen tokens with their counts, and an open-addressing index of them; see `sipipe.sampler.seen`."""

from __future__ import annotations

from typing import Any

import numpy as np

from sipipe.jit import entry, kernel


@kernel
def _find(index: Any, tokens: Any, first: Any, room: Any, start: Any, token: Any) -> Any:
    """Where ``token`` is in the index: at its entry, or at the free place it would take."""
    mask = np.uint32(room - 1)
    slot = (np.uint32(token) * np.uint32(2654435769)) & mask
    at = first + np.int64(slot)
    while index[at] >= 0 and tokens[start + index[at]] != token:
        slot = (slot + np.uint32(1)) & mask
        at = first + np.int64(slot)
    return at


@kernel
def _count(
    index: Any, tokens: Any, counts: Any, first: Any, room: Any, start: Any, used: Any,
    token: Any, times: Any,
) -> Any:  # fmt: skip
    """Add ``times`` to the count of ``token``; how many distinct ones there are then."""
    at = _find(index, tokens, first, room, start, token)
    entry = index[at]
    if entry >= 0:
        counts[start + entry] += times
        return used
    index[at] = used
    tokens[start + used] = token
    counts[start + used] = times
    return used + 1


@entry
def enter_all(
    index: Any, tokens: Any, counts: Any, first: int, room: int, start: int, used: int,
    added: Any, times: int, done: int,
) -> Any:  # fmt: skip
    """Enter ``added[done:]`` into one table until it is full; (entries done, distinct ones)."""
    while done < added.size and used * 4 < room * 3:
        used = _count(index, tokens, counts, first, room, start, used, added[done], times)
        done += 1
    return done, used


@entry
def append_all(
    index: Any,
    tokens: Any,
    counts: Any,
    firsts: Any,
    rooms: Any,
    starts: Any,
    used: Any,
    positions: Any,
    columns: Any,
    added: Any,
    done: int,
) -> Any:
    """Count one output token per column, from entry ``done`` on.

    Stops before a column whose table is full; the number of entries done.
    """
    for i in range(done, columns.size):
        c = columns[i]
        room = rooms[c]
        if room:
            if used[c] * 4 >= room * 3:
                return i
            used[c] = _count(
                index, tokens, counts, firsts[c], room, starts[c], used[c], added[i], 1
            )
        positions[c] += 1
    return columns.size


@entry
def index_again(index: Any, tokens: Any, first: int, room: int, start: int, used: int) -> None:
    """Index the first ``used`` tokens of a table whose index is empty."""
    for i in range(used):
        index[_find(index, tokens, first, room, start, tokens[start + i])] = i
