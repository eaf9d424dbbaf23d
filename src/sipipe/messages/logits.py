"""Shape of the rows of BIC-L: decided by the last stage's ranks, and given to all who read them."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class LogitsShape(msgspec.Struct, frozen=True):
    """An iteration's array: small, picklable, JSON-able with msgspec."""

    vocab: int
    """Tokens of the vocabulary, V."""
    dtype: str = "float32"
    """``float32``, ``float16`` or ``bfloat16``. NumPy has no bfloat16: its bits are read as uint16."""
    bounds: tuple[int, ...] = ()
    """First token of each writer's part, and V at the end. A part may be empty, since vLLM pads its
    vocabulary. An empty tuple: one writer has all."""

    def __post_init__(self) -> None:
        assert self.dtype in DTYPES, self
        assert self.vocab >= 1, self
        assert not self.bounds or (self.bounds[0], self.bounds[-1]) == (0, self.vocab), self
        assert list(self.bounds) == sorted(self.bounds), self

    @property
    def ranks(self) -> int:
        """Number of writers, each with its part of the vocabulary."""
        return max(1, len(self.bounds) - 1)

    @property
    def row_bytes(self) -> int:
        """Bytes from one place where an iteration may begin to the next: whole cache lines."""
        return -(-self.vocab * np.dtype(DTYPES[self.dtype]).itemsize // 64) * 64

    def array(self, memory: memoryview, row: int, batch: int) -> npt.NDArray[Any]:
        """An iteration's logits ``[batch, V]``, contiguous, a view of the rows from ``row`` on."""
        size = self.vocab * batch
        offset = row * self.row_bytes
        return np.frombuffer(memory, DTYPES[self.dtype], size, offset).reshape(batch, self.vocab)

    def part(self, array: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
        """Columns of ``array`` that writer ``rank`` writes: a view ``[batch, its tokens]``."""
        if not self.bounds:
            return array
        return array[:, self.bounds[rank] : self.bounds[rank + 1]]
