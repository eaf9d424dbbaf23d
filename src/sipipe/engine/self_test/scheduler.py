"""A scheduler of vLLM's for the self-test's requests, before the engine has its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.structured_output import StructuredOutputManager


def make_scheduler(vllm_config: VllmConfig, kv_caches: Sequence[KVCacheConfig]) -> Scheduler:
    """The scheduler, made as vLLM's engine core makes its own. Nothing of it is seen outside: no
    prefix is cached, no event is published, nothing is drafted. ``kv_caches``: of the workers."""
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.cache_config.enable_prefix_caching = False
    config.kv_events_config = None
    config.speculative_config = None
    cache = generate_scheduler_kv_cache_config(list(kv_caches))
    block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
