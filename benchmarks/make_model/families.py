"""Sizes of generated models, and families: the ``config.json`` of each, for a size.

transformers builds the model from it, so names and shapes of the tensors are those of the published
checkpoints, which vLLM's and transformers' own loaders take.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any


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


SIZES: Mapping[str, Shape] = {
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


# DeepSeek's latent attention; vLLM's CPU kernel is compiled for a latent of 512 + 64 only.
KV_LORA_RANK = 512
QK_ROPE_DIM = 64


def _base(model_type: str, shape: Shape, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 2,
    } | more


def _deepseek_v3(shape: Shape) -> dict[str, Any]:
    config = _base(
        "deepseek_v3",
        shape,
        num_key_value_heads=shape.heads,
        kv_lora_rank=KV_LORA_RANK,
        q_lora_rank=max(shape.hidden // 2, 32),
        qk_rope_head_dim=QK_ROPE_DIM,
        qk_nope_head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        n_routed_experts=shape.experts,
        n_shared_experts=1,
        num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.moe_intermediate,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        num_nextn_predict_layers=0,
    )
    del config["head_dim"]  # transformers takes the rotary part of a latent head for it
    return config


FAMILIES: Mapping[str, Callable[[Shape], dict[str, Any]]] = {
    "llama": functools.partial(_base, "llama"),
    "qwen2": functools.partial(_base, "qwen2"),
    "qwen3-moe": lambda shape: _base(
        "qwen3_moe",
        shape,
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.moe_intermediate,
        norm_topk_prob=True,
    ),
    "mixtral": lambda shape: _base(
        "mixtral",
        shape,
        intermediate_size=shape.moe_intermediate,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        sliding_window=None,
    ),
    "deepseek-v3": _deepseek_v3,
}
"""The fields of config.json, by the name of the family."""

MIXTURES = frozenset({"qwen3-moe", "mixtral", "deepseek-v3"})
"""Families that are mixtures of experts, and so need a size with experts."""
