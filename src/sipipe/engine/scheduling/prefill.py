"""How much of prompts a microbatch computes on top of its decodes: microbatches of equal time.

A pipeline with m microbatches in flight goes round as fast as its slowest one: a prompt in one
microbatch delays the m - 1 others as much as if each of them carried one too. What counts is
therefore how often and how far the time changes from one microbatch to the next. So, in the
seconds of :mod:`sipipe.engine.scheduling.times`:

- What is pending is spread over ``prefill_spread`` microbatches, not put where it arrives. A
  number of pipeline periods alone is too coarse for short pipelines; one of microbatches alone is
  too slow for short ones or too coarse for long ones; so its default grows with m. Nor over fewer
  than twice those of the next rule: larger chunks bring long prompts no sooner, decodes wait for
  them, and have passes of their own, in which a chunk costs less besides.
- Work W that fills an idle pipeline of p stages in n microbatches is done after W + n c + (p - 1)
  (W / n + c), where c is what each costs besides: soonest with n = sqrt((p - 1) W / c). The more
  decodes beside what arrives, the less of such a share counts.
- A chunk may always fill its microbatch up to the longest of the last m - 1: that is free. So
  chunks of one prompt take equal times, and have the fewer tokens the more lies before them.
- It is not cut finer than 64 / m tokens, and 24: the first token would only come later.
- ``tpot_target_ms`` bounds what decoding sequences are delayed by.
- As the KV cache runs out, no prompt starts: decoding sequences can grow without preemption.
"""

import math
from collections import deque
from collections.abc import Mapping

from sipipe.config import MicrobatchSettings
from sipipe.engine.scheduling.times import Load, Prices

TINY = 1e-9
"""Seconds that prompts have at least where any is pending: those of a least chunk, so that none starves."""
CHEAPEST = 16
"""Tokens that take as long as what a microbatch costs besides, at least: no pass is free."""


class Allowance:
    """What prompts may take of one microbatch.

    Args:
        prices: of :mod:`sipipe.engine.scheduling.times`.
        seconds: for prompts, at those prices; infinite for as much as there is room for.
        room: tokens for prompts.
        least: tokens that a first chunk has where there is any allowance.
        decodes: what shall be in the microbatch besides.
        align: a chunk ends at whole blocks of so many tokens, if that costs it an eighth at most.
        starts: whether a prompt may start that holds no KV cache.
        slack: seconds more for a prompt's rest, that it need no microbatch of its own.
    """

    def __init__(
        self,
        prices: Prices,
        *,
        seconds: float,
        room: int,
        least: int,
        decodes: Load,
        align: int = 1,
        slack: float = 0.0,
        starts: bool = True,
    ) -> None:
        self.starts, self._slack = starts, slack
        self._prices, self._seconds, self._room = prices, seconds, room
        self._decodes = decodes
        self._chunks: dict[str, Load] = {}
        self._least, self._align = (least if seconds > 0 else 0), align

    @property
    def tokens(self) -> int:
        """Of prompts, at most: of many short ones, which have hardly anything before them."""
        return self._bounded((self._seconds + self._slack) / self._prices.token)

    def fitting(self, start: int, more: float = 0.0) -> int:
        """Tokens of a prompt behind ``start`` that have room, and time with ``more`` seconds."""
        return self._bounded(self._prices.fitting(self._seconds + more, start))

    def _bounded(self, fit: float) -> int:
        fit = fit if self._seconds > 0 else 0.0
        return self._room if fit >= self._room else min(max(round(fit), self._least), self._room)

    def chunk(self, start: int, tokens: int) -> int:
        """How many of a prompt's ``tokens`` behind ``start`` to compute."""
        if tokens <= self.fitting(start, self._slack):
            return tokens
        most = self.fitting(start)
        over = (start + most) % self._align
        return most - over if 8 * over <= most else most

    def take(self, request: str, start: int, tokens: int, ends: bool) -> None:
        """A prompt's chunk is to be in; ``ends``: it is the prompt's last."""
        if tokens:
            self._seconds -= self._prices.chunk(start, tokens)
            self._room -= tokens
            self._least = 0
            self._chunks[request] = Load(0, int(ends), tokens, 0, tokens * (start + tokens / 2))

    def formed(self, scheduled: Mapping[str, int], tokens: int) -> Load:
        """The microbatch has ``tokens``, by request ``scheduled``: what is in it."""
        chunks = [chunk for id, chunk in self._chunks.items() if scheduled.get(id) == chunk.tokens]
        decoded = tokens - sum([chunk.tokens for chunk in chunks])
        share = decoded / max(self._decodes.rows, 1)  # preemption makes fewer of them
        load = Load(float(tokens > 0), decoded, 0.0, share * self._decodes.context)
        for chunk in chunks:
            load = load.plus(chunk)
        return load


