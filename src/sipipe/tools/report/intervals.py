"""Half-open intervals of integer nanoseconds, as sorted arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).min
"""A time before every other: for what is not known to have been waited for."""


class Union:
    """A set of instants: the union of intervals [start, end)."""

    __slots__ = ("ends", "starts")

    def __init__(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> None:
        """Merge intervals in any order; empty ones are dropped."""
        first = np.asarray(starts, np.int64)
        last = np.asarray(ends, np.int64)
        order = np.argsort(first, kind="stable")
        first, last = first[order], last[order]
        kept = last > first
        first, last = first[kept], np.maximum.accumulate(last[kept])
        if len(first):
            fresh = np.ones(len(first), bool)
            fresh[1:] = first[1:] > last[:-1]
            closing = np.append(np.flatnonzero(fresh)[1:] - 1, len(first) - 1)
            first, last = first[fresh], last[closing]
        self.starts: Array = first
        self.ends: Array = last

    def covers(self, times: Array) -> npt.NDArray[np.bool_]:
        """Whether each instant is in the set."""
        if not len(self.starts):
            return np.zeros(len(times), bool)
        index = np.searchsorted(self.starts, times, side="right") - 1
        return np.asarray((index >= 0) & (times < self.ends[np.maximum(index, 0)]))

    def total(self) -> int:
        """Its length in ns."""
        return int((self.ends - self.starts).sum())


class ByIteration:
    """One time per iteration, looked up for many iterations at once."""

    __slots__ = ("_iterations", "_times")

    def __init__(self, iterations: npt.ArrayLike, times: npt.ArrayLike) -> None:
        """Where an iteration has several times, the latest counts."""
        keys = np.asarray(iterations, np.int64)
        values = np.asarray(times, np.int64)
        order = np.lexsort((values, keys))
        keys, values = keys[order], values[order]
        last = np.ones(len(keys), bool)
        if len(keys):
            last[:-1] = keys[1:] != keys[:-1]
        self._iterations: Array = keys[last]
        self._times: Array = values[last]

    @classmethod
    def of(cls, records: npt.NDArray[Any], field: str) -> ByIteration:
        """The ``start_ns`` or ``end_ns`` of records."""
        return cls(records["iteration"], records[field])

    def __len__(self) -> int:
        return len(self._times)

    def at(self, iterations: Array, missing: int = NEVER) -> Array:
        """The time of each iteration; ``missing`` where there is none."""
        if not len(self._iterations):
            return np.full(len(iterations), missing, np.int64)
        index = np.minimum(np.searchsorted(self._iterations, iterations), len(self._iterations) - 1)
        found = self._iterations[index] == iterations
        return np.where(found, self._times[index], missing)

    @property
    def times(self) -> Array:
        """All times, by iteration."""
        return self._times

    @property
    def iterations(self) -> Array:
        """The iterations, ascending."""
        return self._iterations
