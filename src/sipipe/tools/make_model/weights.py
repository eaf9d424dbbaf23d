"""Random weights of a transformers model, drawn so that its outputs can be told apart.

Every matrix has variance 1 / fan-in and so keeps the scale of its normalised inputs: the next token
depends on the whole context. Logits have a standard deviation of about ``LOGITS_STD``, so that
greedy choices are clear and temperature, top-k, top-p and min-p all have something to cut.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

__all__ = ["LOGITS_STD", "draw"]

LOGITS_STD = 3.0

_BLOCK = 1 << 22
"""Elements drawn at a time: 16 MiB of float32."""


def draw(name: str, empty: Any, *, seed: int) -> Any:
    """A new torch tensor of the shape and dtype of ``empty``, the tensor ``name`` of a model.

    DeepSeek's correction of the router's scores is float32 whatever the model is. The float32 values that are rounded to its dtype depend on ``seed``, the name and the shape
    alone: the same tensor comes out whatever the element type or the other tensors are.
    """
    import torch

    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    mean, std = _distribution(name, tuple(empty.shape))
    dtype = torch.float32 if name.endswith("e_score_correction_bias") else empty.dtype
    drawn = torch.empty(empty.shape, dtype=dtype)
    for block in drawn.view(-1).split(_BLOCK):
        values = generator.standard_normal(len(block), dtype=np.float32)
        values *= np.float32(std)
        values += np.float32(mean)
        block.copy_(torch.from_numpy(values))
    return drawn


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """(mean, standard deviation) of a tensor's elements."""
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.01
    if name.endswith("bias"):
        return 0.0, 0.1
    if name.endswith("embed_tokens.weight"):
        return 0.0, 1.0
    fan_in = shape[-1]  # matrices are [out, in], those of experts [experts, out, in]
    return 0.0, (LOGITS_STD if name == "lm_head.weight" else 1.0) / math.sqrt(fan_in)
