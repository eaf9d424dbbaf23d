"""What a stage remembers of each request and of each slot between iterations (paper section 4.2,
SequenceCache and BatchMetadata).

A request has one row from its first iteration until it finishes or is preempted. It is the row that
vLLM's second runner gives it, because both free and give rows in the same order: LoRA, M-RoPE, prompt
log-probabilities and recurrent states stay vLLM's, and are kept by row. A batch is a list of row
numbers, so that a request which sits out an iteration, or changes its place, costs nothing: only new
requests, new blocks and removed requests write here. In a steady state nothing of a slot's recurring
microbatch changes either, and :meth:`SlotBatch.same` says so with one comparison of lists.

Rows of a batch are in the order of vLLM's second runner (``sort_batch_req_ids``): requests with one
token first, then by their number of tokens, otherwise as in ``SchedulerOutput.num_scheduled_tokens``.

Who runs here: the preparing thread, alone. The device reads :mod:`sipipe.worker.inputs.buffers`.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sipipe.worker.inputs.kernels import Int32, Int64

BlockIds = Sequence[Sequence[int]]
"""Block ids of one request, per KV cache group."""


class RequestStates:
    """Rows of per-request state, with a block table for each KV cache group. ``free``: rows of
    vLLM's runner, which has no request now, in its order: the last one is given first. ``widths``:
    for each KV cache group, the most blocks that a request can have."""

    def __init__(self, free: Sequence[int], widths: Sequence[int]) -> None:
        rows = len(free)
        self.index: dict[str, int] = {}
        self.blocks: list[NDArray[np.int32]] = [
            np.zeros((rows, max(1, width)), np.int32) for width in widths
        ]
        """Per group, [rows, width] block ids; the first ``block_counts[g][row]`` are valid."""
        self.block_counts: list[NDArray[np.int32]] = [np.zeros(rows, np.int32) for _ in widths]
        self.prefill_lens: NDArray[np.int32] = np.zeros(rows, np.int32)
        """Tokens of each request when it was added: its prompt, and what a preempted one had drawn.
        An iteration that ends there, or behind it, samples."""
        self.decoding: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        """Whether the request's last iteration ended with a sampled token. Invariant: while it
        holds, each further iteration of one token samples."""
        self.prefills: list[Sequence[int]] = [()] * rows
        """The tokens that ``prefill_lens`` counts."""
        self._free = list(free)

    def add(self, req_id: str, prefill: Sequence[int]) -> int:
        """Give a new request a row, without blocks; ``prefill`` are its token ids, kept as they are. A
        request of that name which is still known is replaced, in its row. Returns the row."""
        if (row := self.index.get(req_id)) is None:
            # There is a free one: vLLM's scheduler runs ``max_num_seqs`` requests at most, and
            # sessions between their turns give theirs up before that many run (``SessionMemory``).
            row = self.index[req_id] = self._free.pop()
        self.prefills[row] = prefill
        self.prefill_lens[row] = len(prefill)
        self.decoding[row] = False
        for counts in self.block_counts:
            counts[row] = 0
        return row

    def append_blocks(self, rows: Sequence[int], blocks: Sequence[BlockIds]) -> None:
        """Add newly allocated blocks behind those that the requests of ``rows`` have."""
        for group, (table, counts) in enumerate(zip(self.blocks, self.block_counts, strict=True)):
            for row, of_request in zip(rows, blocks, strict=True):
                ids = of_request[group]
                first = int(counts[row])
                last = first + len(ids)
                # A row is as wide as ``max_model_len``, beyond which the engine schedules nothing
                # (:meth:`.prepare.InputPreparer._write_layout` names the checks).
                assert last <= table.shape[1], f"{last} blocks for a row of {table.shape[1]}"
                table[row, first:last] = ids
                counts[row] = last

    def remove(self, req_ids: Iterable[str]) -> list[int]:
        """Forget requests, in the order of their names, as vLLM does; the rows of those known."""
        known = [req_id for req_id in sorted(req_ids) if req_id in self.index]
        rows = [self.index.pop(req_id) for req_id in known]
        for row in rows:
            self.prefills[row] = ()
        self._free += rows
        return rows


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
