"""What a logits slot holds: its array's sizes, and where each rank's region of it is."""

from __future__ import annotations

from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from sipipe.ipc.errors import ChannelConfigError

__all__ = ["LogitsShape"]

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
LAYOUTS = ("columns", "rows")


class LogitsShape(msgspec.Struct, frozen=True):
    """The array of a slot: small, picklable, JSON-able with msgspec."""

    vocab: int
    """V."""

    batch: int
    """Sequences at most."""

    dtype: str = "float32"
    """float32, float16 or bfloat16, which NumPy has not: its bits are uint16."""

    layout: str = "rows"
    """``rows``: ``[batch, V]``; ``columns``: ``[V, batch]``, the paper's."""

    @classmethod
    def checked(cls, channel: str, vocab: int, batch: int, dtype: str, layout: str) -> Self:
        """Raises ChannelConfigError on a size that cannot work."""
        if dtype not in DTYPES or layout not in LAYOUTS:
            raise ChannelConfigError(f"channel {channel}: no dtype {dtype!r} or layout {layout!r}")
        if vocab < 1 or batch < 1:
            raise ChannelConfigError(
                f"channel {channel}: bad size (vocab {vocab}, batch {batch}), both need 1 or more"
            )
        return cls(vocab, batch, dtype, layout)

    @classmethod
    def of_words(cls, words: tuple[int, ...]) -> Self:
        """The shape whose :attr:`words` are these."""
        vocab, batch, dtype, layout = words
        return cls(vocab, batch, list(DTYPES)[dtype], LAYOUTS[layout])

    @property
    def words(self) -> tuple[int, int, int, int]:
        """The shape as words of the ring's header."""
        return self.vocab, self.batch, list(DTYPES).index(self.dtype), LAYOUTS.index(self.layout)

    @property
    def item_bytes(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of a full slot."""
        return self.vocab * self.batch * self.item_bytes

    def array(self, slot: memoryview, batch: int) -> npt.NDArray[Any]:
        """``[V, batch]`` or ``[batch, V]`` at the start of a slot."""
        flat = np.frombuffer(slot, DTYPES[self.dtype], self.vocab * batch)
        columns = self.layout == "columns"
        return flat.reshape((self.vocab, batch) if columns else (batch, self.vocab))

    def region(
        self, array: npt.NDArray[Any], rank: int, ranks: int, shard: int = 0
    ) -> npt.NDArray[Any]:
        """What rank ``rank`` of ``ranks`` writes of it: ``shard`` columns, or an even part."""
        if shard:
            part = slice(rank * shard, (rank + 1) * shard)
        else:
            part = slice(rank * self.vocab // ranks, (rank + 1) * self.vocab // ranks)
        return array[part] if self.layout == "columns" else array[:, part]
