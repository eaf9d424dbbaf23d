"""Rows of the logits that one sampler draws in one iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.messages.step import Grammar, Step, int32_view
from sipipe.sampler.state import ahead_of

NO_MASK = -1
"""Value of ``bitmask_rows`` for a row that no grammar restricts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOfStep:
    """Rows of the logits, with what belongs to each. All arrays have the same length.

    The rows of a request lie side by side: one for its next token, and one behind each of its drafts.
    """

    rows: npt.NDArray[np.int32]
    """Indices of the rows in the iteration's logits, ascending."""
    handles: npt.NDArray[np.int32]
    """Request of each row."""
    follows: npt.NDArray[np.int32] | None
    """Draft that each row stands behind, -1 for the first row of a request; None: there are none."""
    bitmask_rows: npt.NDArray[np.int32]
    """Row of the grammar bitmask that restricts each row; :data:`NO_MASK`: none does."""

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def owned_by(cls, sampler: int, step: Step) -> RowsOfStep:
        """Take the rows of ``step`` that ``sampler`` draws, without a bitmask."""
        rows = np.flatnonzero(int32_view(step.owners) == sampler).astype(np.int32)
        return cls(
            rows=rows,
            handles=int32_view(step.rows)[rows],
            follows=int32_view(step.follows)[rows] if step.follows else None,
            bitmask_rows=np.full(len(rows), NO_MASK, np.int32),
        )

    def subset(self, which: npt.NDArray[Any] | Sequence[bool]) -> RowsOfStep:
        """Take the rows that a mask or indices choose."""
        which = np.asarray(which)
        return RowsOfStep(
            rows=self.rows[which],
            handles=self.handles[which],
            follows=None if self.follows is None else self.follows[which],
            bitmask_rows=self.bitmask_rows[which],
        )

    def restricted_by(self, grammar: Grammar) -> RowsOfStep:
        """Say which row of ``grammar``'s bitmask restricts each row.

        The bitmask has the rows of a request side by side, in the order of its drafts: so the row of a
        draft is that of the request's first row, plus the number of drafts before it.
        """
        masked = int32_view(grammar.handles)
        first_rows = np.flatnonzero(np.diff(masked, prepend=-1))
        first_row_of = dict(zip(masked[first_rows].tolist(), first_rows.tolist(), strict=True))
        bitmask_rows = np.asarray(
            [first_row_of.get(handle, NO_MASK) for handle in self.handles.tolist()], np.int32
        )
        if self.follows is not None:
            drafts_before = ahead_of(self.follows).astype(np.int32)
            bitmask_rows = np.where(bitmask_rows < 0, bitmask_rows, bitmask_rows + drafts_before)
        return replace(self, bitmask_rows=bitmask_rows)


def bitmask_of(grammar: Grammar | None) -> npt.NDArray[np.int32] | None:
    """View a grammar's bitmask as int32 [rows, words]; None: nothing is restricted."""
    if grammar is None or not grammar.words:
        return None
    return int32_view(grammar.bitmask).reshape(-1, grammar.words)
