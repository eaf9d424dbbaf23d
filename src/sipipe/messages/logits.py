"""What the rows of BIC-L hold: decided by the last stage's ranks, and told to all who read it."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class LogitsShape(msgspec.Struct, frozen=True):
    """An iteration's array: small, picklable, JSON-able with msgspec."""

    vocab: int
    """V."""
    dtype: str = "float32"
    """float32, float16 or bfloat16, which NumPy has not: its bits are uint16."""
    bounds: tuple[int, ...] = ()
    """First token of each writer's part, and V at the end; a part may be empty (vLLM pads its
    vocabulary). Empty: one writer of all."""

    def __post_init__(self) -> None:
        assert self.dtype in DTYPES, self
        assert self.vocab >= 1, self
        assert not self.bounds or (self.bounds[0], self.bounds[-1]) == (0, self.vocab), self
        assert list(self.bounds) == sorted(self.bounds), self

    @property
    def ranks(self) -> int:
        """Writers; each writes its part of the vocabulary."""
        return max(1, len(self.bounds) - 1)

    @property
    def row_bytes(self) -> int:
        """Bytes from where an iteration may begin to the next such place: whole cache lines."""
        return -(-self.vocab * np.dtype(DTYPES[self.dtype]).itemsize // 64) * 64

    def array(self, memory: memoryview, row: int, batch: int) -> npt.NDArray[Any]:
        """``[batch, V]``, contiguous, in the rows from ``row`` on."""
        size, offset = self.vocab * batch, row * self.row_bytes
        return np.frombuffer(memory, DTYPES[self.dtype], size, offset).reshape(batch, self.vocab)

    def part(self, array: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
        """What writer ``rank`` writes of ``array``: ``[batch, its tokens]``."""
        return array[:, slice(*(self.bounds[rank : rank + 2] or (0, self.vocab)))]
