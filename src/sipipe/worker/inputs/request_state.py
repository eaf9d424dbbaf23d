"""What a stage remembers of each sequence between iterations (paper section 4.2, SequenceCache).

A sequence has one row from its first iteration until it finishes, whatever slot it is in and
whether or not it takes part in the current iteration. A batch is a list of row numbers, so that a
sequence which sits out an iteration, or changes its place in the batch, costs nothing: only new
sequences, resumed ones, new blocks and finished sequences write here, all those of an iteration
together. (vLLM's first runner keeps the state in batch order instead, and so removes and re-adds
every sequence of a microbatch when microbatches alternate.)

Who runs here: the CPU executor's thread, alone. The device never reads these arrays, it reads the
versioned copies of :mod:`sipipe.worker.inputs.buffers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

BlockIds = SequenceOf[SequenceOf[int]]
"""Block ids of one sequence, per KV cache group."""


@dataclass(slots=True)
class Counters:
    """How often the cached state of a sequence was written as a whole, or dropped."""

    inserted: int = 0
    """Sequences seen for the first time."""
    resumed: int = 0
    """Sequences that came back from preemption with new blocks."""
    removed: int = 0
    """Sequences that finished or were aborted."""
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
        from sipipe.worker.inputs import kernels  # not at the top: see InputPreparer

        self._kernels = kernels
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
        self.prompts: list[SequenceOf[int]] = [()] * rows
        self.counters = Counters()
        self._free = list(range(rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self.index

    def insert(self, req_id: str, prompt: SequenceOf[int], *, adapter: int = 0) -> int:
        """Give a new sequence a row, without blocks; ``prompt`` are its token ids, kept as they are.

        A sequence of that name which is still known is replaced, in its row. Returns the row.
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
        self._restart(row)
        self.counters.inserted += 1
        return row

    def resume(self, row: int) -> None:
        """Drop all blocks of a sequence that was preempted; it is computed anew."""
        self._restart(row)
        self.counters.resumed += 1

    def append_blocks(self, rows: SequenceOf[int], blocks: SequenceOf[BlockIds]) -> None:
        """Add newly allocated blocks behind those that the sequences of ``rows`` have.

        Raises:
            ValueError: more blocks than a row holds.
        """
        where = np.array(rows, np.int64)
        for group, (table, counts) in enumerate(zip(self.blocks, self.counts, strict=True)):
            lists = [of_sequence[group] for of_sequence in blocks]
            lengths = np.array([len(ids) for ids in lists], np.int32)
            ids = np.fromiter(chain.from_iterable(lists), np.int32)
            change = self._kernels.append_blocks(where, lengths, ids, blocks=table, counts=counts)
            if change >= 0:
                row = rows[change]
                raise ValueError(
                    f"a sequence was given {int(counts[row]) + len(lists[change])} blocks, "
                    f"its row holds {table.shape[1]}"
                )

    def remove(self, req_ids: Iterable[str]) -> list[int]:
        """Forget sequences; returns the rows of those that were known."""
        rows = [row for req_id in req_ids if (row := self.index.pop(req_id, None)) is not None]
        for row in rows:
            self.prompts[row] = ()
        self._free += rows
        self.counters.removed += len(rows)
        return rows

    def _restart(self, row: int) -> None:
        for counts in self.counts:
            counts[row] = 0
        self.decoding[row] = False

    def _grow(self) -> None:
        old = len(self.prompts)
        self.blocks = [np.concatenate((table, np.zeros_like(table))) for table in self.blocks]
        self.counts = [np.concatenate((counts, np.zeros_like(counts))) for counts in self.counts]
        self.prompt_lens = np.concatenate((self.prompt_lens, np.zeros_like(self.prompt_lens)))
        self.adapters = np.concatenate((self.adapters, np.zeros_like(self.adapters)))
        self.decoding = np.concatenate((self.decoding, np.zeros_like(self.decoding)))
        self.prompts.extend([()] * old)
        self._free.extend(range(2 * old - 1, old - 1, -1))
