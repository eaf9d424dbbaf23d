"""Draws tensors and writes them as a safetensors file, one tensor in memory at a time.

The format (8 bytes of header length, a JSON header, the tensors' bytes) is written here rather
than through the safetensors library, because that needs all tensors in memory at once and NumPy
has no bfloat16. The tests read the result with the library.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.tools.make_model.families import TensorSpec

__all__ = ["DTYPES", "draw", "write_safetensors"]

DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
"""Element types: the format's name and bytes per element."""

_BLOCK = 1 << 22
"""Elements drawn at a time: 16 MiB of float32."""


def draw(spec: TensorSpec, *, seed: int) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor's elements in row-major order, in float32 blocks.

    They depend on ``seed`` and the tensor's name and shape alone: the same tensor comes out
    whatever the element type or the other tensors are.
    """
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(spec.name.encode())]))
    left = math.prod(spec.shape)
    while left > 0:
        block = generator.standard_normal(min(left, _BLOCK), dtype=np.float32)
        block *= np.float32(spec.std)
        if spec.mean:
            block += np.float32(spec.mean)
        left -= block.size
        yield block


def encode(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """``values`` in ``dtype``, bfloat16 as its bits in uint16, rounded to nearest even."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def write_safetensors(path: Path, tensors: Sequence[TensorSpec], *, dtype: str, seed: int) -> int:
    """Write ``tensors`` drawn with ``seed`` to ``path``; returns the number of parameters."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = parameters = 0
    for spec in tensors:
        code, size = DTYPES[spec.dtype or dtype]
        count = math.prod(spec.shape)
        header[spec.name] = {
            "dtype": code,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + count * size],
        }
        offset += count * size
        parameters += count
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data must start at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for spec in tensors:
            for block in draw(spec, seed=seed):
                file.write(encode(block, spec.dtype or dtype).data)
    return parameters
