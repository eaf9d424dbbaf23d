"""Slots of memory that hidden states lie in, and tensors that look into them.

Layout of an arena of ``depth`` slots, each a whole number of pages::

    slot 0                                              slot 1
    ┌──────────────┬──────────────┬ … ┬───────────────┐┌─────
    │ tensor 0     │ tensor 1     │   │ trailer, 64 B ││
    │ max_tokens   │ max_tokens   │   │ check word    ││
    └──────────────┴──────────────┴ … ┴───────────────┘└─────

A tensor starts at the same address whatever the number of tokens, so the views below are made
once per structure and slot. One writer per slot at any time: whoever fills it (the sender's copy,
or the receiver's reading thread) until the seal is stored, then the receiver until RELEASE. The
order between the two: release and acquire of the seal in shared memory, elsewhere the kernel's, as
a record goes through a socket.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from typing import TYPE_CHECKING, Any

from sipipe.ipc.link.structure import Structure, align

if TYPE_CHECKING:
    import torch

__all__ = ["Arena", "HostArena", "PackedArena", "slot_bytes"]

_TRAILER = 64
_WORD = struct.Struct("<Q")


def slot_bytes(structure: Structure, max_tokens: int, hint: int = 0) -> int:
    """Bytes of a slot for ``structure``, or for ``hint`` bytes a token if that is more."""
    need = max(structure.offsets(max_tokens)[-1], align(hint * max_tokens))
    return align(need + _TRAILER, mmap.PAGESIZE)


class Arena:
    """``depth`` slots in one tensor of bytes, which the views keep alive."""

    def __init__(self, memory: torch.Tensor, depth: int, size: int, max_tokens: int) -> None:
        self.depth = depth
        self.size = size
        """Bytes of one slot."""
        self._bytes: Any = memory
        self._max_tokens = max_tokens
        self._flat: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def flat(self, structure: Structure, slot: int) -> tuple[torch.Tensor, ...]:
        """One flat tensor for each of ``structure``'s, long enough for ``max_tokens``."""
        key = (structure.fingerprint, slot)
        if key not in self._flat:
            if len(self._flat) > 64 * self.depth:
                self._flat.clear()
            start = slot * self.size
            tensors = []
            for (_, dtype), offset, extent in zip(
                structure.keys_and_dtypes,
                structure.offsets(self._max_tokens),
                structure.extents(self._max_tokens),
                strict=False,
            ):
                piece = self._bytes[start + offset : start + offset + extent.nbytes]
                tensors.append(piece.view(dtype))
            self._flat[key] = tuple(tensors)
        return self._flat[key]

    def views(self, structure: Structure, slot: int, num_tokens: int) -> list[torch.Tensor]:
        """What ``num_tokens`` tokens of ``structure`` occupy: [...] whole, [n/shards] sharded."""
        views = []
        for spec, flat, (shape, elements, _) in zip(
            structure.specs,
            self.flat(structure, slot),
            structure.extents(num_tokens),
            strict=True,
        ):
            part = flat.narrow(0, 0, elements)
            views.append(part.view(shape) if spec.shards == 1 else part)
        return views


class PackedArena(Arena):
    """Slots whose tensors lie close together, so that a frame is one piece of memory.

    A tensor's address depends on the slot, the structure and the number of tokens.
    """

    def frame(self, structure: Structure, slot: int, num_tokens: int) -> torch.Tensor:
        """The bytes that a frame takes: [nbytes]."""
        start = slot * self.size
        frame: torch.Tensor = self._bytes[start : start + structure.offsets(num_tokens)[-1]]
        return frame

    def views(self, structure: Structure, slot: int, num_tokens: int) -> list[torch.Tensor]:
        frame, views = self.frame(structure, slot, num_tokens), []
        for (_, dtype), spec, offset, extent in zip(
            structure.keys_and_dtypes,
            structure.specs,
            structure.offsets(num_tokens),
            structure.extents(num_tokens),
            strict=False,
        ):
            part = frame[offset : offset + extent.nbytes].view(dtype)
            views.append(part.view(extent.shape) if spec.shards == 1 else part)
        return views


class HostArena(Arena):
    """Slots in a mapping of host memory."""

    def __init__(self, memory: mmap.mmap, depth: int, size: int, max_tokens: int) -> None:
        import torch

        super().__init__(torch.frombuffer(memory, dtype=torch.uint8), depth, size, max_tokens)
        self._memory = memory
        self._address: int = self._bytes.data_ptr()
        self._places: dict[tuple[int, int], list[int]] = {}

    @classmethod
    def private(cls, depth: int, size: int, max_tokens: int) -> HostArena:
        """An arena in this process's own memory."""
        return cls(mmap.mmap(-1, depth * size), depth, size, max_tokens)

    def places(self, structure: Structure, slot: int) -> list[int]:
        """The address of each of ``structure``'s tensors, remembered."""
        key = (structure.fingerprint, slot)
        places = self._places.get(key)
        if places is None:
            if len(self._places) > 64 * self.depth:
                self._places.clear()
            start = self._address + slot * self.size
            places = [start + offset for offset in structure.offsets(self._max_tokens)[:-1]]
            self._places[key] = places
        return places

    def seal(self, slot: int) -> int:
        """The address of a slot's check word."""
        return self._address + (slot + 1) * self.size - _TRAILER

    def bytes(self) -> memoryview:
        """All slots, writable."""
        return memoryview(self._memory)

    def fill(
        self, structure: Structure, slot: int, num_tokens: int, parts: list[torch.Tensor]
    ) -> None:
        """Copy ``parts`` into a slot with the GIL released, on this thread alone.

        Not ``Tensor.copy_``: that spreads a large copy over an OpenMP pool, one more pool per
        calling thread, which fights the forward pass for the worker's cores.
        """
        for index, (part, to, extent) in enumerate(
            zip(parts, self.places(structure, slot), structure.extents(num_tokens), strict=True)
        ):
            if part.is_cpu and part.is_contiguous():
                ctypes.memmove(to, part.data_ptr(), extent.nbytes)
            else:
                self.views(structure, slot, num_tokens)[index].copy_(part)

    def write_check(self, slot: int, word: int) -> None:
        """Seal a filled slot."""
        _WORD.pack_into(self._memory, (slot + 1) * self.size - _TRAILER, word)
