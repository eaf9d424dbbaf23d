"""What one iteration's logits look like in a ring entry, and which part of them each rank writes."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sipipe.ipc.errors import ChannelConfigError

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
LAYOUTS = ("columns", "rows")


class LogitsShape(msgspec.Struct, frozen=True):
    """The array of an entry: small, picklable, JSON-able with msgspec."""

    vocab: int
    """V."""

    batch: int
    """Sequences at most."""

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
        if self.dtype not in DTYPES or self.layout not in LAYOUTS:
            raise ChannelConfigError(f"logits: no dtype {self.dtype!r} or layout {self.layout!r}")
        if self.vocab < 1 or self.batch < 1:
            raise ChannelConfigError(
                f"logits: vocab {self.vocab} and batch {self.batch} both need to be 1 or more"
            )
        if not 1 <= self.ranks <= self.vocab:
            raise ChannelConfigError(
                f"logits: {self.ranks} ranks cannot share a vocabulary of {self.vocab}"
            )
        if self.shard is not None and not (
            self.shard >= 1 and self.shard * self.ranks >= self.vocab
        ):
            raise ChannelConfigError(
                f"logits: {self.ranks} shards of {self.shard} tokens do not cover {self.vocab}"
            )

    @property
    def entry_bytes(self) -> int:
        """Bytes of a full batch."""
        return self.vocab * self.batch * np.dtype(DTYPES[self.dtype]).itemsize

    def array(self, entry: memoryview, batch: int) -> npt.NDArray[Any]:
        """``[V, batch]`` or ``[batch, V]`` at the start of an entry."""
        flat = np.frombuffer(entry, DTYPES[self.dtype], self.vocab * batch)
        columns = self.layout == "columns"
        return flat.reshape((self.vocab, batch) if columns else (batch, self.vocab))

    def part(self, array: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
        """What a rank writes of ``array``: ``[V/t, batch]`` or ``[batch, V/t]``."""
        if self.shard is not None:
            tokens = slice(rank * self.shard, (rank + 1) * self.shard)
        else:
            tokens = slice(rank * self.vocab // self.ranks, (rank + 1) * self.vocab // self.ranks)
        return array[tokens] if self.layout == "columns" else array[:, tokens]
