"""The recurring microbatch of a slot, and the order of its rows (paper section 4.2, BatchMetadata).

A slot holds which requests its microbatch has and where their states are. In a steady state
nothing of it changes from one visit to the next, and :meth:`SlotBatch.same` says so with one
comparison of lists.

Rows are in the order of ``SchedulerOutput.num_scheduled_tokens``, or in the one that an attention
backend wants. Both orders are permutations, [B] int64: place in the old order of each new row.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class SlotBatch:
    """Which requests a slot's microbatch has, resolved to rows of :class:`RequestStates`."""

    def __init__(self) -> None:
        self.req_ids: list[str] = []
        self.rows: Int64 = np.zeros(0, np.int64)
        """[B] row of each request's state, in batch order."""
        self.decoding = False
        """Invariant: True only if ``RequestStates.decoding`` holds for every row of the batch."""
        self._members: frozenset[int] | None = frozenset()
        """The rows as a set; None: to be made when they are asked for."""
        self._stale = True
        """A row of the batch was freed, given away or resumed since it was resolved; it must be
        resolved again even if the names are the same, for a name can come back with another row."""

    def same(self, req_ids: Sequence[str]) -> bool:
        """Whether the resolved rows serve a microbatch of exactly these requests."""
        return not self._stale and self.req_ids == req_ids

    def touch(self, rows: Sequence[int]) -> None:
        """The requests of ``rows`` were removed, added or resumed, in whatever slot."""
        if self._stale:
            return
        if self._members is None:
            self._members = frozenset(self.rows.tolist())
        self._stale = not self._members.isdisjoint(rows)

    def resolve(self, req_ids: list[str], rows: Sequence[int]) -> None:
        """Take a changed membership and its rows; O(B), writes no request's state."""
        self.req_ids = req_ids
        self.rows = np.array(rows, np.int64)
        self._members = None
        self._stale = False


def scheduling_order(req_ids: Sequence[str], scheduled: Iterable[str]) -> Int64:
    """[B] where in ``req_ids`` each request of ``scheduled`` stands (both have the same ones)."""
    place = {req_id: index for index, req_id in enumerate(req_ids)}
    return np.array([place[req_id] for req_id in scheduled], np.int64)


def decodes_first(
    num_computed_tokens: Int32, num_scheduled_tokens: Int32, prompt_lens: Int32, threshold: int
) -> Int64 | None:
    """The permutation that backends with a decode kernel want, or None if it is so already.

    Decodes, then short continued prompts, then long ones, then fresh prompts; otherwise the
    given order, so that a microbatch which only decodes never changes its own.

    Args:
        num_computed_tokens: [B], before this iteration.
        num_scheduled_tokens: [B], in this iteration.
        prompt_lens: [B].
        threshold: the most tokens of a query that the decode kernel takes.
    """
    long = num_scheduled_tokens > threshold
    in_prompt = num_computed_tokens < prompt_lens
    region = np.where(num_computed_tokens == 0, 3, np.where(long, 2, np.where(in_prompt, 1, 0)))
    if (np.diff(region) >= 0).all():
        return None
    return np.argsort(region, kind="stable")
