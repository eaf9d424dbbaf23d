"""The rows that kernels read from logits [B, V]: in place, in their own dtype, never copied."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def read_rows(
    logits: npt.NDArray[Any], rows: Indices, vocab_size: int
) -> tuple[npt.NDArray[Any], Indices]:
    """``(flat, starts)``: ``flat[starts[i]:]`` are the logits of ``rows[i]``. ``logits``: [B, V'],
    V' of ``vocab_size`` or more; float32, float16, bfloat16 or its bits as uint16. Raises
    ValueError or TypeError naming what does not fit."""
    if (stored := _as_stored(logits)).ndim != 2:
        raise ValueError(f"logits must have 2 dimensions, got {stored.ndim}")
    batch, width = stored.shape
    if width < vocab_size:
        raise ValueError(f"logits: {width} tokens, fewer than vocab_size {vocab_size}")
    if rows.size and not (rows.min() >= 0 and rows.max() < batch):
        raise ValueError(f"rows must be in [0, {batch})")
    if stored.size and width > 1 and stored.strides[-1] != stored.itemsize:
        raise ValueError("logits must be contiguous in their last dimension")
    if stored.strides[0] < 0:
        raise ValueError("logits must have their rows in the order of memory")
    if batch > 1 and stored.strides[0] % stored.itemsize:
        raise ValueError("logits must have their rows whole elements apart")
    return _flat(stored), rows * (stored.strides[0] // stored.itemsize)


def _as_stored(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory with the dtype kernels know: float32, uint16 (bfloat16), int16 (float16)."""
    if logits.dtype in (np.float32, np.uint16):
        return logits
    if logits.dtype == np.float16:
        return logits.view(np.int16)
    if logits.dtype.name == "bfloat16":  # ml_dtypes
        return logits.view(np.uint16)
    raise TypeError(
        f"logits must be float32, float16 or bfloat16 (uint16 bits), not {logits.dtype}"
    )


def _flat(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The memory from an array's first element to its last, as one dimension."""
    if array.flags.c_contiguous:
        return writeable(array.reshape(-1))
    steps = zip(array.shape, array.strides, strict=True)
    size = 1 + sum((length - 1) * stride // array.itemsize for length, stride in steps)
    return writeable(np.lib.stride_tricks.as_strided(array, (size,), (array.itemsize,)))


def writeable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory without the read-only mark: kernels are compiled for one array type only, and
    write to nothing that they got this way. It lives as long as the result does."""
    if array.flags.writeable:
        return array
    memory: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    memory.owner = array
    view: npt.NDArray[Any] = np.frombuffer(memoryview(memory), array.dtype).reshape(array.shape)
    return view
