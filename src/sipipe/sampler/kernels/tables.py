"""Seen tokens with their counts, and an open-addressing index of them; see `sipipe.sampler.seen`."""

from typing import Any, NamedTuple

import numpy as np

from sipipe.jit import entry, kernel


class Tables(NamedTuple):
    """The tables of all requests. A table that begins at ``first`` in the index has its list from
    ``start`` on in ``tokens`` and ``counts``."""

    index: Any  # int32, by hash: entry of the list, or -1
    tokens: Any  # int32, distinct tokens in the order of their first occurrence
    counts: Any  # int32, their occurrences in the output; 0: in the prompt only
    first: Any  # int64 [requests]
    room: Any  # int64 [requests], index entries: a power of two; 0: no table
    start: Any  # int64 [requests]
    used: Any  # int64 [requests], distinct tokens


@kernel
def _find(tables: Any, request: Any, token: Any) -> Any:
    """Where ``token`` is in the index: at its entry, or at the free place it would take."""
    index, first = tables.index, tables.first[request]
    tokens, start = tables.tokens, tables.start[request]
    last = np.uint32(tables.room[request] - 1)
    probe = (np.uint32(token) * np.uint32(2654435769)) & last
    at = first + np.int64(probe)
    # bound: the index, a quarter of which is free
    while index[at] >= 0 and tokens[start + index[at]] != token:
        probe = (probe + np.uint32(1)) & last
        at = first + np.int64(probe)
    return at


@kernel
def find_seen(tables: Any, request: Any, token: Any) -> Any:
    """The entry of ``token`` in the list of ``request``, which has a table; -1 if there is none."""
    return np.int64(tables.index[_find(tables, request, token)])


@kernel
def _is_full(tables: Any, request: Any) -> Any:
    return tables.used[request] * 4 >= tables.room[request] * 3


@kernel
def _count(tables: Any, request: Any, token: Any, times: Any) -> None:
    """Add ``times`` to the count of ``token``, in a table that is not full."""
    at = _find(tables, request, token)
    start = tables.start[request]
    entry = np.int64(tables.index[at])
    if entry < 0:
        entry = tables.used[request]
        tables.used[request] = entry + 1
        tables.index[at] = entry
        tables.tokens[start + entry] = token
        tables.counts[start + entry] = 0
    tables.counts[start + entry] += times


@entry
def enter_all(tables: Tables, request: int, added: Any, times: int, done: int) -> int:
    """Count ``added[done:]`` in the table of ``request`` until it is full; entries done."""
    # bound: what is added
    while done < added.size and not _is_full(tables, request):
        _count(tables, request, added[done], times)
        done += 1
    return done


@entry
def append_all(tables: Tables, positions: Any, requests: Any, added: Any, done: int) -> int:
    """Count one output token for each of ``requests``, from entry ``done`` on. Stops before a
    request whose table is full; the number of entries done."""
    for i in range(done, requests.size):
        request = requests[i]
        if tables.room[request]:
            if _is_full(tables, request):
                return i
            _count(tables, request, added[i], 1)
        positions[request] += 1
    return int(requests.size)


@entry
def take_back(tables: Tables, request: int, token: int, used: int) -> None:
    """Undo the last count of ``token``, before which the table had ``used`` tokens."""
    at = _find(tables, request, token)
    tables.counts[tables.start[request] + tables.index[at]] -= 1
    if tables.used[request] > used:  # it came last, so no other token was placed behind it
        tables.index[at] = -1
        tables.used[request] = used


@entry
def index_again(tables: Tables, request: int) -> None:
    """Index the tokens of a table whose index is empty."""
    for i in range(tables.used[request]):
        tables.index[_find(tables, request, tables.tokens[tables.start[request] + i])] = i
