"""Pipeline periods with drafts and without, measured, by which it is known what drafts cost.

A draft's row and a head's passes have prices. That slots wait for drafts has none that could be
computed: how much of samplers, head and messages other microbatches hide depends on how many there
are, and on what the stages' times leave. So the periods themselves are compared: those of stretches
of microbatches with drafts, and those of stretches without. Both are measured in the course of
serving. Where only drafts have been seen, they are left out for one stretch, seldom (:meth:`DraftPace.tries`).

Who runs here: the engine's thread.
Rejected: a constant, which was 3 %. With one request on CPUs, and with many on emulated GPUs, waiting for
drafts costs several times as much (docs/log.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

STRETCH = 12
"""Microbatches of a stretch."""
ALIKE = 1.125
"""Ratio of two numbers of sequences up to which their periods may be compared."""
OLD = 4096
"""Microbatches after which a period is forgotten, and may be tried again."""
AGAIN = 1024
"""Microbatches between two tries at least: requests that come and go make many of them."""
RATE = 0.5
"""Weight of the last stretch in a period."""
SURE = 2.5
"""Tokens of a request in a pass from which on drafts are taken to pay, without a try."""


@dataclass(frozen=True, slots=True)
class _Period:
    seconds: float
    sequences: float
    at: int
    """Microbatches that had come back then."""


class DraftPace:
    """Periods of a pipeline with drafts and without.

    Args:
        slots: Microbatches in flight at most: so many come back after a change that were made before it.
        clock: Gives seconds.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._periods: dict[bool, _Period] = {}
        self._count = 0
        self._drafting = False
        self._tried_at: int | None = None
        self._began = 0.0
        self._taken = -slots
        """Microbatches of this stretch; negative: so many more have to come back before it begins."""
        self._passes = 0
        """Requests that got tokens in this stretch, each as often as it got any."""
        self._sequences: list[int] = []
        """Requests that ran, at each microbatch of this stretch."""

    def took(self, drafting: bool, passes: int, sequences: int, *, prompts: bool) -> None:
        """Count a microbatch that came back.

        Args:
            drafting: Whether drafts are made and waited for now.
            passes: Requests that got tokens by it.
            sequences: Requests that run.
            prompts: Whether it had prompts, which take time of their own.
        """
        self._count += 1
        if prompts or not passes or drafting != self._drafting:
            self._drafting = drafting
            self._begin_after(self._slots)
            return
        self._taken += 1
        if self._taken <= 0:
            self._began = self._clock()
            return
        self._passes += passes
        self._sequences.append(sequences)
        if max(self._sequences) > ALIKE * min(self._sequences):
            self._begin_after(0)
        elif self._taken == STRETCH:
            self._keep(drafting)
            self._begin_after(0)

    def _begin_after(self, microbatches: int) -> None:
        self._taken = -microbatches
        self._passes = 0
        self._sequences = []
        self._began = self._clock()

    def _keep(self, drafting: bool) -> None:
        sequences = sum(self._sequences) / len(self._sequences)
        seconds = (self._clock() - self._began) * sequences / self._passes
        if seconds <= 0.0:  # the clock is too coarse
            return
        before = self._known(drafting, sequences)
        if before is not None:
            seconds = before + RATE * (seconds - before)
        self._periods[drafting] = _Period(seconds, sequences, self._count)

    def _known(self, drafting: bool, sequences: float) -> float | None:
        """Seconds of a period of about so many sequences; None: not known, or no more."""
        period = self._periods.get(drafting)
        if period is None or self._count - period.at > OLD:
            return None
        few, many = sorted((period.sequences, sequences))
        return period.seconds if many <= ALIKE * few else None

    def slowdown(self, sequences: int) -> float | None:
        """Ratio of a period with drafts to one without, 1 or more; None: one of them is not known for
        about so many ``sequences``."""
        without = self._known(False, sequences)
        drafting = self._known(True, sequences)
        if without is None or drafting is None:
            return None
        return max(1.0, drafting / without)

    def tries(self, sequences: int, tokens_a_pass: float) -> bool:
        """Say if drafts are to be left out now though they are worth it by their prices: periods with
        them are known, and none without.

        Args:
            tokens_a_pass: Tokens of a request in a pass, lately.
        """
        if self._known(False, sequences) is not None:
            return False
        if self._tried_at is not None and self._count - self._tried_at < AGAIN:
            # A try goes on until it has given a period, or requests have come and gone for too long.
            return self._count - self._tried_at < 4 * (STRETCH + self._slots)
        if tokens_a_pass >= SURE or self._known(True, sequences) is None:
            return False
        self._tried_at = self._count
        return True
