"""Scheduling rules for the simulator: ours, vLLM's, gLLM's token throttling, and
SGLang's dynamic chunks.

All fill batches from the same :class:`EngineModel`; a rule says which decodes may enter
and how much prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import inf
from typing import Any

from benchmarks.simulator.engine_model import Batch, EngineModel
from sipipe.config import MicrobatchSettings
from sipipe.engine.scheduling.concurrency import ConcurrencyController
from sipipe.engine.scheduling.policy import Plan, Sequence, SlotPolicy
from sipipe.engine.scheduling.prefill import Allowance
from sipipe.engine.scheduling.times import Load, Prices, usual

__all__ = ["DynamicChunksRule", "Rule", "SlotRule", "TokenThrottlingRule", "visit"]


class Rule:
    """Forms one microbatch a call. This one is vLLM 0.32's: everything that is not in flight, then
    prefill up to the token budget."""

    pauses = True
    """Whether vLLM's loop pauses after an empty microbatch also when another has just come back."""

    def schedule(self, engine: EngineModel) -> Batch:
        """The next microbatch; empty where nothing may run now."""
        return engine.fill(prefill=_tokens(engine.max_tokens))

    def observe(self, batch: Batch, stage: float, between: float) -> None:
        """What ``batch`` took on each stage and between the last and the first, in seconds. Called
        when it has come back; a rule that does not measure ignores it."""


class TokenThrottlingRule(Rule):
    """gLLM's token throttling, after its paper (arXiv 2504.14775), with its defaults.

    Decode tokens: the running decodes divided by the pipeline depth. Prefill tokens:
    ``max(min(waiting / T, budget * (free - thresh) / (1 - thresh)), MinP)``, and none while less
    than ``thresh`` of the KV cache is free. It keeps no slots: which decodes enter is whoever is
    not in flight, oldest first.

    Args:
        depth: Pipeline stages.
    """

    SPREAD = 8
    """T, iterations over which waiting prompt tokens are spread."""
    LEAST = 32
    """MinP."""
    THRESHOLD = 0.05
    """Share of the KV cache kept free."""

    def __init__(self, *, depth: int) -> None:
        self._depth = depth

    def schedule(self, engine: EngineModel) -> Batch:
        """See :class:`Rule`."""
        decoding = [request for request in engine.running if not request.prefilling]
        share = -(-len(decoding) // self._depth)
        ready = [request for request in decoding if request.pending > 0]
        chosen = {request.id for request in ready[:share]}
        waiting = sum(r.pending for r in engine.running if r.prefilling)
        waiting += sum(request.known for request in engine.waiting)
        prefill = 0
        free = engine.kv_free
        if waiting and (free >= self.THRESHOLD or not engine.running):
            by_cache = max(0.0, free - self.THRESHOLD) / (1 - self.THRESHOLD)
            most = min(waiting / self.SPREAD, engine.max_tokens * by_cache)
            prefill = int(max(most, self.LEAST))
        return engine.fill(decodes=lambda request: request.id in chosen, prefill=_tokens(prefill))


class DynamicChunksRule(Rule):
    """SGLang's dynamic chunks, after its documentation: a prompt's first chunk has ``chunk`` tokens;
    a later one as many as take as long by a quadratic fitted at start, drawn towards ``chunk`` by a
    smoothing factor set by hand, in whole pages. The quadratic is given here as it is.

    Args:
        chunk: tokens of a first chunk.
        prices: what a load takes.
        smoothing: 0 for equal numbers of tokens, 1 for equal times.
    """

    PAGE = 64

    def __init__(self, chunk: int, prices: Prices, smoothing: float = 0.75) -> None:
        self._chunk, self._prices, self._smoothing = chunk, prices, smoothing

    def schedule(self, engine: EngineModel) -> Batch:
        """See :class:`Rule`."""
        started = next((r.computed for r in engine.running if r.prefilling), 0)
        same = self._prices.fitting(self._prices.chunk(0, self._chunk), started)
        chunk = self._chunk + self._smoothing * (same - self._chunk)
        return engine.fill(prefill=_tokens(max(self.PAGE, int(chunk) // self.PAGE * self.PAGE)))


class SlotRule(Rule):
    """SiPipe's slots: what :class:`sipipe.engine.scheduling.scheduler.PipelineScheduler` does.

    Args:
        slots: Microbatches in flight.
        max_tokens: Token budget of a microbatch.
        stages: Pipeline stages.
        paced: whether as many slots are open as make the period shortest; else all are.
        settings: in the place of those.
        first: what a load takes before it has been measured.
    """

    pauses = False

    def __init__(
        self,
        *,
        slots: int,
        max_tokens: int,
        stages: int,
        paced: bool = False,
        settings: MicrobatchSettings | None = None,
        first: Prices | None = None,
    ) -> None:
        self._controller = ConcurrencyController(stages=stages, slots=slots, first=first)
        settings = settings or MicrobatchSettings(min_sequences=0 if paced else 1)
        self._policy = SlotPolicy(
            slots=slots, max_tokens=max_tokens, controller=self._controller, settings=settings
        )

    def observe(self, batch: Batch, stage: float, between: float) -> None:
        """See :class:`Rule`."""
        p, load, drawn = self._controller.stages, batch.load, Load(1.0, len(batch.tokens))
        decodes = Load() if load.pairs else drawn
        loads = [load] * p + [decodes] * p + [Load()] * p + [drawn]
        self._controller.times.add(loads, [stage] * 3 * p + [between])

    def schedule(self, engine: EngineModel) -> Batch:
        """See :class:`Rule`."""
        price = self._policy.prices.chunk
        started = [request for request in engine.running if request.prefilling]
        held = sum(price(request.computed, request.pending) for request in started)
        pending, arriving = held, len(started)
        for request in islice(engine.waiting, max(0, engine.max_running - len(engine.running))):
            pending += price(0, request.known)
            arriving += 1
        plan = visit(
            self._policy,
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
        decode = {sequence.id for sequence in plan.decode}
        return engine.fill(decodes=lambda request: request.id in decode, prefill=plan.prefill)


def visit(policy: SlotPolicy, sequences: Iterable[Sequence], **more: Any) -> Plan:
    """Follow ``sequences``, all that decode now, and visit."""
    now = {sequence.id: sequence for sequence in sequences}
    joining = [now[id] for id in policy.follow(now)]
    return policy.visit(joining, now.get, **more)


def _tokens(most: int) -> Allowance:
    """For ``most`` prompt tokens, wherever they are."""
    return Allowance(usual(), seconds=inf, room=most, least=0, decodes=Load())
