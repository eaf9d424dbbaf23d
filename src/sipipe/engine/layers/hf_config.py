"""Model facts from the fields of a Hugging Face ``config.json``."""

import reprlib
from collections.abc import Mapping
from typing import Any

from sipipe.engine.layers.bonds import bonds_of
from sipipe.engine.layers.facts import Attention, MixtureOfExperts, ModelFacts
from sipipe.errors import ConfigError, UnsupportedError

# Beginnings of fields of layers that are no attention.
_NOT_DESCRIBED = ("ssm", "mamba", "linear_attn", "linear_num", "linear_conv", "rwkv")
# Feed-forward blocks of two projections instead of the three of a gated one.
_UNGATED = {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi"} | {
    "starcoder2"
}
# Bounds on numbers in a config.json, far above any model's.
_MOST_LAYERS = 10_000
_MOST = 1 << 40
# Bits per weight by method of quantization, with the scales of its groups.
_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "awq": 4.25, "gptq": 4.25, "mxfp4": 4.25, "nvfp4": 4.5}
# Bits of the products, where the method also quantizes activations.
_ARITHMETIC = {"fp8": 8, "fbgemm_fp8": 8, "nvfp4": 4}


def facts_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    source: str = "config.json",
    weight_bits: float | None = None,
) -> ModelFacts:
    """Facts from the fields of a ``config.json``.

    Args:
        config: the parsed file; a multimodal one may nest the fields in ``text_config``.
        name: what the serve command will call the model; errors name ``source``.
        weight_bits: bits per weight of the layers; None takes the file's quantization and dtype.

    Raises ConfigError: fields are missing (all are named) or are not positive whole numbers.
    UnsupportedError: state-space and linear attention layers, encoder-decoder.
    """
    vision = config.get("vision_config")
    if isinstance(config.get("text_config"), Mapping):
        config = {**config, **config["text_config"]}
    _refuse_undescribed(config, source)
    fields = _Fields(config, source)
    layers = fields.number("num_hidden_layers", most=_MOST_LAYERS)
    hidden = fields.number("hidden_size")
    vocabulary = fields.number("vocab_size")
    attention = _attention(fields, hidden)
    moe, sparse, width = _mixture(fields, layers, hidden)
    dense = 0
    if len(sparse) < layers:
        projections = 2 if str(config.get("model_type")) in _UNGATED else 3
        dense_width = fields.number("intermediate_size")
        dense = projections * hidden * dense_width
        width = min(width, dense_width) if width else dense_width
    fields.finish()
    dtype = str(config.get("dtype") or config.get("torch_dtype")).lower()
    activation = 4 if dtype == "float32" else 2
    bits, block, arithmetic = _weight_bits(config, source, activation, weight_bits)
    return ModelFacts(
        name=name,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        attention=attention,
        dense_parameters=dense,
        moe=moe,
        sparse_layers=frozenset(sparse),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        intermediate=width,
        weight_bytes=bits / 8,
        arithmetic_bits=arithmetic,
        activation_bytes=activation,
        block=block,
        context_length=fields.optional("max_position_embeddings"),
        source=source,
        bonds=bonds_of(config, vision if isinstance(vision, Mapping) else {}),
    )


class _Fields:
    """Reader of positive whole numbers of a config.json, which collects the names that are missing."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source
        self._missing: list[str] = []

    def number(
        self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST
    ) -> int:
        """The first of ``names`` that is there, or ``default``. Without one the names are noted as
        missing, and 1 stands for the number. Raises ConfigError: it is no whole number in bounds."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(
                    f"MODEL: {self.source}: {name} must be a whole number from {least} to "
                    f"{most:,}, not {reprlib.repr(value)}"
                )
            return value
        if default is None:
            self._missing.append(" or ".join(names))
        return 1 if default is None else default

    def optional(self, name: str) -> int:
        """A whole number of 0 or more; 0 where the field is missing or null."""
        return self.number(name, default=0, least=0)

    def finish(self) -> None:
        """Raise ConfigError, which names every field that was missing, if any was."""
        if self._missing:
            raise ConfigError(
                f"MODEL: {self.source} lacks {', '.join(self._missing)}; "
                "a config.json of a decoder-only transformer has them"
            )


