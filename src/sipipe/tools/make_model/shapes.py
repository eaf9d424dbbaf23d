"""The sizes that a generated model comes in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["SIZES", "Shape"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder; a family takes from it what it has."""

    vocab: int
    """Rows of the embedding and of the vocabulary projection."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of a dense feed-forward layer."""
    experts: int = 8
    """Routed experts of a mixture-of-experts layer."""
    experts_per_token: int = 2
    moe_intermediate: int = 0
    """Width of one expert; 0: this size has no mixture-of-experts form."""
    max_positions: int = 32_768
    """Longest sequence that config.json declares."""
    dtype: str = "bfloat16"
    """Element type where the user names none."""


SIZES: Mapping[str, Shape] = MappingProxyType(
    {
        # Loads in seconds; 4 layers and even heads, so that it cuts into 4 stages of 2 ranks.
        # The vocabulary is no multiple of 64 on purpose: vLLM pads it.
        "tiny": Shape(
            vocab=1_000,
            hidden=128,
            layers=4,
            heads=4,
            kv_heads=2,
            head_dim=32,
            intermediate=256,
            moe_intermediate=64,
            max_positions=4_096,
            dtype="float32",
        ),
        # A small decoder under a full vocabulary: sampling weighs as much as it does on the last
        # stage of a large model.
        "bench": Shape(
            vocab=151_936,
            hidden=512,
            layers=8,
            heads=8,
            kv_heads=4,
            head_dim=64,
            intermediate=1_536,
            moe_intermediate=256,
        ),
        # The shape of Qwen2.5-0.5B with embeddings untied.
        "qwen2.5-0.5b": Shape(
            vocab=151_936,
            hidden=896,
            layers=24,
            heads=14,
            kv_heads=2,
            head_dim=64,
            intermediate=4_864,
        ),
    }
)
