"""State of requests and slots that a stage keeps between iterations (paper section 4.2).

:class:`RequestStates` is the paper's SequenceCache, :class:`SlotBatch` its BatchMetadata.

A request has one row from its first iteration until it finishes or is preempted. It is the row that
vLLM's second runner gives it, because both free and give rows in the same order. That matters since
LoRA, M-RoPE, prompt log-probabilities and recurrent states stay vLLM's, by row.

A batch is a list of row numbers. So a request that sits out an iteration, or changes its place, costs
nothing: only new requests, new blocks and removed requests write here. In a steady state nothing of a
slot's recurring microbatch changes, and :meth:`SlotBatch.same` says so with one comparison of lists.

Rows of a batch are in the order of vLLM's second runner (``sort_batch_req_ids``): requests with one
token first, then by their number of tokens, otherwise as in ``SchedulerOutput.num_scheduled_tokens``.
Where that runner verifies drafts on the last stage, requests with drafts come before.

Who runs here: the preparing thread, alone. The device reads :mod:`sipipe.worker.inputs.buffers`.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sipipe.worker.inputs.kernels import Int32, Int64

BlockIds = Sequence[Sequence[int]]
"""Block ids of one request, per KV cache group."""


class RequestStates:
    """Rows of per-request state, with a block table for each KV cache group.

    Args:
        free: the free rows of vLLM's runner, which has no request now, in its order. The last one is
            given first.
        widths: blocks that a request can have at most, by KV cache group.
    """

    def __init__(self, free: Sequence[int], widths: Sequence[int]) -> None:
        rows = len(free)
        self.index: dict[str, int] = {}
        """Rows by request."""
        self.blocks: list[NDArray[np.int32]] = [
            np.zeros((rows, max(1, width)), np.int32) for width in widths
        ]
        """Block ids [rows, width] of each group, of which the first ``block_counts[g][row]`` are
        valid."""
        self.block_counts: list[NDArray[np.int32]] = [np.zeros(rows, np.int32) for _ in widths]
        self.prefill_lens: NDArray[np.int32] = np.zeros(rows, np.int32)
        """Tokens of each request when it was added: its prompt, and what a preempted one had drawn.
        An iteration that ends there, or behind it, samples."""
        self.decoding: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        """True if the request's last iteration ended with a sampled token. Invariant: while it holds,
        each further iteration of one token samples."""
        self.prefills: list[Sequence[int]] = [()] * rows
        """Tokens that ``prefill_lens`` counts, by row."""
        self._free = list(free)

    def add(self, req_id: str, prefill: Sequence[int]) -> int:
        """Give a new request a row without blocks; returns the row. ``prefill`` are its token ids, which
        are stored as they are. A request of that name that is still known is replaced, in its row."""
        row = self.index.get(req_id)
        if row is None:
            # There is a free one: vLLM's scheduler runs ``max_num_seqs`` requests at most, and
            # sessions between their turns give theirs up before that many run (``SessionMemory``).
            row = self._free.pop()
            self.index[req_id] = row
        self.prefills[row] = prefill
        self.prefill_lens[row] = len(prefill)
        self.decoding[row] = False
        for counts in self.block_counts:
            counts[row] = 0
        return row

    def append_blocks(self, rows: Sequence[int], blocks: Sequence[BlockIds]) -> None:
        """Add newly allocated blocks behind those that the requests of ``rows`` have."""
        for group, (table, counts) in enumerate(zip(self.blocks, self.block_counts, strict=True)):
            for row, blocks_by_group in zip(rows, blocks, strict=True):
                ids = blocks_by_group[group]
                first = int(counts[row])
                last = first + len(ids)
                # A row is as wide as ``max_model_len``, beyond which the engine schedules nothing
                # (:meth:`.prepare.InputPreparer._write_layout` names the checks).
                assert last <= table.shape[1], f"{last} blocks for a row of {table.shape[1]}"
                table[row, first:last] = ids
                counts[row] = last

    def remove(self, req_ids: Iterable[str]) -> list[int]:
        """Forget requests in the order of their names, as vLLM does; returns the rows of those that were
        known."""
        known = [req_id for req_id in sorted(req_ids) if req_id in self.index]
        rows = [self.index.pop(req_id) for req_id in known]
        for row in rows:
            self.prefills[row] = ()
        self._free += rows
        return rows


class SlotBatch:
    """Requests of a slot's microbatch, resolved to rows of :class:`RequestStates`."""

    def __init__(self) -> None:
        self.req_ids: list[str] = []
        """Names of the requests, [B], in batch order."""
        self.rows: Int64 = np.zeros(0, np.int64)
        """Rows of the requests' states, [B], in batch order."""
        self.decoding = False
        """Invariant: True only if ``RequestStates.decoding`` holds for every row of the batch."""
        self._members: frozenset[int] | None = frozenset()
        """Rows as a set; None until somebody needs it."""
        self._stale = True
        """True if a row of the batch was freed or given away since it was resolved. It must be resolved
        again even if the names are the same, for a name can come back with another row."""

    def same(self, req_ids: Sequence[str]) -> bool:
        """True if the resolved rows serve a microbatch of exactly these requests."""
        return not self._stale and self.req_ids == req_ids

    def touch(self, rows: Sequence[int]) -> None:
        """Take note that the requests of ``rows`` were removed or added, in whatever slot."""
        if self._stale:
            return
        if self._members is None:
            self._members = frozenset(self.rows.tolist())
        self._stale = not self._members.isdisjoint(rows)

    def resolve(self, req_ids: list[str], rows: Sequence[int]) -> None:
        """Take changed requests and their rows. It takes O(B), and writes no request's state."""
        self.req_ids = req_ids
        self.rows = np.array(rows, np.int64)
        self._members = None
        self._stale = False


def scheduling_order(req_ids: Sequence[str], scheduled: Iterable[str]) -> Int64:
    """Index in ``req_ids`` of each request of ``scheduled``, [B]. Both have the same requests."""
    index = {req_id: position for position, req_id in enumerate(req_ids)}
    return np.array([index[req_id] for req_id in scheduled], np.int64)


def batch_order(scheduled: Int32, drafts: Int32, decode_tokens: int = 1) -> Int64 | None:
    """Index in scheduling order of the request in each row of the batch, [B]. None if the two orders are
    the same.

    A microbatch that only decodes never changes its order.

    Args:
        scheduled: [B], tokens of each request in this iteration, in scheduling order.
        drafts: [B], those of them that are drafts.
        decode_tokens: tokens of a request with all its drafts, where vLLM's runner knows of drafts on the
            last stage; else 1. That runner has requests with drafts first, with all of them before all.
    """
    if decode_tokens > 1:
        order: Int64 = np.lexsort((scheduled, scheduled != decode_tokens, drafts == 0))
        return None if (order[1:] > order[:-1]).all() else order
    if (scheduled[1:] >= scheduled[:-1]).all():
        return None
    return np.argsort(scheduled, kind="stable")
