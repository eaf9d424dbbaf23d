"""Model families: what config.json says and which tensors a checkpoint holds.

Names and shapes are those of the published checkpoints, so that vLLM's and transformers' own
loaders take them. Every matrix is drawn with variance 1 / fan-in around normalised inputs: the
next token depends on the whole context, and logits have a standard deviation of about
``LOGITS_STD``, so that temperature, top-k, top-p and min-p all have something to cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from sipipe.tools.make_model.shapes import Shape

__all__ = ["FAMILIES", "LOGITS_STD", "Family", "TensorSpec"]

LOGITS_STD = 3.0

# DeepSeek's latent attention; vLLM's CPU kernel is compiled for a latent of 512 + 64 only.
KV_LORA_RANK = 512
QK_ROPE_DIM = 64


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint, drawn from N(mean, std^2)."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    dtype: str | None = None
    """None: the checkpoint's element type."""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One model family; ``config`` and ``layer`` are functions of the shape."""

    name: str
    config: Callable[[Shape], dict[str, Any]]
    layer: Callable[[Shape, int], Iterator[TensorSpec]]
    moe: bool = False

    def tensors(self, shape: Shape) -> Iterator[TensorSpec]:
        """Every tensor of the checkpoint, in the order of the layers."""
        yield TensorSpec("model.embed_tokens.weight", (shape.vocab, shape.hidden), 1.0)
        for index in range(shape.layers):
            yield from self.layer(shape, index)
        yield _norm("model.norm", shape.hidden)
        yield TensorSpec(
            "lm_head.weight", (shape.vocab, shape.hidden), LOGITS_STD / math.sqrt(shape.hidden)
        )


def _linear(name: str, out: int, fan_in: int) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (out, fan_in), 1.0 / math.sqrt(fan_in))


def _norm(name: str, size: int) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (size,), 0.1, mean=1.0)


def _norms(shape: Shape, prefix: str) -> Iterator[TensorSpec]:
    yield _norm(f"{prefix}.input_layernorm", shape.hidden)
    yield _norm(f"{prefix}.post_attention_layernorm", shape.hidden)


def _attention(
    shape: Shape, prefix: str, *, bias: bool = False, head_norm: bool = False
) -> Iterator[TensorSpec]:
    """Grouped-query attention: q, k, v [heads * head_dim, hidden], o its transpose."""
    width = {"q": shape.heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim}
    width["v"] = width["k"]
    for name, out in width.items():
        yield _linear(f"{prefix}.self_attn.{name}_proj", out, shape.hidden)
        if bias:
            yield TensorSpec(f"{prefix}.self_attn.{name}_proj.bias", (out,), 0.1)
        if head_norm and name != "v":
            yield _norm(f"{prefix}.self_attn.{name}_norm", shape.head_dim)
    yield _linear(f"{prefix}.self_attn.o_proj", shape.hidden, width["q"])


