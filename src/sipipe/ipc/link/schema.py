"""The part of a hidden state that stays the same from iteration to iteration, and the buffers.

Between iterations of one model only the number of tokens changes, which both sides know. A
:class:`TensorSchema` is everything else: keys, dtypes, the fixed dimensions, and which dimension
counts tokens (paper, section 4.3, "static structure capture").

A tensor starts at the same address of a buffer whatever the number of tokens, so that a graph
captured for it stays valid. A buffer has one writer: the sender until a frame's header is sent, then
the receiver until it releases the frame. The socket's system calls order memory.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from sipipe.ipc.memory import PAGE, round_up

TOKENS = -1
"""Placeholder in a shape for the dimension that counts tokens."""

ALIGNMENT = 64
"""Bytes. Every tensor of a buffer starts on a cache line, as an AVX-512 register likes it."""

_REMEMBERED = 4096
"""Numbers of tokens whose shapes a schema remembers."""


class FrameShape(NamedTuple):
    """A schema at one number of tokens."""

    sizes: tuple[int, ...]
    """Bytes of each tensor."""
    nbytes: int
    """Bytes of all tensors together."""
    expected: tuple[tuple[str, Any, tuple[int, ...]], ...]
    """Key, dtype and shape of each tensor."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a schema."""

    key: str
    dtype: str
    """torch's name of the dtype without the module, such as ``"bfloat16"``."""
    shape: tuple[int, ...]
    """Dimensions, with :data:`TOKENS` in the place of the number of tokens, at most once."""


class TensorSchema(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """All tensors of a hidden state, in the order in which they lie in a buffer."""

    specs: tuple[TensorSpec, ...]

    @classmethod
    def capture(cls, tensors: Mapping[str, torch.Tensor], num_tokens: int) -> TensorSchema:
        """Read the schema off one iteration's tensors. The token dimension is the first that is
        ``num_tokens`` long; a tensor without one has a fixed shape. A wrong guess is corrected by the
        next iteration that does not fit, whose schema is captured anew. Raises TypeError: a value is
        no tensor."""
        specs = []
        for key, tensor in tensors.items():
            shape = getattr(tensor, "shape", None)
            if shape is None or not hasattr(tensor, "data_ptr"):
                raise TypeError(f"hidden state {key!r} is a {type(tensor).__name__}, not a tensor")
            sizes = list(shape)
            if num_tokens in sizes:
                sizes[sizes.index(num_tokens)] = TOKENS
            dtype = str(tensor.dtype).removeprefix("torch.")
            specs.append(TensorSpec(key, dtype, tuple(sizes)))
        return cls(tuple(specs))

    def encode(self) -> bytes:
        """The schema as it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> TensorSchema:
        """The inverse of :meth:`encode`."""
        return msgspec.msgpack.decode(encoded, type=cls)

    def parts(
        self, tensors: Mapping[str, torch.Tensor], num_tokens: int
    ) -> list[torch.Tensor] | None:
        """``tensors`` in the schema's order; None if they have not exactly this schema at
        ``num_tokens``."""
        if len(tensors) != len(self.specs):
            return None
        parts = []
        for key, dtype, shape in self.at(num_tokens).expected:
            tensor = tensors.get(key)
            if tensor is None or tensor.dtype is not dtype or tensor.shape != shape:
                return None
            parts.append(tensor)
        return parts

    @functools.cached_property
    def fingerprint(self) -> int:
        """64 bits that two different schemas share with probability 2⁻⁶⁴."""
        digest = hashlib.blake2b(self.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @functools.cached_property
    def _shapes(self) -> dict[int, FrameShape]:
        return {}

    def at(self, num_tokens: int) -> FrameShape:
        """Shapes and sizes for ``num_tokens`` tokens, which are remembered."""
        frame = self._shapes.get(num_tokens)
        if frame is None:
            if len(self._shapes) == _REMEMBERED:
                self._shapes.clear()
            expected = []
            sizes = []
            for spec in self.specs:
                shape = tuple(num_tokens if size == TOKENS else size for size in spec.shape)
                dtype = getattr(torch, spec.dtype)
                expected.append((spec.key, dtype, shape))
                sizes.append(math.prod(shape) * dtype.itemsize)
            frame = FrameShape(sizes=tuple(sizes), nbytes=sum(sizes), expected=tuple(expected))
            self._shapes[num_tokens] = frame
        return frame

    def pieces(
        self, parts: Sequence[torch.Tensor], num_tokens: int, most: int
    ) -> list[tuple[int, list[torch.Tensor]]]:
        """Cut ``parts`` after every ``most`` tokens. Returns the number of tokens of each piece, and
        views of its tensors. A tensor without tokens is in every piece."""
        if num_tokens <= most:
            return [(num_tokens, list(parts))]
        pieces = []
        for start in range(0, num_tokens, most):
            count = min(most, num_tokens - start)
            views = [
                part.narrow(spec.shape.index(TOKENS), start, count)
                if TOKENS in spec.shape
                else part
                for spec, part in zip(self.specs, parts, strict=True)
            ]
            pieces.append((count, views))
        return pieces

    def offsets(self, max_tokens: int) -> tuple[int, ...]:
        """Byte offset of each tensor in a buffer for ``max_tokens`` tokens, then the end. They are the
        same for iterations with fewer tokens."""
        offsets = [0]
        for size in self.at(max_tokens).sizes:
            offsets.append(offsets[-1] + round_up(size, ALIGNMENT))
        return tuple(offsets)


def buffer_bytes(schema: TensorSchema, max_tokens: int) -> int:
    """Bytes of a buffer for ``max_tokens`` tokens, in whole pages."""
    return round_up(max(1, schema.offsets(max_tokens)[-1]), PAGE)


class Buffers:
    """All buffers of a link, as one process sees them.

    Args:
        memory: uint8, [depth · size], which views keep alive.
        size: bytes of a buffer.
        max_tokens: tokens for which a buffer is laid out.
    """

    def __init__(self, memory: torch.Tensor, size: int, max_tokens: int) -> None:
        self._memory: Any = memory
        self._size = size
        self._max_tokens = max_tokens
        self._views: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}

    def views(self, schema: TensorSchema, buffer: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """The tensors of a frame, in place, by key. The dictionary is remembered, so nobody may change
        it."""
        key = (schema.fingerprint, buffer, num_tokens)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _REMEMBERED:
                self._views.clear()
            frame = schema.at(num_tokens)
            start = buffer * self._size
            views = {
                name: self._memory[start + offset : start + offset + size].view(dtype).view(shape)
                for (name, dtype, shape), size, offset in zip(
                    frame.expected,
                    frame.sizes,
                    schema.offsets(self._max_tokens),
                    strict=False,  # the last offset is the end
                )
            }
            self._views[key] = views
        return views