class PrefillThrottle:
    """Sizes prefill by what is pending, by what decodes, and by free KV cache. ``align``: as of
    :class:`Allowance`; ``least``: prompt tokens below which no chunk is cut in any case."""

    def __init__(
        self,
        *,
        slots: int,
        stages: int,
        max_tokens: int,
        settings: MicrobatchSettings,
        align: int = 1,
        least: int = 1,
    ) -> None:
        self._slots, self._stages, self._max_tokens = slots, stages, max_tokens
        self._align, self._least, self._settings = align, least, settings
        # What the other microbatches in flight take, at prices that are measured or not.
        self._others: deque[float] = deque(maxlen=max(1, slots - 1))
        self._measured = False

    def allow(
        self,
        prices: Prices,
        *,
        pending: float,
        started: float,
        decodes: Load,
        running: int,
        arriving: int,
        kv_free: float,
        slots: int,
        measured: bool,
    ) -> Allowance:
        """What prompts may take at this visit.

        Args:
            pending: Seconds, at these prices, of unscheduled prompts' tokens that may run.
            started: Of these, those of requests that hold KV cache.
            decodes: What decodes in this microbatch.
            running: Sequences that decode in any slot.
            arriving: Requests that the pending tokens belong to.
            kv_free: Free share of the KV cache, 0 to 1.
            slots: Slots that are open, 1 to m; with one there is nothing to keep even.
            measured: Whether prices are seconds.
        """
        settings = self._settings
        if slots == self._slots:
            spread, least = max(min(4 * slots + 4, 24), 2 * slots + 8), max(24, 64 // slots)
        else:  # a closed slot's visits carry prompts that delay no decoding sequence
            spread, least = 2 * slots, 96
        if measured != self._measured:  # the unit has changed
            self._others.clear()
        self._measured = measured
        decoding = prices.of(decodes)
        starts = not running or kv_free >= settings.kv_reserve
        pending = pending if starts else started
        seconds = 0.0
        if pending > 0:
            disturbed = running / (running + max(1, arriving)) if slots > 1 else 0.0
            parts = self._parts(pending, prices)
            seconds = max(
                pending / settings.prefill_spread
                if settings.prefill_spread
                else disturbed * pending / max(spread, 2 * parts),
                (1 - disturbed) * pending / parts,
                max(self._others, default=0.0) - decoding,
            )
            if settings.tpot_target_ms and running and measured:
                seconds = min(seconds, settings.tpot_target_ms / 1e3 / self._slots - decoding)
            seconds = max(seconds, TINY)
        self._others.append(decoding + min(seconds, pending))
        return Allowance(
            prices,
            seconds=seconds,
            room=max(0, self._max_tokens - int(decodes.rows)),
            least=max(least, self._least),
            decodes=decodes,
            align=self._align,
            starts=starts,
            slack=0.0 if running else prices.fixed / max(1, self._stages - 1),
        )

    def _parts(self, pending: float, prices: Prices) -> int:
        """Microbatches in which an idle pipeline is soonest done with ``pending``."""
        fixed = max(prices.fixed, CHEAPEST * prices.token)
        return max(1, round(math.sqrt((self._stages - 1) * pending / fixed)))
