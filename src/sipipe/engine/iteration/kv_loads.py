"""Faults of the engine's side of a KV connector that may not end the engine.

A connector saves time: a prompt whose cache it does not bring is computed. So what its methods raise,
or answer that no prompt can have (a number below 0, or more tokens than there are), counts as "nothing
stored". What methods beside a load raise (:data:`OTHERWISE`) counts as "nothing to say". vLLM takes a
wrong answer as it is, and its front end ends, or an assertion of its scheduler fails. Blocks that a
connector was given to fill, and then raises for, are told to the workers, which report them as not
loaded (:mod:`sipipe.worker.hooks.kv_connector`).

Who runs here: the engine's thread.
Rejected: a connector around the connector, as MultiConnector is. vLLM asks its connector for its
    class (``SupportsHMA``), and connectors reach into one another by attributes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence, Set
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger

from sipipe.messages.kv_load import KVLoad

logger = init_logger(f"vllm.{__name__}")

OTHERWISE: dict[str, Any] = {
    "on_new_request": None,
    "get_loaded_kv_cache_group_ids": (),
    "get_external_cache_hit_sources": {},
    "request_finished": (False, None),
    "request_finished_all_groups": (False, None),
    "register_finished_partial_tail": False,
    "update_connector_output": None,
    "has_pending_block_frees": False,
    "has_pending_push_work": False,
    "get_kv_connector_stats": None,
    "take_events": (),
    "reset_cache": False,
}
"""Answers in the place of what methods of the engine's side raise, by method: the connector has nothing,
keeps no block, and has not done what it was asked for."""


NO_BLOCK = 0
"""Number in the place of a block that a request does not need, as before a window."""


class KVLoads:
    """The loads of a scheduler's connector, whose methods it stands in for.

    ``block_sizes``: tokens a block of each group of the KV cache.
    """

    def __init__(self, connector: Any, *, block_sizes: Sequence[int]) -> None:
        self._connector = connector
        self._block_sizes = block_sizes
        self._matches = connector.get_num_new_matched_tokens
        self._allocates = connector.update_state_after_alloc
        self._builds = connector.build_connector_meta
        self._local: dict[str, tuple[int, bool]] = {}
        """Tokens that a request had when it was matched last, and whether it waits for the others."""
        self._asked: list[KVLoad] = []
        """Loads of the scheduling output that is being made."""
        self._blocks: dict[str, frozenset[int]] = {}
        """Blocks of each request that a connector was to load last."""
        self._failed: set[str] = set()
        """Requests whose load failed: they are computed, as it would fail again."""
        self._logged: set[str] = set()
        """Methods whose failure was logged."""
        connector.get_num_new_matched_tokens = self._match
        connector.update_state_after_alloc = self._allocate
        connector.build_connector_meta = self._build
        for name, answer in OTHERWISE.items():
            method = getattr(connector, name, None)
            if method is not None:  # some are of vLLM 0.33, or of connectors of several groups
                setattr(connector, name, self._guard(name, method, answer))

    def take(self) -> list[KVLoad]:
        """The loads since the last call: those of the scheduling output that has just been made."""
        requests = self._asked
        self._asked = []
        return requests

    def fail(self, invalid: Set[int], requests: Set[str]) -> set[str]:
        """Take in what could not be loaded: blocks, by number, and requests, by name. Returns the requests
        that had one of these blocks among those that were loaded for them last: they may have given it
        back since, as what lies before a window."""
        loaders = {
            request_id
            for request_id, blocks in self._blocks.items()
            if not blocks.isdisjoint(invalid)
        }
        self._failed |= requests | loaders
        return loaders

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._local.pop(request_id, None)
        self._blocks.pop(request_id, None)
        self._failed.discard(request_id)

    def _match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's question: how many tokens more are stored, and does the request wait for them?"""
        if request.request_id in self._failed:
            return 0, False
        try:
            count, waits = self._matches(request, num_computed_tokens)
        except Exception as error:
            self._log("get_num_new_matched_tokens", f"{type(error).__name__}: {error}")
            return 0, False
        # Some token must be computed in the iteration that samples; who waits computes it later.
        most = request.num_tokens - num_computed_tokens - (not waits)
        if count is not None and not 0 <= count <= most:
            # One block more in the prefix cache than in the store is such an answer: no failure.
            if count > most:
                self._log("get_num_new_matched_tokens", f"{count} tokens, of {most} that may be")
            return 0, False
        self._local[request.request_id] = (num_computed_tokens, bool(waits))
        return count, waits

    def _allocate(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM's word that the request has blocks for the tokens that were found."""
        reason = ""
        try:
            self._allocates(request, blocks, num_external_tokens)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._log("update_state_after_alloc", reason)
        if not num_external_tokens:
            return
        local, waits = self._local[request.request_id]
        numbers: tuple[int, ...] = ()
        if len(self._block_sizes) == 1:
            (size,) = self._block_sizes
            end = -(-(local + num_external_tokens) // size)
            numbers = tuple(blocks.get_block_ids()[0][local // size : end])
        elif not waits:
            # Which of them are loaded is the connector's affair: of a window, the last alone.
            tables = zip(blocks.get_block_ids(), self._block_sizes, strict=True)
            loaded = itertools.chain.from_iterable(ids[local // size :] for ids, size in tables)
            numbers = tuple(number for number in loaded if number != NO_BLOCK)
        self._blocks[request.request_id] = frozenset(numbers)
        self._asked.append(
            KVLoad(request_id=request.request_id, block_ids=numbers, waits=waits, reason=reason)
        )

    def _build(self, scheduler_output: Any) -> Any:
        """vLLM's request for what the workers' side is told."""
        try:
            return self._builds(scheduler_output)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._log("build_connector_meta", reason)
            self._asked = [
                KVLoad(
                    request_id=load.request_id,
                    block_ids=load.block_ids,
                    waits=load.waits,
                    reason=reason,
                )
                for load in self._asked
            ]
            return KVConnectorMetadata()

    def _guard(self, name: str, method: Callable[..., Any], otherwise: Any) -> Callable[..., Any]:
        """Wrap the connector's ``method`` of that name: it answers ``otherwise`` where it raises."""

        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                answer = method(*args, **kwargs)
                if name == "take_events" and answer is not None:
                    return tuple(answer)  # made one by one, perhaps, while vLLM goes through them
                return answer
            except Exception as error:
                self._log(name, f"{type(error).__name__}: {error}")
                return otherwise

        return guarded

    def _log(self, method: str, reason: str) -> None:
        if method not in self._logged:
            self._logged.add(method)
            logger.warning(
                "The KV connector %s failed (%s: %s). What it should have brought is computed; this "
                "is logged once",
                type(self._connector).__name__,
                method,
                reason,
            )
