"""Which models and options SiPipe's stage runner takes, and in one line why not."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

SUPPORTED_CACHES = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
)
"""Kinds of KV cache whose block table and slots the stage runner fills. Exact classes: a subclass
may mean another layout."""


def unsupported_reason(stock: Any) -> str | None:
    """Why the loaded ``stock`` runner's model must be run by vLLM itself, or None.

    Static for the engine's life, and the same on every rank of every stage (it depends on the
    configuration and on the kinds of KV cache, not on a stage's layers' weights).
    """
    config = stock.vllm_config
    model = config.model_config
    parallel = config.parallel_config
    if getattr(stock, "input_batch", None) is None:
        return "vLLM's second model runner has no interface that SiPipe's stage runner can own"
    if config.speculative_config is not None:
        return "speculative decoding (--speculative-config)"
    if stock.is_pooling_model:
        return "a pooling model (--runner pooling)"
    if model.is_encoder_decoder:
        return "an encoder-decoder model"
    if stock.supports_mm_inputs:
        return "a model with multi-modal inputs"
    if stock.uses_mrope or getattr(stock, "uses_xdrope_dim", 0):
        return "multi-dimensional rotary positions (M-RoPE)"
    if stock.enable_prompt_embeds:
        return "prompt embeddings (--enable-prompt-embeds)"
    if stock.lookback_token_ids is not None:
        return "a model that reads earlier token ids besides its inputs"
    if getattr(model, "rswa_window", None) is not None:
        return "reference sliding window attention"
    if getattr(model, "enable_return_routed_experts", False):
        return "returning routed experts (--enable-return-routed-experts)"
    if parallel.data_parallel_size > 1:
        return "data parallelism (--data-parallel-size above 1)"
    if parallel.decode_context_parallel_size > 1 or (
        getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return "context parallelism"
    if parallel.use_ubatching:
        return "dual-batch overlap (--enable-dbo)"
    if parallel.enable_eplb:
        return "expert load balancing (--enable-eplb)"
    if config.kv_transfer_config is not None:
        return "a KV connector (--kv-transfer-config)"
    if getattr(config, "ec_transfer_config", None) is not None:
        return "an encoder-cache connector (--ec-transfer-config)"
    if config.cache_config.kv_sharing_fast_prefill:
        return "--kv-sharing-fast-prefill"
    if stock.use_aux_hidden_state_outputs:
        return "auxiliary hidden state outputs"
    return _unsupported_cache(stock)


def _unsupported_cache(stock: Any) -> str | None:
    groups = stock.kv_cache_config.kv_cache_groups
    if not groups:
        return "a stage without attention layers"
    for group in groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        if type(spec) not in SUPPORTED_CACHES:
            return f"KV cache of kind {type(spec).__name__} (recurrent, hybrid or encoder state)"
    return None
