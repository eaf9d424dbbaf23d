"""What happens on a server per second: two looks at its statistics page, set against each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sipipe.observe.live import LivePage, Word
from sipipe.observe.online import BUBBLES
from sipipe.observe.phases import Phase
from sipipe.observe.queues import queues


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRate:
    """One stage process between two looks."""

    index: int
    rank: int
    busy: float
    """Share of the time; the bubbles are shares too, and the rest is not accounted for yet."""
    bubbles: dict[str, float]
    microbatches_per_s: float
    forward_ms: float
    """Mean device time of a microbatch; 0 where none ran."""
    iteration: int
    queues: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRate:
    """One sampler between two looks."""

    index: int
    busy: float
    sequences_per_s: float
    us_per_sequence: float
    queue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A server between two looks."""

    model: str
    pid: int
    seconds: float
    tokens_per_s: float
    iterations_per_s: float
    inflight: int
    limit: int
    running: int
    waiting: int
    fallbacks: int
    restarts: int
    stages: list[StageRate] = field(default_factory=list)
    samplers: list[SamplerRate] = field(default_factory=list)


class Watch:
    """Looks at a page again and again."""

    def __init__(self, page: LivePage) -> None:
        """The first look; rates until the next are averages since the page was made."""
        self.page = page
        self._then = page.header.created_ns
        self._last: dict[int, list[int]] = {}

    def look(self) -> Rates:
        """Rates since the look before."""
        page, now = self.page, time.monotonic_ns()
        span = max(1, now - self._then)
        seconds = span / 1e9
        stages, samplers = [], []
        top: list[int] = []
        grown: list[int] = []
        fallbacks = 0
        for role, index, rank, first in page.blocks():
            words = page.read(role, index, rank)
            before = self._last.get(first, [0] * len(words))
            delta = [a - b for a, b in zip(words, before, strict=True)]
            self._last[first] = words
            fallbacks += words[Word.FALLBACKS]
            waiting = queues(page, role, index, rank, words)
            if role == "executor":
                top, grown = words, delta
            elif role == "stage":
                stages.append(_stage(index, rank, words, delta, span, waiting))
            else:
                samplers.append(_sampler(index, delta, span, waiting["logits"]))
        self._then = now
        return Rates(
            model=page.header.model,
            pid=page.header.pid,
            seconds=seconds,
            tokens_per_s=grown[Word.TOKENS] / seconds,
            iterations_per_s=grown[Word.BATCHES] / seconds,
            inflight=top[Word.INFLIGHT],
            limit=page.header.inflight,
            running=top[Word.RUNNING],
            waiting=top[Word.WAITING],
            fallbacks=fallbacks,
            restarts=top[Word.RESTARTS],
            stages=stages,
            samplers=samplers,
        )


def _stage(
    index: int, rank: int, words: list[int], delta: list[int], span: int, waiting: dict[str, int]
) -> StageRate:
    count = delta[Word.BATCHES]
    return StageRate(
        index=index,
        rank=rank,
        busy=_share(delta[Word.BUSY_NS], span),
        bubbles={
            kind: _share(delta[Word.IMBALANCE_NS + number], span)
            for number, kind in enumerate(BUBBLES)
        },
        microbatches_per_s=count / (span / 1e9),
        forward_ms=delta[Word.PHASE_NS + Phase.FORWARD] / 1e6 / count if count else 0.0,
        iteration=words[Word.ITERATION],
        queues=waiting,
    )


def _sampler(index: int, delta: list[int], span: int, waiting: int) -> SamplerRate:
    spent, drawn = delta[Word.PHASE_NS + Phase.SAMPLE], delta[Word.SEQUENCES]
    return SamplerRate(
        index=index,
        busy=_share(spent, span),
        sequences_per_s=drawn / (span / 1e9),
        us_per_sequence=spent / 1e3 / drawn if drawn else 0.0,
        queue=waiting,
    )


def _share(part: int, span: int) -> float:
    # A microbatch that began before the last look is counted when it ends: never more than all.
    return min(1.0, max(0.0, part / span))
