"""Blocks of the KV cache that hold what nobody may read: a connector did not fill them, or they have NaN.

vLLM computes a prompt again whose blocks were not loaded. SiPipe's scheduler is ahead of the results, so
other requests may have computed with such blocks before that is known: their blocks leave the prefix
cache too. And requests begin anew instead of in place, because the samplers know their tokens.

Who runs here: the engine's thread only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Set
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from sipipe.engine.iteration.kv_loads import KVLoads
from sipipe.engine.iteration.session_scheduler import SessionScheduler


class WrongBlocksScheduler(SessionScheduler):
    """Mixin in front of any scheduler of vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kv_loads: KVLoads | None = None
        connector = getattr(self, "connector", None)
        if connector is not None:
            self._kv_loads = KVLoads(connector, block_sizes=self._block_sizes())

    def _block_sizes(self) -> list[int]:
        """Tokens a block of each group of the KV cache; of recurrent layers perhaps more."""
        groups = self.kv_cache_config.kv_cache_groups  # type: ignore[attr-defined]
        if len(groups) == 1:
            return [self.block_size]  # type: ignore[attr-defined]
        parallel = self.vllm_config.parallel_config
        ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        return [group.kv_cache_spec.block_size * ranks for group in groups]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule an iteration, whose workers are told of the loads that have failed here."""
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        if self._kv_loads is not None:
            output.kv_loads = self._kv_loads.take()
        return output

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """vLLM's answer to blocks that were not loaded: requests whose output is left out.

        A running request that is to be computed anew begins anew, as after a preemption. vLLM would
        go on with it in place; its token of this iteration is drawn and known to the samplers.
        """
        loaders: set[str] = set()
        if self._kv_loads is not None:
            loaders = self._kv_loads.fail(invalid_block_ids, set())
        if len(self.kv_cache_config.kv_cache_groups) > 1:  # type: ignore[attr-defined]
            failed = self._take_out(invalid_block_ids, loaders & num_scheduled_tokens.keys())
        else:
            self._evict_behind(invalid_block_ids, num_scheduled_tokens)
            failed = super()._handle_invalid_blocks(  # type: ignore[misc]
                invalid_block_ids, num_scheduled_tokens
            )
        if not self.recompute_kv_load_failures:  # type: ignore[attr-defined]
            return failed
        for request in [one for one in reversed(self.running) if one.request_id in failed]:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)  # type: ignore[attr-defined]
            self._forgive(request.request_id)
        return failed

    def _take_out(self, invalid: Set[int], loaders: Set[str]) -> set[str]:
        """Answer as vLLM's ``_handle_invalid_blocks`` where the KV cache has several groups, for which it
        ends the engine: it takes a number for that of a block in each group. Its pool of blocks is one
        for all groups, so a number is one block of one group.

        A group's blocks do not say where in another's those lie that were computed with them, so nothing
        stays in the prefix cache.

        Args:
            invalid: Numbers of the blocks.
            loaders: Requests of this iteration for which they were loaded.

        Returns: Requests whose output is left out.
        """
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        manager.evict_blocks(set(range(len(manager.block_pool.blocks))))

        def holders(requests: Iterable[Request]) -> set[str]:
            return {
                request.request_id
                for request in requests
                if not invalid.isdisjoint(self.blocks_of([request.request_id]))
            }

        # A request that waits for a load of its own may have hit these blocks before.
        waiting = holders(
            request
            for request in self.kv_holding_waiting  # type: ignore[attr-defined]
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        )
        running = {request.request_id for request in self.running}
        failed: set[str] = holders(self.running) | (loaders & running)
        return failed | self._handle_failed_recving(waiting)

    def _evict_behind(self, invalid: Set[int], batch: Mapping[str, int]) -> None:
        """Take blocks that were not loaded out of the prefix cache, and all that may have been computed
        with what lay in them.

        A request that was scheduled after the load may have hit them, and has its own blocks behind
        them in the cache. vLLM leaves those there: once the others are computed anew, they would be
        hit as if they were right. Of a request that has left meanwhile nobody knows the blocks: then
        nothing stays cached.

        Args:
            invalid: Numbers of the blocks.
            batch: The requests of the iteration that reports them, with their tokens.
        """
        blocks = self.kv_cache_manager.block_pool.blocks  # type: ignore[attr-defined]
        numbers = range(len(blocks))
        if not any(number in numbers and blocks[number].block_hash for number in invalid):
            return  # what a request waits for is cached when it has come
        running = {request.request_id for request in self.running}
        wrong: set[int] = set()
        if self.iterations.requests() | batch.keys() <= running:
            for request_id in running:
                for held in self.kv_cache_manager.get_block_ids(request_id):  # type: ignore[attr-defined]
                    wrong.update(itertools.dropwhile(lambda number: number not in invalid, held))
        else:
            wrong.update(numbers)
        self.kv_cache_manager.evict_blocks(wrong)  # type: ignore[attr-defined]

    def _forgive(self, request_id: str) -> None:
        """Let a request go on that has no token of this iteration, whose blocks were not loaded: what
        lay in them may give logits without a distribution."""
        errors = self.grammar_compile_error_reqs  # type: ignore[attr-defined]
        if isinstance(errors, dict):  # vLLM 0.33
            errors.pop(request_id, None)
        else:
            errors.discard(request_id)

    def _handle_failed_recving(self, failed_req_ids: set[str]) -> set[str]:
        if self._kv_loads is not None:
            requests = self.requests
            # One that has left is forgotten already, and nobody would forget it again.
            waiting = {
                name
                for name in failed_req_ids
                if name in requests and not requests[name].is_finished()
            }
            self._kv_loads.fail(set(), waiting)
        failed: set[str] = super()._handle_failed_recving(failed_req_ids)  # type: ignore[misc]
        return failed

    def _connector_finished(self, request: Request) -> Any:
        if self._kv_loads is not None:
            self._kv_loads.forget(request.request_id)
        return super()._connector_finished(request)  # type: ignore[misc]

    def clear_blocks(self) -> None:
        """Have blocks of the KV cache zeroed from now on for whoever has them next.

        There may be NaN in those of a request that failed, or of a draft. vLLM's attention on CPUs
        multiplies what is masked by 0, which leaves NaN. Only after a failure: zeroing costs the
        memory's bandwidth.
        """
        if current_platform.is_cpu():
            self.needs_kv_cache_zeroing = True
            for manager in self.kv_cache_manager.coordinator.single_type_managers:  # type: ignore[attr-defined]
                manager._record_new_block_ids = True

    def blocks_of(self, request_ids: Iterable[str]) -> set[int]:
        """Numbers of the KV cache blocks that requests hold."""
        return {
            number
            for request_id in request_ids
            for group in self.kv_cache_manager.get_block_ids(request_id)  # type: ignore[attr-defined]
            for number in group
        }