def _latent_attention(shape: Shape, prefix: str) -> Iterator[TensorSpec]:
    """DeepSeek's multi-head latent attention, queries and keys/values through low ranks."""
    nope, value = shape.head_dim, shape.head_dim
    query_rank = max(shape.hidden // 2, 32)
    attention = f"{prefix}.self_attn"
    yield _linear(f"{attention}.q_a_proj", query_rank, shape.hidden)
    yield _norm(f"{attention}.q_a_layernorm", query_rank)
    yield _linear(f"{attention}.q_b_proj", shape.heads * (nope + QK_ROPE_DIM), query_rank)
    yield _linear(f"{attention}.kv_a_proj_with_mqa", KV_LORA_RANK + QK_ROPE_DIM, shape.hidden)
    yield _norm(f"{attention}.kv_a_layernorm", KV_LORA_RANK)
    yield _linear(f"{attention}.kv_b_proj", shape.heads * (nope + value), KV_LORA_RANK)
    yield _linear(f"{attention}.o_proj", shape.hidden, shape.heads * value)


def _feed_forward(
    prefix: str,
    hidden: int,
    intermediate: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[TensorSpec]:
    gate, up, down = names
    yield _linear(f"{prefix}.{gate}", intermediate, hidden)
    yield _linear(f"{prefix}.{up}", intermediate, hidden)
    yield _linear(f"{prefix}.{down}", hidden, intermediate)


def _llama_layer(shape: Shape, index: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{index}"
    yield from _norms(shape, prefix)
    yield from _attention(shape, prefix)
    yield from _feed_forward(f"{prefix}.mlp", shape.hidden, shape.intermediate)


def _qwen2_layer(shape: Shape, index: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{index}"
    yield from _norms(shape, prefix)
    yield from _attention(shape, prefix, bias=True)
    yield from _feed_forward(f"{prefix}.mlp", shape.hidden, shape.intermediate)


def _qwen3_moe_layer(shape: Shape, index: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{index}"
    yield from _norms(shape, prefix)
    yield from _attention(shape, prefix, head_norm=True)
    yield _linear(f"{prefix}.mlp.gate", shape.experts, shape.hidden)
    for expert in range(shape.experts):
        yield from _feed_forward(
            f"{prefix}.mlp.experts.{expert}", shape.hidden, shape.moe_intermediate
        )


def _mixtral_layer(shape: Shape, index: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{index}"
    moe = f"{prefix}.block_sparse_moe"
    yield from _norms(shape, prefix)
    yield from _attention(shape, prefix)
    yield _linear(f"{moe}.gate", shape.experts, shape.hidden)
    for expert in range(shape.experts):
        yield from _feed_forward(
            f"{moe}.experts.{expert}", shape.hidden, shape.moe_intermediate, ("w1", "w3", "w2")
        )


def _deepseek_layer(shape: Shape, index: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{index}"
    yield from _norms(shape, prefix)
    yield from _latent_attention(shape, prefix)
    if index == 0:  # first_k_dense_replace
        yield from _feed_forward(f"{prefix}.mlp", shape.hidden, shape.intermediate)
        return
    yield _linear(f"{prefix}.mlp.gate", shape.experts, shape.hidden)
    yield TensorSpec(
        f"{prefix}.mlp.gate.e_score_correction_bias", (shape.experts,), 0.01, dtype="float32"
    )
    for expert in range(shape.experts):
        yield from _feed_forward(
            f"{prefix}.mlp.experts.{expert}", shape.hidden, shape.moe_intermediate
        )
    yield from _feed_forward(f"{prefix}.mlp.shared_experts", shape.hidden, shape.moe_intermediate)


def _base_config(shape: Shape, architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
    } | more


def _llama_config(shape: Shape) -> dict[str, Any]:
    return _base_config(shape, "LlamaForCausalLM", "llama", attention_bias=False, mlp_bias=False)


def _qwen2_config(shape: Shape) -> dict[str, Any]:
    return _base_config(shape, "Qwen2ForCausalLM", "qwen2", use_sliding_window=False)


def _qwen3_moe_config(shape: Shape) -> dict[str, Any]:
    return _base_config(
        shape,
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        attention_bias=False,
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.moe_intermediate,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        use_sliding_window=False,
    )


def _mixtral_config(shape: Shape) -> dict[str, Any]:
    config = _base_config(
        shape,
        "MixtralForCausalLM",
        "mixtral",
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        sliding_window=None,
    )
    config["intermediate_size"] = shape.moe_intermediate
    return config


def _deepseek_config(shape: Shape) -> dict[str, Any]:
    config = _base_config(
        shape,
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        attention_bias=False,
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
    config["num_key_value_heads"] = shape.heads
    del config["head_dim"]  # transformers takes the rotary part of a latent head for it
    return config


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            Family("llama", _llama_config, _llama_layer),
            Family("qwen2", _qwen2_config, _qwen2_layer),
            Family("qwen3-moe", _qwen3_moe_config, _qwen3_moe_layer, moe=True),
            Family("mixtral", _mixtral_config, _mixtral_layer, moe=True),
            Family("deepseek-v3", _deepseek_config, _deepseek_layer, moe=True),
        )
    }
)
