"""What a stage remembers of each request between iterations (paper section 4.2, SequenceCache).

A request has one row from its first iteration until it finishes, whatever slot it is in and
whether or not it takes part in the current iteration. A batch is a list of row numbers, so that a
request which sits out an iteration, or changes its place in the batch, costs nothing: only new
requests, resumed ones, new blocks and finished requests write here, all those of an iteration
together. (vLLM's first runner keeps the state in batch order instead, and so removes and adds
every request of a microbatch when microbatches alternate.)

Who runs here: the preparing thread, alone. The device never reads these arrays, it reads the
copies in :mod:`sipipe.worker.inputs.buffers`.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sipipe.worker.inputs import kernels

D = TypeVar("D", bound=np.generic)
BlockIds = Sequence[Sequence[int]]
"""Block ids of one request, per KV cache group."""


class RequestStates:
    """Rows of per-request state, with a block table for each KV cache group.

    Args:
        rows: rows to start with; doubled whenever they run out (preempted requests keep theirs,
            so there is no fixed bound).
        widths: for each KV cache group, the most blocks that a request can have.
    """

    def __init__(self, rows: int, widths: Sequence[int]) -> None:
        rows = max(1, rows)
        self.index: dict[str, int] = {}
        """Row of each known request."""
        self.blocks: list[NDArray[np.int32]] = [
            np.zeros((rows, max(1, width)), np.int32) for width in widths
        ]
        """Per group, [rows, width] block ids; the first ``block_counts[g][row]`` are valid."""
        self.block_counts: list[NDArray[np.int32]] = [np.zeros(rows, np.int32) for _ in widths]
        self.prompt_lens: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.adapters: NDArray[np.int32] = np.zeros(rows, np.int32)
        """LoRA id of each request, 0 for none."""
        self.decoding: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        """Whether the request's last iteration ended with a sampled token. Invariant: while it
        holds, and until the request is resumed, each further iteration of one token samples."""
        self.prompts: list[Sequence[int]] = [()] * rows
        self._free = list(range(rows - 1, -1, -1))

    def add(self, req_id: str, prompt: Sequence[int], *, adapter: int = 0) -> int:
        """Give a new request a row, without blocks; ``prompt`` are its token ids, kept as they are.

        A request of that name which is still known is replaced, in its row. Returns the row.
        """
        row = self.index.get(req_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._free.pop()
            self.index[req_id] = row
        self.prompts[row] = prompt
        self.prompt_lens[row] = len(prompt)
        self.adapters[row] = adapter
        self.resume(row)
        return row

    def resume(self, row: int) -> None:
        """Drop all blocks of a request that was preempted; it is computed anew."""
        for counts in self.block_counts:
            counts[row] = 0
        self.decoding[row] = False

    def append_blocks(self, rows: Sequence[int], blocks: Sequence[BlockIds]) -> None:
        """Add newly allocated blocks behind those that the requests of ``rows`` have.

        Raises:
            ValueError: more blocks than a row holds.
        """
        where = np.array(rows, np.int64)
        for group, (table, counts) in enumerate(zip(self.blocks, self.block_counts, strict=True)):
            lists = [of_request[group] for of_request in blocks]
            lengths = np.array([len(ids) for ids in lists], np.int32)
            ids = np.fromiter(chain.from_iterable(lists), np.int32)
            change = kernels.append_blocks(where, lengths, ids, blocks=table, block_counts=counts)
            if change >= 0:
                row = rows[change]
                raise ValueError(
                    f"a request was given {int(counts[row]) + len(lists[change])} blocks, "
                    f"its row holds {table.shape[1]}"
                )

    def remove(self, req_ids: Iterable[str]) -> list[int]:
        """Forget requests; returns the rows of those that were known."""
        rows = [row for req_id in req_ids if (row := self.index.pop(req_id, None)) is not None]
        for row in rows:
            self.prompts[row] = ()
        self._free += rows
        return rows

    def _grow(self) -> None:
        """Twice as many rows; the arrays are replaced, so nobody else may keep them."""
        old = len(self.prompts)
        self.blocks = [_doubled(table) for table in self.blocks]
        self.block_counts = [_doubled(counts) for counts in self.block_counts]
        self.prompt_lens = _doubled(self.prompt_lens)
        self.adapters = _doubled(self.adapters)
        self.decoding = _doubled(self.decoding)
        self.prompts.extend([()] * old)
        self._free.extend(range(2 * old - 1, old - 1, -1))


def _doubled(array: NDArray[D]) -> NDArray[D]:
    return np.concatenate((array, np.zeros_like(array)))
