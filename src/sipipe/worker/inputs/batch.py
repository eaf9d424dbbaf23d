"""The recurring microbatch of a slot (paper section 4.2, BatchMetadata).

A slot holds which sequences its microbatch has and where they are in the sequence cache. In a
steady state nothing of it changes from one visit to the next, and :meth:`SlotBatch.same` says so
with one comparison of lists.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from sipipe.worker.inputs.request_state import SequenceCache


class SlotBatch:
    """Membership of slot ``slot``, resolved to rows of the sequence cache."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.req_ids: list[str] = []
        self.rows: NDArray[np.int64] = np.zeros(0, np.int64)
        """[B] row of each sequence in the cache, in batch order."""
        self.decoding = False
        """Invariant: True only if every row of the batch has ``cache.decoding``."""
        self._members: frozenset[int] | None = frozenset()
        """The rows as a set; None: to be made when they are asked for."""
        self._stale = True
        """A row of the batch was freed, given away or resumed since it was resolved; it must be
        resolved again even if the names are the same, for a name can come back with another row."""

    def same(self, req_ids: SequenceOf[str]) -> bool:
        """Whether the resolved rows serve a microbatch of exactly these sequences."""
        return not self._stale and self.req_ids == req_ids

    def touch(self, rows: SequenceOf[int]) -> None:
        """The sequences of ``rows`` were forgotten, introduced or resumed, in whatever slot."""
        if self._stale:
            return
        if self._members is None:
            self._members = frozenset(self.rows.tolist())
        self._stale = not self._members.isdisjoint(rows)

    def resolve(self, req_ids: list[str], rows: SequenceOf[int], cache: SequenceCache) -> None:
        """Take a changed membership and its rows; O(B), writes no sequence state."""
        self.req_ids = req_ids
        self.rows = np.array(rows, np.int64)
        self._members = None
        self._stale = False
        cache.counters.batches_rebuilt += 1
