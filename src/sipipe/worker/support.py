"""Which loaded models SiPipe's stage runner takes, and in one line why not.

What the configuration alone decides is :mod:`sipipe.engine.compatibility`'s, before a model is
loaded.
"""

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


def unsupported_reason(vllm_runner: Any) -> str | None:
    """Why the model that ``vllm_runner`` has loaded must be run by vLLM itself, or None.

    Static for the engine's life, and the same on every rank of every stage (it depends on the
    configuration and on the kinds of KV cache, not on a stage's layers' weights).
    """
    runner, config = vllm_runner, vllm_runner.vllm_config
    if runner.device.type != "cpu":
        return (
            f"a {runner.device.type} device: SiPipe's stage runner runs on CPUs; "
            "GPU stages come with vLLM's second runner"
        )
    if getattr(runner, "input_batch", None) is None:
        return "vLLM's second model runner has no interface that SiPipe's stage runner can own"
    reasons = {
        "multi-dimensional rotary positions (M-RoPE)": runner.uses_mrope,
        "a model that reads earlier token ids besides its inputs": (
            runner.lookback_token_ids is not None
        ),
        "reference sliding window attention": getattr(config.model_config, "rswa_window", None)
        is not None,
        "dual-batch overlap (--enable-dbo)": config.parallel_config.use_ubatching,
        "--kv-sharing-fast-prefill": config.cache_config.kv_sharing_fast_prefill,
        "auxiliary hidden state outputs": runner.use_aux_hidden_state_outputs,
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    return _unsupported_cache(runner.kv_cache_config.kv_cache_groups)


def _unsupported_cache(groups: Any) -> str | None:
    if not groups:
        return "a stage without attention layers"
    for group in groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        if type(spec) not in SUPPORTED_CACHES:
            return f"KV cache of kind {type(spec).__name__} (recurrent, hybrid or encoder state)"
    return None
