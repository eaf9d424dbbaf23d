"""What a stage remembers of each sequence between iterations (paper section 4.2, SequenceCache).

A sequence has one row from its first iteration until it finishes, whatever slot it is in and
whether or not it takes part in the current iteration. A batch is a list of row numbers, so that a
sequence which sits out an iteration, or changes its place in the batch, costs nothing: only new
sequences, resumed ones, new blocks and finished sequences write here. (vLLM's first runner keeps
the state in batch order instead, and so removes and re-adds every sequence of a microbatch when
microbatches alternate.)

Who runs here: the CPU executor's thread, alone. The device never reads these arrays, it reads the
versioned copies of :mod:`sipipe.stage.buffers`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Counters:
    """How often the cached state of a sequence was written as a whole, or dropped."""

    inserted: int = 0
    """Sequences seen for the first time."""
    resumed: int = 0
    """Sequences that came back from preemption with new blocks."""
    removed: int = 0
    """Sequences that finished or were aborted."""
    blocks_appended: int = 0
    """Sequences that received further blocks."""
    batches_rebuilt: int = 0
    """Times that a slot's list of rows was made anew, since its membership changed."""


class SequenceCache:
    """Rows of per-sequence state, with a block table for each KV cache group.

    Args:
        rows: rows to start with; doubled whenever they run out (preempted sequences keep theirs,
            so there is no fixed bound).
        widths: for each KV cache group, the most blocks that a sequence can have.
    """

    def __init__(self, rows: int, widths: SequenceOf[int]) -> None:
        rows = max(1, rows)
        self.index: dict[str, int] = {}
        """Row of each known sequence."""
        self.blocks: list[NDArray[np.int32]] = [
            np.zeros((rows, max(1, width)), np.int32) for width in widths
        ]
        """Per group, [rows, width] block ids; the first ``counts[g][row]`` are valid."""
        self.counts: list[NDArray[np.int32]] = [np.zeros(rows, np.int32) for _ in widths]
        self.prompt_lens: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.adapters: NDArray[np.int32] = np.zeros(rows, np.int32)
        """LoRA id of each sequence, 0 for none."""
        self.decoding: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        """Whether the sequence's last iteration ended with a sampled token. Invariant: while it
        holds, and until the sequence is resumed, each further iteration of one token samples."""
        self.prompts: list[NDArray[np.int32] | None] = [None] * rows
        self.counters = Counters()
        self._free = list(range(rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self.index

    def insert(
        self,
        req_id: str,
        prompt: SequenceOf[int],
        blocks: SequenceOf[SequenceOf[int]],
        *,
        adapter: int = 0,
    ) -> int:
        """Give a new sequence a row; ``prompt`` are its token ids. Returns the row.

        A sequence of that name which is still known is replaced, in its row.
        """
        row = self.index.get(req_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._free.pop()
            self.index[req_id] = row
        self.prompts[row] = np.asarray(prompt, dtype=np.int32)
        self.prompt_lens[row] = len(prompt)
        self.adapters[row] = adapter
        self.decoding[row] = False
        self._set_blocks(row, blocks)
        self.counters.inserted += 1
        return row

    def resume(self, row: int, blocks: SequenceOf[SequenceOf[int]]) -> None:
        """Replace all blocks of a sequence that was preempted."""
        self._set_blocks(row, blocks)
        self.decoding[row] = False
        self.counters.resumed += 1

    def append_blocks(self, row: int, blocks: SequenceOf[SequenceOf[int]]) -> None:
        """Add newly allocated blocks, per group, behind those the sequence has."""
        for table, counts, ids in zip(self.blocks, self.counts, blocks, strict=True):
            if ids:
                start = int(counts[row])
                _check_width(table, start + len(ids))
                table[row, start : start + len(ids)] = ids
                counts[row] = start + len(ids)
        self.counters.blocks_appended += 1

    def remove(self, req_id: str) -> bool:
        """Forget a sequence; returns whether it was known."""
        row = self.index.pop(req_id, None)
        if row is None:
            return False
        self.prompts[row] = None
        self.decoding[row] = False
        self._free.append(row)
        self.counters.removed += 1
        return True

    def clear(self) -> None:
        """Forget every sequence."""
        for req_id in list(self.index):
            self.remove(req_id)

    def _set_blocks(self, row: int, blocks: SequenceOf[SequenceOf[int]]) -> None:
        for table, counts, ids in zip(self.blocks, self.counts, blocks, strict=True):
            _check_width(table, len(ids))
            table[row, : len(ids)] = ids
            counts[row] = len(ids)

    def _grow(self) -> None:
        old = len(self.prompts)
        self.blocks = [np.concatenate((table, np.zeros_like(table))) for table in self.blocks]
        self.counts = [np.concatenate((counts, np.zeros_like(counts))) for counts in self.counts]
        self.prompt_lens = np.concatenate((self.prompt_lens, np.zeros_like(self.prompt_lens)))
        self.adapters = np.concatenate((self.adapters, np.zeros_like(self.adapters)))
        self.decoding = np.concatenate((self.decoding, np.zeros_like(self.decoding)))
        self.prompts.extend([None] * old)
        self._free.extend(range(2 * old - 1, old - 1, -1))


def _check_width(table: NDArray[np.int32], blocks: int) -> None:
    if blocks > table.shape[1]:
        raise ValueError(f"a sequence was given {blocks} blocks, its row holds {table.shape[1]}")
