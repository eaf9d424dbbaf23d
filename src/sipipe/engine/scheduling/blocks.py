"""KV cache blocks of sequences that decode: with one token, most steps need none and fill none.

vLLM asks its KV cache manager for every row of every microbatch, before it runs and when its token has
come: over half of what its scheduler does for a row. A plain cache has full attention, and blocks of
one size: there the answer follows from the row's position alone, but at the first and last token of a
block.

Who runs here: the engine's thread.
"""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request


def answer_shortly(manager: KVCacheManager) -> None:
    """Have ``manager`` asked in full only at the ends of blocks, where its cache is a plain one."""
    managers = manager.coordinator.single_type_managers
    if [type(of_one_type) for of_one_type in managers] != [FullAttentionManager]:
        return
    block_size = managers[0].block_size
    if block_size != managers[0].block_pool.hash_block_size:  # parts of blocks are cached too
        return
    cached_blocks = managers[0].num_cached_block  # by request
    no_blocks = manager.empty_kv_cache_blocks
    caches = manager.enable_caching
    allocate = manager.allocate_slots
    cache = manager.cache_blocks

    def allocate_slots(
        request: Request,
        num_new_tokens: int,
        *others: Any,
        num_lookahead_tokens: int = 0,
        **named: Any,
    ) -> KVCacheBlocks | None:
        computed = request.num_computed_tokens
        plain = num_new_tokens == 1 and not (num_lookahead_tokens or others or named)
        # After drafts, a full block before the last one may be still to be cached.
        full_blocks = computed // block_size
        all_cached = not caches or cached_blocks.get(request.request_id, 0) >= full_blocks
        # The block that its last token is in has room, and is not full with this one.
        if plain and all_cached and 0 < computed % block_size < block_size - 1:
            return no_blocks
        named["num_lookahead_tokens"] = num_lookahead_tokens
        return allocate(request, num_new_tokens, *others, **named)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if cached_blocks.get(request.request_id, 0) < num_computed_tokens // block_size:
            cache(request, num_computed_tokens)

    manager.allocate_slots = allocate_slots
    manager.cache_blocks = cache_blocks
