"""A pipeline in simulated time: a scheduling rule, a trace and stage costs give served figures.

The loop is that of vLLM's ``EngineCore.step_with_batch_queue``: batches in flight are a queue of
length m, first in, first out; a new batch is formed whenever the queue has room; a batch may be
empty, and then the loop pauses for a millisecond as vLLM's does. A stage takes one microbatch at
a time, in order. Communication costs nothing, and waiting batches are never reordered.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from benchmarks.simulator.engine_model import Batch, EngineModel, SimulatedRequest
from benchmarks.simulator.rules import Rule
from benchmarks.simulator.workload import Arrival
from sipipe.engine.scheduling.times import Prices

__all__ = ["Outcome", "StageCosts", "simulate"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds that one stage needs for a microbatch."""

    prices: Prices
    scheduling: float = 0.0
    """Seconds from a batch's result to the next batch's start at the first stage, not a stage's
    time: scheduling, messages, and sampling where it is off the last stage."""

    def seconds(self, batch: Batch) -> float:
        """Time of ``batch`` on one stage."""
        return self.prices.of(batch.load)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run served and how well it used the stages."""

    seconds: float
    """From the first arrival to the last token."""
    tokens_per_second: float
    """Output tokens over the time until 95 % of them have come: the last stragglers of a trace
    say little about scheduling."""
    idle_share: float
    """Share of that time, as far as requests were unfinished, in which a stage computed nothing;
    averaged over stages."""
    ttft: np.ndarray
    """Seconds to the first token, [requests] float64."""
    tpot: np.ndarray
    """Seconds per further token, [requests with two tokens or more] float64."""
    times: list[list[float]]
    """Seconds at which each request's tokens came, by request."""
    sizes: tuple[int, ...]
    """Sequences of each microbatch in order, empty ones included."""


EMPTY_PAUSE = 1e-3


def simulate(
    trace: Sequence[Arrival],
    rule: Rule,
    *,
    stages: int,
    inflight: int,
    costs: StageCosts,
    engine: EngineModel,
) -> Outcome:
    """Serve ``trace`` to the end.

    Raises:
        RuntimeError: nothing has moved for 10,000 steps; the rule starves a request.
    """
    arrivals = deque(SimulatedRequest(f"r{index}", *arrival) for index, arrival in enumerate(trace))
    requests = list(arrivals)
    queue: deque[tuple[float, Batch, float]] = deque()
    free_at = [0.0] * stages  # when each stage has finished what it was given
    busy = occupied = now = last_done = 0.0
    measured = 0.95 * sum(arrival.output for arrival in trace)
    served = 0
    steady: tuple[float, float] | None = None  # tokens per second, idle share
    sizes: list[int] = []
    still = 0
    while arrivals or engine.has_requests() or queue:
        if not engine.has_requests() and not queue:
            now = max(now, arrivals[0].arrival)
        while arrivals and arrivals[0].arrival <= now:
            engine.waiting.append(arrivals.popleft())
        began = now
        executed = came_back = False
        if engine.has_requests():
            batch = rule.schedule(engine)
            executed = bool(batch.tokens)
            sizes.append(len(batch.tokens))
            done, seconds = max(last_done, now), 0.0
            if executed:
                seconds = costs.seconds(batch)
                done = now + costs.scheduling
                for stage in range(stages):
                    done = free_at[stage] = max(done, free_at[stage]) + seconds
                busy += seconds
            last_done = done
            queue.appendleft((done, batch, seconds))
        full = len(queue) >= inflight
        if queue and (full or not (executed or engine.has_requests())):
            done, batch, seconds = queue.pop()
            now = max(now, done)
            served += engine.complete(batch, now)
            if came_back := bool(batch.tokens):
                rule.observe(batch, seconds, costs.scheduling)
        if not executed and engine.has_requests() and (rule.pauses or not came_back):
            now += EMPTY_PAUSE
        occupied += now - began
        if steady is None and served >= measured:
            idle_share = 1 - min(1.0, busy / occupied)
            steady = served / (now - trace[0].time), idle_share
        still = 0 if executed or came_back or now > began + EMPTY_PAUSE else still + 1
        if still > 10_000:
            raise RuntimeError("nothing moves: a request is never scheduled")
    assert steady is not None
    return Outcome(
        seconds=max(r.finished for r in requests) - requests[0].arrival,
        tokens_per_second=steady[0],
        idle_share=steady[1],
        ttft=np.array([r.first_token - r.arrival for r in requests]),
        tpot=np.array(
            [(r.finished - r.first_token) / (r.generated - 1) for r in requests if r.generated > 1]
        ),
        times=[r.times for r in requests],
        sizes=tuple(sizes),
    )
