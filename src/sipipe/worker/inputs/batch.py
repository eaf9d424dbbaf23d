"""The recurring microbatch of a slot, and the order of its rows (paper section 4.2, BatchMetadata).

In a steady state nothing of it changes from one visit to the next, and :meth:`SlotBatch.same` says
so with one comparison of lists.

Rows are in the order of vLLM's second runner (``sort_batch_req_ids``): requests with one token
first, then by their number of tokens, otherwise as in ``SchedulerOutput.num_scheduled_tokens``.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from sipipe.worker.inputs.kernels import Int32, Int64


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
        """A row of the batch was freed or given away since it was resolved; it must be
        resolved again even if the names are the same, for a name can come back with another row."""

    def same(self, req_ids: Sequence[str]) -> bool:
        """Whether the resolved rows serve a microbatch of exactly these requests."""
        return not self._stale and self.req_ids == req_ids

    def touch(self, rows: Sequence[int]) -> None:
        """The requests of ``rows`` were removed or added, in whatever slot."""
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


def batch_order(scheduled: Int32) -> Int64 | None:
    """[B] which request, in scheduling order, is in each row of the batch; None: it is so already.

    A microbatch that only decodes never changes its order.

    Args:
        scheduled: [B], tokens of each request in this iteration, in scheduling order.
    """
    if (scheduled[1:] >= scheduled[:-1]).all():
        return None
    return np.argsort(scheduled, kind="stable")
