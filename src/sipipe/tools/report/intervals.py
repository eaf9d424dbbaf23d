"""Intervals of integer nanoseconds, and times by iteration, as sorted arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).min
"""A time before every other: for what is not known to have been waited for."""


class Intervals:
    """Half-open intervals [start, end); they may overlap or be empty. Both arrays are sorted on
    their own: an instant is in as many intervals as have started less those that have ended."""

    __slots__ = ("ends", "starts")

    def __init__(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> None:
        """No interval may end before it starts."""
        self.starts: Array = np.sort(np.asarray(starts, np.int64))
        self.ends: Array = np.sort(np.asarray(ends, np.int64))

    @classmethod
    def of(cls, records: npt.NDArray[Any]) -> Intervals:
        return cls(records["start_ns"], records["end_ns"])

    def count(self, times: Array) -> Array:
        """How many intervals hold each instant."""
        begun = np.searchsorted(self.starts, times, side="right")
        return np.asarray(begun - np.searchsorted(self.ends, times, side="right"), np.int64)

    def covers(self, times: Array) -> npt.NDArray[np.bool_]:
        """Whether any interval holds each instant."""
        return self.count(times) > 0

    def merged(self) -> tuple[Array, Array]:
        """Starts and ends of the union, which are disjoint and do not touch."""
        edges = np.unique(np.concatenate([self.starts, self.ends]))
        change = np.diff(self.covers(edges), prepend=np.False_)
        # The union is left at the last edge, so changes come in pairs: in, out.
        return edges[change][::2], edges[change][1::2]


class ByIteration:
    """One value per iteration, looked up for many iterations at once."""

    __slots__ = ("iterations", "values")

    def __init__(self, iterations: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Where an iteration has several values, the largest counts: of times, the latest."""
        keys = np.asarray(iterations, np.int64)
        found = np.asarray(values, np.int64)
        order = np.lexsort((found, keys))
        keys, found = keys[order], found[order]
        last = np.diff(keys, append=-1) != 0
        self.iterations: Array = keys[last]
        """Ascending."""
        self.values: Array = found[last]

    @classmethod
    def of(cls, records: npt.NDArray[Any], field: str) -> ByIteration:
        return cls(records["iteration"], records[field])

    def at(self, iterations: Array, missing: int = NEVER) -> Array:
        """The value of each iteration; ``missing`` where there is none."""
        if not len(self.iterations):
            return np.full(len(iterations), missing, np.int64)
        index = np.minimum(np.searchsorted(self.iterations, iterations), len(self.iterations) - 1)
        found = self.iterations[index] == iterations
        return np.where(found, self.values[index], missing)
