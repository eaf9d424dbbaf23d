"""The part of a hidden state that stays the same from iteration to iteration.

A pipeline stage hands its neighbour a dictionary of tensors. Between iterations of one model
only the number of tokens changes, and both sides know it from the scheduling output. A
:class:`Structure` is everything else: keys, dtypes, the fixed dimensions, and which dimension
counts tokens (paper, section 4.3, "static structure capture").
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "TOKENS", "Extent", "Structure", "TensorSpec", "align"]

TOKENS = -1
"""Stands in a shape for the dimension that counts tokens."""

_REMEMBERED = 4096

ALIGNMENT = 64
"""Bytes; every tensor of a slot starts on a cache line (and an AVX-512 register)."""


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """``nbytes`` rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


class Extent(NamedTuple):
    """What one tensor occupies at a given number of tokens."""

    shape: tuple[int, ...]
    """The whole tensor's."""
    elements: int
    """That travel on one link: 1/shards of the tensor's."""
    nbytes: int


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a structure."""

    key: str
    dtype: str
    """torch's own name without the module, such as ``"bfloat16"``."""
    itemsize: int
    """Bytes per element."""
    shape: tuple[int, ...]
    """Dimensions, :data:`TOKENS` where the number of tokens stands (at most once)."""
    shards: int = 1
    """1: sent whole. t: each tensor-parallel rank sends its 1/t of the flattened tensor."""

    def extent(self, num_tokens: int) -> Extent:
        """Shape and size for ``num_tokens`` tokens."""
        shape = tuple(num_tokens if size == TOKENS else size for size in self.shape)
        elements = math.prod(shape) // self.shards
        return Extent(shape, elements, elements * self.itemsize)


class Structure(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """All tensors of a hidden state, in the order in which they lie in a slot."""

    specs: tuple[TensorSpec, ...]

    @classmethod
    def capture(
        cls,
        tensors: Mapping[str, torch.Tensor],
        num_tokens: int,
        *,
        shards: int = 1,
        whole: frozenset[str] = frozenset(),
    ) -> Structure:
        """Read the structure off one iteration's tensors.

        The token dimension is the first that is ``num_tokens`` long; a tensor without one has a
        fixed shape. A guess that only looked right (a fixed dimension that happened to equal
        ``num_tokens``) is corrected by the next iteration that does not fit, which captures anew.

        Args:
            shards: tensor-parallel ranks that each send 1/shards of a tensor, where its fixed
                dimensions divide evenly for every number of tokens.
            whole: keys that every rank sends whole, because ranks hold different values.

        Raises:
            TypeError: a value is not a tensor.
        """
        specs = []
        for key, tensor in tensors.items():
            shape = getattr(tensor, "shape", None)
            if shape is None or not hasattr(tensor, "data_ptr"):
                raise TypeError(
                    f"hidden state {key!r} is a {type(tensor).__name__}, not a tensor: "
                    "only tensors travel between stages"
                )
            sizes = list(shape)
            if num_tokens in sizes:
                sizes[sizes.index(num_tokens)] = TOKENS
            fixed = math.prod(size for size in sizes if size != TOKENS)
            even = shards > 1 and key not in whole and fixed % shards == 0
            specs.append(
                TensorSpec(
                    key,
                    str(tensor.dtype).removeprefix("torch."),
                    tensor.element_size(),
                    tuple(sizes),
                    shards if even else 1,
                )
            )
        return cls(tuple(specs))

    def matches(self, tensors: Mapping[str, torch.Tensor], num_tokens: int) -> bool:
        """Whether ``tensors`` have exactly this structure at ``num_tokens`` tokens."""
        if len(tensors) != len(self.specs):
            return False
        extents = self.extents(num_tokens)
        for (key, dtype), extent in zip(self.keys_and_dtypes, extents, strict=True):
            tensor = tensors.get(key)
            if tensor is None or tensor.dtype is not dtype or tensor.shape != extent.shape:
                return False
        return True

    @functools.cached_property
    def keys_and_dtypes(self) -> tuple[tuple[str, Any], ...]:
        """Each key with its ``torch.dtype``."""
        import torch

        return tuple((spec.key, getattr(torch, spec.dtype)) for spec in self.specs)

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys, in order."""
        return tuple(spec.key for spec in self.specs)

    @functools.cached_property
    def fingerprint(self) -> int:
        """64 bits that two different structures share with probability 2⁻⁶⁴."""
        digest = hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @functools.cached_property
    def _extents(self) -> dict[int, tuple[Extent, ...]]:
        return {}

    def extents(self, num_tokens: int) -> tuple[Extent, ...]:
        """Each tensor's shape and size for ``num_tokens`` tokens, remembered."""
        extents = self._extents.get(num_tokens)
        if extents is None:
            if len(self._extents) == _REMEMBERED:
                self._extents.clear()
            extents = tuple(spec.extent(num_tokens) for spec in self.specs)
            self._extents[num_tokens] = extents
        return extents

    @functools.cached_property
    def _layouts(self) -> dict[int, tuple[int, ...]]:
        return {}

    def offsets(self, max_tokens: int) -> tuple[int, ...]:
        """Byte offset of each tensor in a slot made for ``max_tokens`` tokens, then the end.

        Offsets do not depend on the iteration's own number of tokens, so that a slot's tensors
        have the same addresses for ever.
        """
        if max_tokens not in self._layouts:
            offsets = [0]
            for extent in self.extents(max_tokens):
                offsets.append(offsets[-1] + align(extent.nbytes))
            self._layouts[max_tokens] = tuple(offsets)
        return self._layouts[max_tokens]

    def nbytes(self, num_tokens: int) -> int:
        """Bytes of data that one iteration of ``num_tokens`` tokens sends on one link."""
        nbytes = self._nbytes.get(num_tokens)
        if nbytes is None:
            if len(self._nbytes) == _REMEMBERED:
                self._nbytes.clear()
            nbytes = sum(extent.nbytes for extent in self.extents(num_tokens))
            self._nbytes[num_tokens] = nbytes
        return nbytes

    @functools.cached_property
    def _nbytes(self) -> dict[int, int]:
        return {}

    def encode(self) -> bytes:
        """The description that is sent once."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Structure:
        """Undo :meth:`encode`."""
        return msgspec.msgpack.decode(data, type=cls)
