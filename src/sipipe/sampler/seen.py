"""The tokens each sequence has seen, with their counts: all the state that penalties need.

Sparse: per sequence a list of distinct tokens in the order of their first occurrence, their counts,
and a small open-addressing index of them, in shared arrays. A dense count per vocabulary entry (the
paper's buffers) takes V x B x 12 bytes and must be read whole every iteration; this takes 10 bytes a
place, 3/4 full at most, and is read as far as it is used. The order depends on nothing but prompt
and output, so a rebuilt column equals a kept one. Prompt tokens are entered only where a repetition
penalty needs them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sipipe.sampler.kernels.tables import append_all, enter_all, index_again

_SMALLEST = 64
_EMPTY = np.int32(-1)
_MARGIN = 256
"""Counts are read in whole blocks: room behind the last table."""


class SeenTables:
    """Tables of seen tokens for columns, in shared arrays that grow by doubling.

    A table's room (of its index) is a power of two, at least 64; its list has 3/4 as many entries,
    so that a table which begins at ``first`` in the index has its list at 3/4 of that. Freed tables
    are reused.
    """

    def __init__(self, columns: int) -> None:
        self.index: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.tokens: npt.NDArray[np.int32] = np.zeros(_MARGIN, np.int32)
        self.counts: npt.NDArray[np.int32] = np.zeros(_MARGIN, np.int32)
        self.first: npt.NDArray[np.int64] = np.zeros(columns, np.int64)
        self.room: npt.NDArray[np.int64] = np.zeros(columns, np.int64)
        self.start: npt.NDArray[np.int64] = np.zeros(columns, np.int64)
        self.used: npt.NDArray[np.int64] = np.zeros(columns, np.int64)
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._grow(_SMALLEST)

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.tokens.nbytes + self.counts.nbytes

    def grow_columns(self, columns: int) -> None:
        for name in ("first", "room", "start", "used"):
            old = getattr(self, name)
            new = np.zeros(columns, np.int64)
            new[: old.size] = old
            setattr(self, name, new)

    def open(
        self,
        column: int,
        prompt: npt.NDArray[np.int32] | None,
        output: npt.NDArray[np.int32],
    ) -> None:
        """Give ``column`` a table of its prompt (if it counts) and output tokens."""
        size = output.size + (0 if prompt is None else prompt.size)
        room = _SMALLEST
        # Few tokens of a long text are distinct: start small, and grow where that is not so.
        while room * 3 < (size + 1) * 4 if room < 2048 else room * 12 < size:
            room *= 2
        self._take(column, room)
        if prompt is not None:
            self._enter(column, prompt, 0)
        self._enter(column, output, 1)

    def close(self, column: int) -> None:
        """Free the table of ``column``, if it has one."""
        room = int(self.room[column])
        if room:
            self._give_back(int(self.first[column]), room)
            self.room[column] = 0
            self.used[column] = 0

    def append(
        self,
        positions: npt.NDArray[np.int64],
        columns: npt.NDArray[np.int64],
        added: npt.NDArray[np.int32],
    ) -> None:
        """Count one output token for each of ``columns`` and advance their ``positions``."""
        done = 0
        while True:
            done = append_all(
                self.index,
                self.tokens,
                self.counts,
                self.first,
                self.room,
                self.start,
                self.used,
                positions,
                columns,
                added,
                done,
            )
            if done >= columns.size:
                return
            self._enlarge(int(columns[done]))

    def contents(self, column: int) -> dict[int, int]:
        """{token: occurrences in the output} of a column, for tests and debugging."""
        start = int(self.start[column])
        part = slice(start, start + int(self.used[column]))
        return dict(zip(self.tokens[part].tolist(), self.counts[part].tolist(), strict=True))

    def _enter(self, column: int, added: npt.NDArray[np.int32], times: int) -> None:
        done = 0
        while True:
            first, room, start, used = self._place(column)
            done, self.used[column] = enter_all(
                self.index, self.tokens, self.counts, first, room, start, used, added, times, done
            )
            if done >= added.size:
                return
            self._enlarge(column)

    def _place(self, column: int) -> tuple[int, int, int, int]:
        arrays = (self.first, self.room, self.start, self.used)
        first, room, start, used = (int(array[column]) for array in arrays)
        return first, room, start, used

    def _take(self, column: int, room: int) -> None:
        free = self._free.get(room)
        if free:
            first = free.pop()
        else:
            first = self._end
            self._end += room
            if self._end > self.index.size:
                self._grow(max(self._end, 2 * self.index.size))
        self.first[column] = first
        self.room[column] = room
        self.start[column] = first * 3 // 4
        self.used[column] = 0

    def _give_back(self, first: int, room: int) -> None:
        self.index[first : first + room] = _EMPTY
        self._free.setdefault(room, []).append(first)

    def _grow(self, size: int) -> None:
        index = np.full(size, _EMPTY, np.int32)
        index[: self.index.size] = self.index
        self.index = index
        for name in ("tokens", "counts"):
            old = getattr(self, name)
            new = np.zeros(size * 3 // 4 + _MARGIN, np.int32)
            new[: old.size] = old
            setattr(self, name, new)

    def _enlarge(self, column: int) -> None:
        first, room, start, used = self._place(column)
        self._take(column, 2 * room)
        new = int(self.start[column])
        for entries in (self.tokens, self.counts):
            entries[new : new + used] = entries[start : start + used]
        self.used[column] = used
        index_again(self.index, self.tokens, int(self.first[column]), 2 * room, new, used)
        self._give_back(first, room)
