"""Feeds the scheduler's :class:`sipipe.scheduling.Pace` from the statistics page.

Every process of the engine adds what its phases took to its block of the page; what has grown since
the last look are the times of the batches since. Only batches of decodes count: prompts have their
own rule. Runs on the engine's thread, once a scheduling call, for a few microseconds.
"""

from __future__ import annotations

import time

from sipipe.engine.scheduling.pace import Pace
from sipipe.observe.live import LivePage, Word
from sipipe.observe.phases import Phase

STAGE_PHASES = (Phase.FORWARD, Phase.LOGITS, Phase.HANDOVER, Phase.SEND)
"""What keeps a stage from its next microbatch; preparation is hidden behind them."""
EXECUTOR_PHASES = (Phase.SCHEDULE, Phase.DISPATCH, Phase.UPDATE)


class LivePace:
    """One engine's stage times, as they come.

    Args:
        page: The engine's statistics page.
        slots: Microbatches in flight, m.
    """

    def __init__(self, page: LivePage, *, slots: int) -> None:
        header = page.header
        self.pace = Pace(stages=header.stages, slots=slots)
        self._page = page
        self._stages = [
            _Block(page, page.block("stage", index), STAGE_PHASES) for index in range(header.stages)
        ]
        self._executor = _Block(page, page.block("executor"), EXECUTOR_PHASES)
        self._samplers = [
            _Block(page, page.block("sampler", index), (Phase.SAMPLE,))
            for index in range(header.samplers)
        ]

        # Since the executor took the last batch in: when that was, the stages' seconds, no prompts.
        self._before, self._spent, self._decodes = time.monotonic(), 0.0, True

    def look(self, now: float | None = None) -> None:
        """Take in what has happened since the last look, at ``now`` on the monotonic clock."""
        for block, line in zip(self._stages, self.pace.stages, strict=True):
            count, sequences, tokens, seconds = block.grown()
            self._spent += seconds if count else 0.0
            self._decodes &= sequences == tokens
            if count and sequences == tokens:
                line.add(sequences / count, seconds / count, count)
        count, sequences, _, seconds = self._executor.grown()
        if not count:
            return
        # Samplers share a batch out and work side by side.
        drawn = [block.grown() for block in self._samplers]
        slowest = max((seconds / count for count, _, _, seconds in drawn if count), default=0.0)
        self.pace.between.add(sequences / count, seconds / count + slowest, count)
        now = time.monotonic() if now is None else now
        if count == 1 and self.pace.formed == 1 and self._decodes:
            self.pace.alone(now - self._before - self._spent - seconds - slowest)
        self._before, self._spent, self._decodes = now, 0.0, True


class _Block:
    """Growth of one process's figures."""

    def __init__(self, page: LivePage, first: int, phases: tuple[Phase, ...]) -> None:
        self._words = page.words
        self._at = [first + int(word) for word in (Word.BATCHES, Word.SEQUENCES, Word.TOKENS)] + [
            first + int(Word.PHASE_NS) + int(phase) for phase in phases
        ]
        self._last = [0] * len(self._at)

    def grown(self) -> tuple[int, int, int, float]:
        """Batches, sequences, tokens and seconds since the last call."""
        now = [self._words[at] for at in self._at]
        count, sequences, tokens, *spent = (
            value - before for value, before in zip(now, self._last, strict=True)
        )
        if count:
            self._last = now
        return count, sequences, tokens, sum(spent) / 1e9
