"""The tokens each sequence has seen, with their counts: all the state that penalties need.

Sparse: per sequence a small open-addressing table of distinct tokens, all in two shared arrays. A
dense count per vocabulary entry (the paper's buffers) takes V x B x 12 bytes and must be read whole
every iteration; this takes 8 bytes a slot, 3/4 full at most, and is read as far as it is used.
Prompt tokens are entered only where a repetition penalty needs them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sipipe.sampling.kernels.tables import append_all, enter_all, move_table

_SMALLEST = 64
_EMPTY = np.int32(-1)


class SeenTables:
    """Tables of seen tokens for columns, in shared arrays that grow by doubling.

    A table's room is a power of two, at least 64, at most 3/4 used. Freed tables are reused.
    """

    def __init__(self, columns: int) -> None:
        self.tokens: npt.NDArray[np.int32] = np.full(_SMALLEST, _EMPTY, np.int32)
        self.counts: npt.NDArray[np.int32] = np.zeros(_SMALLEST, np.int32)
        self.first: npt.NDArray[np.int64] = np.zeros(columns, np.int64)
        self.room: npt.NDArray[np.int64] = np.zeros(columns, np.int64)
        self.used: npt.NDArray[np.int64] = np.zeros(columns, np.int64)
        self._end = 0
        self._free: dict[int, list[int]] = {}

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.counts.nbytes

    def grow_columns(self, columns: int) -> None:
        for name in ("first", "room", "used"):
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
            self._enter_many(column, prompt, 0)
        self._enter_many(column, output, 1)

    def close(self, column: int) -> None:
        """Free the table of ``column``, if it has one."""
        room = int(self.room[column])
        if room:
            first = int(self.first[column])
            self.tokens[first : first + room] = _EMPTY
            self._free.setdefault(room, []).append(first)
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
                self.tokens,
                self.counts,
                self.first,
                self.room,
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
        first, room = int(self.first[column]), int(self.room[column])
        tokens, counts = self.tokens[first : first + room], self.counts[first : first + room]
        kept = tokens >= 0
        return dict(zip(tokens[kept].tolist(), counts[kept].tolist(), strict=True))

    def _enter_many(self, column: int, added: npt.NDArray[np.int32], times: int) -> None:
        step = 16
        at = 0
        while at < added.size:
            part = added[at : at + step]
            while (int(self.used[column]) + part.size) * 4 > int(self.room[column]) * 3:
                free = int(self.room[column]) * 3 // 4 - int(self.used[column])
                if free > 0:
                    part = part[:free]
                    break
                self._enlarge(column)
            self.used[column] += enter_all(
                self.tokens,
                self.counts,
                int(self.first[column]),
                int(self.room[column]),
                part,
                times,
            )
            at += part.size
            step = max(16, int(self.room[column]) * 3 // 4 - int(self.used[column]))

    def _take(self, column: int, room: int) -> None:
        free = self._free.get(room)
        if free:
            first = free.pop()
        else:
            first = self._end
            self._end += room
            if self._end > self.tokens.size:
                size = max(self._end, 2 * self.tokens.size)
                tokens = np.full(size, _EMPTY, np.int32)
                tokens[: self.tokens.size] = self.tokens
                counts = np.zeros(size, np.int32)
                counts[: self.counts.size] = self.counts
                self.tokens, self.counts = tokens, counts
        self.first[column] = first
        self.room[column] = room
        self.used[column] = 0

    def _enlarge(self, column: int) -> None:
        first, room, used = (int(a[column]) for a in (self.first, self.room, self.used))
        self._take(column, 2 * room)
        self.used[column] = used
        move_table(self.tokens, self.counts, first, room, int(self.first[column]), 2 * room)
        self.tokens[first : first + room] = _EMPTY
        self._free.setdefault(room, []).append(first)
