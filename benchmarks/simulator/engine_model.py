"""What vLLM's scheduler does with a batch, in small: queues, KV cache blocks, preemption.

The rules (:mod:`benchmarks.simulator.rules`) share this state, so that they differ only in which
requests they let in. It keeps vLLM's order: running requests first, oldest first; then waiting
ones; when blocks run out, the youngest running request is preempted and computed again later.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from sipipe.engine.scheduling.prefill import Allowance
from sipipe.engine.scheduling.times import Load

__all__ = ["Batch", "EngineModel", "SimulatedRequest"]

_BLOCK = 16
"""Tokens in a KV block."""


@dataclasses.dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request in the simulated engine."""

    id: str
    arrival: float
    prompt: int
    output: int
    computed: int = 0
    """Tokens whose KV is computed or being computed."""
    generated: int = 0
    """Tokens that have come back."""
    first_token: float = -1.0
    finished: float = -1.0
    times: list[float] = dataclasses.field(default_factory=list)
    """Seconds at which each token came back."""
    epoch: int = 0
    """Raised by a preemption, so that a batch in flight knows that its result is stale."""

    @property
    def known(self) -> int:
        """Prompt and generated tokens."""
        return self.prompt + self.generated

    @property
    def pending(self) -> int:
        """Known tokens not scheduled yet; 0 while the last one is in flight."""
        return self.known - self.computed

    @property
    def prefilling(self) -> bool:
        """Whether part of its prompt (or of what a preemption dropped) is still to schedule."""
        return self.pending > 1 or self.computed < self.prompt


@dataclasses.dataclass(slots=True)
class Batch:
    """One microbatch: tokens by request."""

    tokens: dict[SimulatedRequest, int]
    epochs: dict[SimulatedRequest, int]
    """Of those that get a token."""
    load: Load
    """What is in it."""

    @property
    def total(self) -> int:
        """Tokens computed."""
        return sum(self.tokens.values())


class EngineModel:
    """Requests, their KV blocks, and the filling of one batch.

    Args:
        max_tokens: Token budget of a batch.
        max_running: Requests that may run at a time.
        kv_tokens: Capacity of the KV cache in tokens, whole blocks of 16.
    """

    def __init__(self, *, max_tokens: int, max_running: int, kv_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.max_running = max_running
        self.blocks = kv_tokens // _BLOCK
        self.used = 0
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []

    @property
    def kv_free(self) -> float:
        """Free share of the KV cache."""
        return 1.0 - self.used / self.blocks

    def has_requests(self) -> bool:
        """Whether anything waits, runs or is in flight."""
        return bool(self.waiting or self.running)

    def fill(
        self,
        *,
        decodes: Callable[[SimulatedRequest], bool] = lambda _: True,
        prefill: Allowance,
    ) -> Batch:
        """One batch of what is allowed in.

        Args:
            decodes: Which requests past their prompt may enter.
            prefill: What of prompts.
        """
        # As in PipelineScheduler, decodes behind a long prompt keep their share of the budget.
        ready = sum(not r.prefilling and r.pending > 0 and decodes(r) for r in self.running)
        budget = min(self.max_tokens, ready + prefill.tokens)
        tokens: dict[SimulatedRequest, int] = {}
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            index += 1
            if request.prefilling:
                chunk = prefill.chunk(request.computed, min(request.pending, budget))
            else:
                chunk = min(request.pending, budget) if decodes(request) else 0
            if chunk <= 0:
                continue
            while not self._allocate(request, chunk):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                tokens.pop(victim, None)
                if victim is request:
                    break
            if request.computed == 0 and preempted and request not in self.running:
                break
            tokens[request] = chunk
            budget -= chunk
            if request.prefilling:
                prefill.take(request.id, request.computed, chunk, chunk == request.pending)
        while self.waiting and not preempted and len(self.running) < self.max_running:
            request = self.waiting[0]
            chunk = prefill.chunk(0, min(request.known, budget))
            fits = _blocks(request.known) <= self.blocks - self.used
            if chunk <= 0 or not fits or not self._allocate(request, chunk):
                break
            self.running.append(self.waiting.popleft())
            tokens[request] = chunk
            budget -= chunk
            prefill.take(request.id, 0, chunk, chunk == request.known)
        load = prefill.formed(
            {request.id: chunk for request, chunk in tokens.items()}, sum(tokens.values())
        )
        for request, chunk in tokens.items():
            request.computed += chunk
        return Batch(tokens, {r: r.epoch for r in tokens if r.pending == 0}, load)

    def complete(self, batch: Batch, now: float) -> int:
        """Take a batch's tokens; returns how many there were."""
        tokens = 0
        for request, epoch in batch.epochs.items():
            if request.epoch != epoch:
                continue  # preempted since
            request.generated += 1
            request.times.append(now)
            tokens += 1
            if request.first_token < 0:
                request.first_token = now
            if request.generated >= request.output:
                request.finished = now
                self.running.remove(request)
                self.used -= _blocks(request.computed)
        return tokens

    def _allocate(self, request: SimulatedRequest, chunk: int) -> bool:
        more = _blocks(request.computed + chunk) - _blocks(request.computed)
        if more > self.blocks - self.used:
            return False
        self.used += more
        return True

    def _preempt(self, request: SimulatedRequest) -> None:
        self.used -= _blocks(request.computed)
        request.computed = 0
        request.epoch += 1
        self.waiting.appendleft(request)


def _blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK)
