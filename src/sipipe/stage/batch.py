"""The recurring microbatch of a slot (paper section 4.2, BatchMetadata).

A slot holds which sequences its microbatch has and where they are in the sequence cache. In a
steady state nothing of it changes from one visit to the next, and :meth:`SlotBatch.same` says so
with one comparison of lists.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from sipipe.stage.sequence_cache import SequenceCache


class SlotBatch:
    """Membership of slot ``slot``, resolved to rows of the sequence cache."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.req_ids: list[str] = []
        self.rows: NDArray[np.int64] = np.zeros(0, np.int64)
        """[B] row of each sequence in the cache, in batch order."""
        self.decoding = False
        """Invariant: True only if every row of the batch has ``cache.decoding``."""
        self.adapters: NDArray[np.int32] = np.zeros(0, np.int32)
        """[B] LoRA id of each sequence, 0 for none."""
        self.stale = True
        """A member was forgotten or resumed since the rows were resolved; they must be resolved
        again even if the names are the same, for a name can come back with another row."""
        self._members: frozenset[str] = frozenset()

    def same(self, req_ids: SequenceOf[str]) -> bool:
        """Whether the resolved rows serve a microbatch of exactly these sequences."""
        return not self.stale and self.req_ids == req_ids

    def touch(self, req_id: str) -> None:
        """``req_id`` was forgotten, replaced or resumed, in whatever slot."""
        if req_id in self._members:
            self.stale = True

    def resolve(self, req_ids: list[str], cache: SequenceCache) -> None:
        """Look up the rows of a changed membership; O(B), writes no sequence state."""
        index = cache.index
        self.rows = np.array([index[req_id] for req_id in req_ids], dtype=np.int64)
        self.req_ids = req_ids
        self._members = frozenset(req_ids)
        self.adapters = cache.adapters[self.rows]
        self.decoding = bool(cache.decoding[self.rows].all())
        self.stale = False
        cache.counters.batches_rebuilt += 1
