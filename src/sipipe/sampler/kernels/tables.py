"""The tokens each sequence has seen, with their counts: all the state that penalties need.

Per request a list of distinct tokens in the order of their first occurrence, their counts, and a
small open-addressing index of them, in shared arrays. A dense count (the paper's buffers) takes
V x B x 12 bytes and must be read whole every iteration; this takes 10 bytes a place, 3/4 full at
most. The order depends on nothing but prompt and output, so rebuilt state equals kept state. Prompt
tokens are entered only where a repetition penalty needs them.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
    index = tables.index
    first = tables.first[request]
    tokens = tables.tokens
    start = tables.start[request]
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


_SMALLEST = 64
EMPTY = -1
"""An index entry that names no token."""
_MARGIN = 256
"""Counts are read in whole blocks: room behind the last table."""


def grown(old: npt.NDArray[Any], size: int, fill: int = 0) -> npt.NDArray[Any]:
    """A longer copy of ``old``."""
    new = np.full(size, fill, old.dtype)
    new[: old.size] = old
    return new


class SeenTables:
    """Tables of seen tokens, in shared arrays that grow by doubling. A table's room (of its index) is
    a power of two, at least 64; its list has 3/4 as many entries, and begins at 3/4 of ``first``."""

    def __init__(self, requests: int) -> None:
        arrays = [np.zeros(0, np.int32)]
        arrays += [np.zeros(_MARGIN, np.int32) for _ in range(2)]
        arrays += [np.zeros(requests, np.int64) for _ in range(4)]
        self.tables = Tables._make(arrays)
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._grow(_SMALLEST)

    def grow_requests(self, requests: int) -> None:
        """Make room for tables of so many requests."""
        per_request = [grown(array, requests) for array in self.tables[3:]]
        self.tables = Tables._make([*self.tables[:3], *per_request])

    def add(
        self, request: int, prompt: npt.NDArray[np.int32] | None, output: npt.NDArray[np.int32]
    ) -> None:
        """Give ``request`` a table of its prompt (if it counts) and output tokens."""
        size = output.size + (0 if prompt is None else prompt.size)
        room = _SMALLEST
        # Few tokens of a long text are distinct: start small, and grow where that is not so.
        while room * 3 < (size + 1) * 4 if room < 2048 else room * 12 < size:
            room *= 2
        self._take(request, room)
        if prompt is not None:
            self._enter(request, prompt, 0)
        self._enter(request, output, 1)

    def remove(self, request: int) -> None:
        """Free the table of ``request``, if it has one."""
        if self.tables.room[request]:
            self._free_index(int(self.tables.first[request]), int(self.tables.room[request]))
            self.tables.room[request] = self.tables.used[request] = 0

    def append(
        self,
        positions: npt.NDArray[np.int64],
        requests: npt.NDArray[np.int64],
        added: npt.NDArray[np.int32],
    ) -> None:
        """Count one output token for each of ``requests`` and advance their ``positions``."""
        done = 0
        while (done := append_all(self.tables, positions, requests, added, done)) < requests.size:
            self._enlarge(int(requests[done]))

    def take_back(
        self, positions: npt.NDArray[np.int64], request: int, token: int, used: int
    ) -> None:
        """Undo the last :meth:`append` of ``request``, before which its table had ``used`` tokens."""
        positions[request] -= 1
        if self.tables.room[request]:
            take_back(self.tables, request, token, used)

    def _enter(self, request: int, added: npt.NDArray[np.int32], times: int) -> None:
        done = 0
        while (done := enter_all(self.tables, request, added, times, done)) < added.size:
            self._enlarge(request)

    def _take(self, request: int, room: int) -> None:
        if free := self._free.get(room):
            first = free.pop()
        else:
            first = self._end
            self._end = self._end + room
            if self._end > self.tables.index.size:
                self._grow(max(self._end, 2 * self.tables.index.size))
        self.tables.first[request] = first
        self.tables.room[request] = room
        self.tables.start[request] = first * 3 // 4
        self.tables.used[request] = 0

    def _free_index(self, first: int, room: int) -> None:
        self.tables.index[first : first + room] = EMPTY
        self._free.setdefault(room, []).append(first)

    def _grow(self, size: int) -> None:
        self.tables = self.tables._replace(
            index=grown(self.tables.index, size, EMPTY),
            tokens=grown(self.tables.tokens, size * 3 // 4 + _MARGIN),
            counts=grown(self.tables.counts, size * 3 // 4 + _MARGIN),
        )

    def _enlarge(self, request: int) -> None:
        first, room, start, used = (int(array[request]) for array in self.tables[3:])
        self._take(request, 2 * room)
        new = int(self.tables.start[request])
        for entries in (self.tables.tokens, self.tables.counts):
            entries[new : new + used] = entries[start : start + used]
        self.tables.used[request] = used
        index_again(self.tables, request)
        self._free_index(first, room)
