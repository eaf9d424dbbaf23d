"""What several sampling tests share."""

from __future__ import annotations

import numpy as np

from sipipe.sampling import SequenceColumns, SequenceParams, sample_with_logprobs


def processed(logits: np.ndarray, params: SequenceParams, **tokens: object) -> np.ndarray:
    """The processed logits [V] that the kernels draw one row from, through the public interface."""
    asked = SequenceParams(**{**_fields(params), "logprobs": -1})
    _, found = sample_with_logprobs(
        logits.reshape(1, -1),
        asked,
        logprobs_mode="processed_logits",
        **{name: [value] for name, value in tokens.items()},
    )
    row = np.full(logits.size, np.nan, np.float32)
    row[found[0].token_ids] = found[0].logprobs
    assert not np.isnan(row).any()  # every token exactly once
    return row


def _fields(params: SequenceParams) -> dict:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def draws(
    logits: np.ndarray,
    params: SequenceParams,
    count: int,
    *,
    seed: int = 0,
    layout: str = "rows",
    **join: object,
) -> np.ndarray:
    """``count`` independent draws from one row of logits: sequences that differ in their seed."""
    columns = SequenceColumns(logits.size)
    for handle in range(count):
        own = SequenceParams(**{**_fields(params), "seed": seed * 1_000_003 + handle})
        columns.join(handle, own, **join)
    matrix = logits.reshape(1, -1) if layout == "rows" else logits.reshape(-1, 1)
    result = columns.sample(range(count), matrix, np.zeros(count, int), layout=layout)
    assert not result.errors
    return result.token_ids


def bfloat16(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) of float32 values, truncated."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
