"""Scheduling rules for the simulator: ours, vLLM's, and gLLM's token throttling.

All three fill batches from the same :class:`EngineModel`; a rule says which decodes may enter
and how much prefill.
"""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from benchmarks.simulator.engine_model import Batch, EngineModel
from sipipe.config import MicrobatchSettings
from sipipe.engine.scheduling.concurrency import ConcurrencyController
from sipipe.engine.scheduling.policy import Sequence, SlotPolicy

__all__ = ["Rule", "SlotRule", "TokenThrottlingRule", "VllmRule"]


class Rule(Protocol):
    """Forms one microbatch a call."""

    pauses: bool = True
    """Whether vLLM's loop pauses after an empty microbatch also when another has just come back."""

    def schedule(self, engine: EngineModel) -> Batch:
        """The next microbatch; empty where nothing may run now."""

    def observe(self, batch: Batch, stages: tuple[float, ...], between: float) -> None:
        """What ``batch`` took on each stage and between the last and the first, in seconds. Told
        when it has come back; a rule that does not measure looks away."""


class VllmRule(Rule):
    """vLLM 0.32: everything that is not in flight, then prefill up to the token budget."""

    def schedule(self, engine: EngineModel) -> Batch:
        """See :class:`Rule`."""
        return engine.fill()


class TokenThrottlingRule(Rule):
    """gLLM's token throttling, after its paper (arXiv 2504.14775), with its defaults.

    Decode tokens: the running decodes divided by the pipeline depth. Prefill tokens:
    ``max(min(waiting / T, MaxP * (free - thresh) / (1 - thresh)), MinP)``, and none while less
    than ``thresh`` of the KV cache is free. It keeps no slots: which decodes enter is whoever is
    not in flight, oldest first.

    Args:
        depth: Pipeline stages.
        spread: T, iterations over which waiting prompt tokens are spread.
        most: MaxP; None for the token budget.
        least: MinP.
        threshold: Share of the KV cache kept free.
    """

    def __init__(
        self,
        *,
        depth: int,
        spread: int = 8,
        most: int | None = None,
        least: int = 32,
        threshold: float = 0.05,
    ) -> None:
        self.depth, self.spread, self.most = depth, spread, most
        self.least, self.threshold = least, threshold

    def schedule(self, engine: EngineModel) -> Batch:
        """See :class:`Rule`."""
        decoding = [request for request in engine.running if not request.prefilling]
        share = -(-len(decoding) // self.depth)
        ready = [request for request in decoding if request.pending > 0]
        chosen = {request.id for request in ready[:share]}
        waiting = sum(r.pending for r in engine.running if r.prefilling)
        waiting += sum(request.known for request in engine.waiting)
        prefill = 0
        free = engine.kv_free
        if waiting and (free >= self.threshold or not engine.running):
            most = self.most or engine.max_tokens
            by_cache = most * max(0.0, free - self.threshold) / (1 - self.threshold)
            prefill = int(max(min(waiting / self.spread, by_cache), self.least))
        return engine.fill(decodes=lambda request: request.id in chosen, prefill_tokens=prefill)


class SlotRule(Rule):
    """SiPipe's slots: what :class:`sipipe.engine.scheduling.scheduler.PipelineScheduler` does.

    Args:
        slots: Microbatches in flight.
        max_tokens: Token budget of a microbatch.
        settings: Tunables.
        stages: Pipeline stages, whose times say how many slots to open; None: all are open.
    """

    pauses = False

    def __init__(
        self,
        *,
        slots: int,
        max_tokens: int,
        settings: MicrobatchSettings | None = None,
        stages: int | None = None,
    ) -> None:
        self._controller = (
            None if stages is None else ConcurrencyController(stages=stages, slots=slots)
        )
        self._policy = SlotPolicy(
            slots=slots, max_tokens=max_tokens, settings=settings, controller=self._controller
        )

    def observe(self, batch: Batch, stages: tuple[float, ...], between: float) -> None:
        """See :class:`Rule`; as in the engine, only decodes count."""
        controller, sequences = self._controller, len(batch.tokens)
        if controller is None:
            return
        if batch.total == sequences:
            for regression, seconds in zip(controller.stages, stages, strict=True):
                regression.add(sequences, seconds)
        controller.between.add(sequences, between)

    def schedule(self, engine: EngineModel) -> Batch:
        """See :class:`Rule`."""
        started = [request for request in engine.running if request.prefilling]
        held = sum(request.pending for request in started)
        pending, arriving = held, len(started)
        for request in islice(engine.waiting, max(0, engine.max_running - len(engine.running))):
            pending += request.known
            arriving += 1
        plan = self._policy.visit(
            [
                Sequence(request.id, request.computed, request.pending > 0)
                for request in engine.running
                if not request.prefilling
            ],
            pending_prefill=pending,
            started_prefill=held,
            arriving=arriving,
            kv_free=engine.kv_free,
        )
        return engine.fill(
            decodes=lambda request: request.id in plan.decode,
            prefill_tokens=plan.prefill_tokens,
        )
