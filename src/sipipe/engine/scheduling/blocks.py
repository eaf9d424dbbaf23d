"""KV cache blocks of sequences that decode: of one token most steps need none and fill none.

vLLM asks its KV cache manager for every row of every microbatch, before it runs and when its token has
come: over half of what its scheduler does for a row. Of a plain cache, full attention with blocks of one
size, the answer is known from the row's position alone but at the first and last token of a block.
"""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request


def answer_shortly(manager: KVCacheManager) -> None:
    """Have ``manager`` asked in full only at the ends of blocks, where its cache is a plain one."""
    managers = manager.coordinator.single_type_managers
    if [type(one) for one in managers] != [FullAttentionManager]:
        return
    block, cached = managers[0].block_size, managers[0].num_cached_block
    if block != managers[0].block_pool.hash_block_size:  # parts of blocks are cached too
        return
    allocate, cache = manager.allocate_slots, manager.cache_blocks
    none, caches = manager.empty_kv_cache_blocks, manager.enable_caching

    def allocate_slots(
        request: Request,
        num_new_tokens: int,
        *others: Any,
        num_lookahead_tokens: int = 0,
        **named: Any,
    ) -> KVCacheBlocks | None:
        computed = request.num_computed_tokens
        # The block that its last token is in has room, and is not full with this one. After drafts
        # one before it may be still to be cached.
        plain = num_new_tokens == 1 and not (num_lookahead_tokens or others or named)
        told = not caches or cached.get(request.request_id, 0) >= computed // block
        if plain and told and 0 < computed % block < block - 1:
            return none
        named["num_lookahead_tokens"] = num_lookahead_tokens
        return allocate(request, num_new_tokens, *others, **named)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if cached.get(request.request_id, 0) < num_computed_tokens // block:
            cache(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
