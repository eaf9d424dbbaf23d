"""What several sampling tests share."""

from __future__ import annotations

import tracemalloc

import numpy as np

from sipipe.messages.params import SequenceParams
from sipipe.sampler.state import SequenceColumns


def processed(
    logits: np.ndarray,
    params: SequenceParams,
    *,
    bitmask: np.ndarray | None = None,
    **tokens: object,
) -> np.ndarray:
    """The processed logits [V] that the kernels draw one row from, through the public interface."""
    asked = SequenceParams(**{**_fields(params), "logprobs": -1})
    columns = SequenceColumns(logits.size, logprobs_mode="processed_logits")
    columns.join(0, asked, **tokens)
    result = columns.sample([0], logits.reshape(1, -1), bitmask=bitmask)
    if result.errors:
        raise ValueError(result.errors[0])
    found = result.logprobs[0]
    row = np.full(logits.size, np.nan, np.float32)
    row[found.token_ids] = found.logprobs
    assert not np.isnan(row).any()  # every token exactly once
    return row


def bitmask(allowed: np.ndarray) -> np.ndarray:
    """int32 [1, words] with a bit per allowed token of a boolean [V]."""
    bits = np.zeros(-(-allowed.size // 32) * 32, np.uint8)
    bits[: allowed.size] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32).reshape(1, -1)


def _fields(params: SequenceParams) -> dict:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def draws(
    logits: np.ndarray,
    params: SequenceParams,
    count: int,
    *,
    seed: int = 0,
    **join: object,
) -> np.ndarray:
    """``count`` independent draws from one row of logits: sequences that differ in their seed."""
    columns = SequenceColumns(logits.size)
    for handle in range(count):
        own = SequenceParams(**{**_fields(params), "seed": seed * 1_000_003 + handle})
        columns.join(handle, own, **join)
    result = columns.sample(range(count), logits.reshape(1, -1), np.zeros(count, int))
    assert not result.errors
    return result.token_ids


def int32(values: object) -> np.ndarray:
    return np.array(values, np.int32)


def proposed(drafts, handles: list, drawn: list, worth: float = 0.01) -> dict[int, list[int]]:
    """By handle, what may come behind the tokens of its rows, which are numbered from 10."""
    found = drafts.propose(int32(handles), int32(range(10, 10 + len(handles))), int32(drawn), worth)
    return {handles[row - 10]: np.frombuffer(each, np.int32).tolist() for row, each in found}


def bfloat16(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) of float32 values, truncated."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def memory_kept(action) -> int:
    """Bytes that Python and NumPy have after ``action`` and had not before."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    action()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before
