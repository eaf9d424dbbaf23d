"""What the rows of BIC-L hold: decided by the last stage's ranks, and told to all who read it."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
LAYOUTS = ("columns", "rows")


class LogitsShape(msgspec.Struct, frozen=True):
    """An iteration's array: small, picklable, JSON-able with msgspec."""

    vocab: int
    """V."""

    dtype: str = "float32"
    """float32, float16 or bfloat16, which NumPy has not: its bits are uint16."""

    layout: str = "rows"
    """``rows``: ``[batch, V]``; ``columns``: ``[V, batch]``, the paper's."""

    ranks: int = 1
    """t, the tensor-parallel writers; each writes its part of the vocabulary."""

    shard: int | None = None
    """Tokens of each rank's part, the last ranks having what is left of the vocabulary, which may
    be none (vLLM pads its vocabulary); None: even parts."""

    def __post_init__(self) -> None:
        assert self.dtype in DTYPES, self
        assert self.layout in LAYOUTS, self
        assert self.vocab >= self.ranks >= 1, self
        assert self.shard is None or self.shard * self.ranks >= self.vocab, self

    @property
    def row_bytes(self) -> int:
        """Bytes from where an iteration may begin to the next such place: whole cache lines."""
        return -(-self.vocab * np.dtype(DTYPES[self.dtype]).itemsize // 64) * 64

    def array(self, memory: memoryview, row: int, batch: int) -> npt.NDArray[Any]:
        """``[V, batch]`` or ``[batch, V]``, contiguous, in the rows from ``row`` on."""
        flat = np.frombuffer(
            memory, DTYPES[self.dtype], self.vocab * batch, offset=row * self.row_bytes
        )
        columns = self.layout == "columns"
        return flat.reshape((self.vocab, batch) if columns else (batch, self.vocab))

    def part(self, array: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
        """What a rank writes of ``array``: ``[V/t, batch]`` or ``[batch, V/t]``."""
        if self.shard is not None:
            tokens = slice(rank * self.shard, (rank + 1) * self.shard)
        else:
            tokens = slice(rank * self.vocab // self.ranks, (rank + 1) * self.vocab // self.ranks)
        return array[tokens] if self.layout == "columns" else array[:, tokens]