def _refuse_undescribed(config: Mapping[str, Any], source: str) -> None:
    """Raise UnsupportedError if the model has layers whose sizes these facts cannot describe."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    if not isinstance(kinds, list):
        raise ConfigError(f"MODEL: {source}: layer_types must be a list")
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    unknown += sorted(key for key in config if key.lower().startswith(_NOT_DESCRIBED))
    if config.get("is_encoder_decoder"):
        unknown.append("is_encoder_decoder")
    if unknown:
        raise UnsupportedError(
            f"MODEL: {source} describes layers that the performance model does not know "
            f"({', '.join(unknown[:4])}); it covers decoder-only transformers with full attention"
        )


def _attention(fields: _Fields, hidden: int) -> Attention:
    config = fields.config
    heads = fields.number("num_attention_heads")
    if fields.optional("kv_lora_rank"):
        return _latent_attention(fields, hidden, heads)
    kv_heads = fields.number("num_key_value_heads", default=heads)
    head_dim = fields.number("head_dim", default=max(1, hidden // heads))
    q = heads * head_dim
    kv = kv_heads * head_dim
    parameters = hidden * (q + 2 * kv) + q * hidden
    family = str(config.get("model_type", ""))
    if family.startswith("qwen2") or config.get("attention_bias"):
        parameters += q + 2 * kv
    if family.startswith("qwen3"):
        parameters += 2 * head_dim  # norms of queries and keys
    return Attention(
        kind="gqa", heads=heads, kv_heads=kv_heads, head_dim=head_dim, parameters=parameters
    )


def _latent_attention(fields: _Fields, hidden: int, heads: int) -> Attention:
    """Multi-head latent attention, as DeepSeek's models have it."""
    rank = fields.number("kv_lora_rank")
    rope = fields.number("qk_rope_head_dim")
    nope = fields.number("qk_nope_head_dim")
    value = fields.number("v_head_dim")
    q_rank = fields.optional("q_lora_rank")
    q_out = heads * (nope + rope)
    query = hidden * q_rank + q_rank + q_rank * q_out if q_rank else hidden * q_out
    latent = hidden * (rank + rope) + rank + rank * heads * (nope + value)
    return Attention(
        kind="mla",
        heads=heads,
        kv_heads=1,
        head_dim=nope,
        parameters=query + latent + heads * value * hidden,
        kv_rank=rank,
        rope_dim=rope,
        value_dim=value,
    )


def _mixture(
    fields: _Fields, layers: int, hidden: int
) -> tuple[MixtureOfExperts | None, list[int], int]:
    """The sparse layer, the indices of the layers that have it, and the width of one expert. Without
    experts: None, no layers and 0."""
    config = fields.config
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    if not any(fields.optional(name) for name in names):
        return None, [], 0
    experts = fields.number(*names)
    chosen = fields.number("num_experts_per_tok", "experts_per_token")
    if chosen > experts:
        raise ConfigError(
            f"MODEL: {fields.source}: num_experts_per_tok is {chosen}, "
            f"but there are only {experts} experts"
        )
    width = fields.number("moe_intermediate_size", "intermediate_size")
    shared = fields.optional("n_shared_experts") * width
    shared = fields.optional("shared_expert_intermediate_size") or shared
    first = fields.optional("first_k_dense_replace")
    every = fields.optional("moe_layer_freq")
    step = every or fields.optional("decoder_sparse_step") or 1
    offset = 0 if every else 1  # Qwen counts layers from 1
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise ConfigError(f"MODEL: {fields.source}: mlp_only_layers must be a list")
    dense = {layer for layer in listed if isinstance(layer, int)}
    every_step = (layer for layer in range(first, layers) if (layer + offset) % step == 0)
    sparse = [layer for layer in every_step if layer not in dense]
    moe = MixtureOfExperts(
        experts=experts,
        chosen=chosen,
        expert_parameters=3 * hidden * width,
        shared_parameters=3 * hidden * shared + hidden * experts,
    )
    return (moe, sparse, width) if sparse else (None, [], 0)


def _weight_bits(
    config: Mapping[str, Any], source: str, activation: int, override: float | None
) -> tuple[float, int, int]:
    """Bits per weight, the columns of one quantization block, and the width of the products."""
    if override is not None:
        return override, 1, 8 if override == 8 else 16
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return 8.0 * activation, 1, 16
    method = str(quantization.get("quant_method", ""))
    if method == "modelopt":
        method = str(quantization.get("quant_algo", "")).lower()
    sizes = quantization.get("weight_block_size")
    block = sizes[0] if isinstance(sizes, list) and sizes and isinstance(sizes[0], int) else 1
    block = max(1, block)
    bits = quantization.get("bits", quantization.get("w_bit"))
    if isinstance(bits, int) and bits > 0:
        group = quantization.get("group_size", quantization.get("q_group_size")) or 0
        # Each group of weights has a scale of 16 bits.
        overhead = 16 / group if isinstance(group, int) and group > 0 else 0.0
        return bits + overhead, block, 16
    if method in _BITS:
        return _BITS[method], block, _ARITHMETIC.get(method, 16)
    raise ConfigError(
        f"MODEL: {source}: cannot tell the bits per weight from "
        f"quantization_config.quant_method {method!r}; give them with --weight-bits"
    )
