"""Sizes of prompts' chunks beside a microbatch's decodes: microbatches of equal time.

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
- ``tpot_target_ms`` bounds what decoding sequences are delayed by. Without it, a round of all
  microbatches takes at most 1 + :data:`SLOWDOWN` times as long with prompts as its decodes take
  alone; longer, the more requests arrive for each that decodes, since each of those waits too.
- One stage has no other that a microbatch of prompts alone would keep busy. It only reads the weights
  once more: so prompts are computed beside the sequences that decode, in half as many, larger chunks.
- As the KV cache runs out, no prompt starts: decoding sequences can grow without preemption.
"""

import math
from collections import deque
from collections.abc import Mapping

from sipipe.config import MicrobatchSettings
from sipipe.engine.scheduling.times import Load, Prices

TINY = 1e-9
"""Seconds that prompts have at least where any is pending: those of a least chunk, so that none starves."""
SLOWDOWN = 4.0
"""Time of prompts in a round, as a multiple of what its decodes take alone, where one request arrives and
others decode. The prompts then take 1.25 times as long as in a pipeline of their own."""
FINEST = 16
"""Tokens below which no chunk is cut beside decoding sequences that are to wait no longer."""
CHEAPEST = 16
"""Tokens that take as long as what a microbatch costs besides, at least: no pass is free."""


class Allowance:
    """The time and the tokens that prompts may take of one microbatch.

    Args:
        prices: Prices of :mod:`sipipe.engine.scheduling.times`.
        seconds: Time for prompts, at those prices; infinite for as much as there is room for.
        room: Tokens for prompts.
        least: Tokens that a first chunk has where there is any allowance.
        decodes: Load that shall be in the microbatch besides.
        align: A chunk ends at whole blocks of so many tokens, if that costs it an eighth at most.
        starts: True if a prompt may start that holds no KV cache.
        slack: Seconds more for the end of a prompt, that it need no microbatch of its own.
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
        self.starts = starts
        self._prices = prices
        self._seconds = seconds
        self._slack = slack
        self._room = room
        self._least = least if seconds > 0 else 0
        self._align = align
        self._decodes = decodes
        self._chunks: dict[str, Load] = {}

    @property
    def tokens(self) -> int:
        """Tokens of prompts, at most: of many short ones, which have hardly anything before them."""
        return self._bounded((self._seconds + self._slack) / self._prices.token)

    def fitting(self, start: int, more: float = 0.0) -> int:
        """Tokens of a prompt behind ``start`` that have room, and time with ``more`` seconds."""
        return self._bounded(self._prices.fitting(self._seconds + more, start))

    def _bounded(self, tokens: float) -> int:
        """``tokens`` that there is time for, brought between the least ones and those with room."""
        if self._seconds <= 0:
            tokens = 0.0
        if tokens >= self._room:  # also infinity, which has no integer
            return self._room
        return min(max(round(tokens), self._least), self._room)

    def chunk(self, start: int, tokens: int) -> int:
        """Tokens, of a prompt's ``tokens`` behind ``start``, to compute in this microbatch."""
        if tokens <= self.fitting(start, self._slack):
            return tokens
        most = self.fitting(start)
        over = (start + most) % self._align
        return most - over if 8 * over <= most else most

    def take(self, request: str, start: int, tokens: int, ends: bool) -> None:
        """Count a prompt's chunk as taken; ``ends``: it is the prompt's last, and has a row of logits."""
        if tokens:
            self._seconds -= self._prices.chunk(start, tokens)
            self._room -= tokens
            self._least = 0
            self._chunks[request] = Load(
                batches=0,
                rows=int(ends),
                tokens=tokens,
                context=0,
                pairs=tokens * (start + tokens / 2),
            )

    def formed(self, scheduled: Mapping[str, int], tokens: int) -> Load:
        """The load of a microbatch that was formed of ``tokens``, ``scheduled`` by request."""
        # A chunk that was taken and then preempted is not in it.
        chunks = [chunk for id, chunk in self._chunks.items() if scheduled.get(id) == chunk.tokens]
        decoded = tokens - sum([chunk.tokens for chunk in chunks])
        share = decoded / max(self._decodes.rows, 1)  # preemption makes fewer of them
        load = Load(
            batches=float(tokens > 0),
            rows=decoded,
            tokens=0.0,
            context=share * self._decodes.context,
        )
        for chunk in chunks:
            load = load.plus(chunk)
        return load


class PrefillThrottle:
    """Sizes prefill by what is pending, by what decodes, and by free KV cache.

    Args:
        slots: Microbatches in flight, m.
        stages: Stages of the pipeline, p.
        max_tokens: Token budget of one microbatch.
        align: Tokens of a block that chunks end at, as :class:`Allowance` has it.
        least: Prompt tokens below which no chunk is cut in any case.
    """

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
        self._slots = slots
        self._stages = stages
        self._max_tokens = max_tokens
        self._align = align
        self._least = least
        self._settings = settings
        # Times that the other microbatches in flight take, at prices that are measured or not.
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
        period: float = 0.0,
        is_open: bool = True,
    ) -> Allowance:
        """The time and the tokens that prompts may take at this visit.

        Args:
            pending: Seconds, at these prices, of unscheduled prompts' tokens that may run.
            started: Of these, those of requests that hold KV cache.
            decodes: Load that decodes in this microbatch.
            running: Sequences that decode in any slot.
            arriving: Requests that the pending tokens belong to.
            kv_free: Free share of the KV cache, 0 to 1.
            slots: Slots that are open, 1 to m; with one there is nothing to keep even.
            measured: True if prices are seconds.
            period: Seconds of a round with the decodes alone; 0 where that is not known.
            is_open: True if the visited slot is open: its sequences may decode.
        """
        if measured != self._measured:  # the unit has changed
            self._others.clear()
        self._measured = measured
        starts = not running or kv_free >= self._settings.kv_reserve
        pending = pending if starts else started
        if self._stages == 1 and running and not is_open:
            pending = 0.0
        decoding = prices.of(decodes)
        seconds = 0.0
        # A closed slot's visits carry prompts that delay no decoding sequence: fewer, larger chunks.
        finest = max(24, 64 // slots) if slots == self._slots else 96
        if pending > 0:
            # Share of what a chunk delays that decodes, rather than arrives with it.
            disturbed = running / (running + max(1, arriving)) if slots > 1 else 0.0
            seconds = max(
                self._spread(pending, prices, disturbed, slots),
                max(self._others, default=0.0) - decoding,  # up to the longest of the others: free
            )
            if running and measured:
                share = running / (running + max(0, arriving - 1))
                bearable = self._target(period, share) / self._carriers(slots) - decoding
                if math.isfinite(bearable):
                    # The finest chunk's time, too, has to be borne; behind a long prefix it is long.
                    seconds = min(max(seconds, finest * prices.token), bearable)
                    finest = FINEST
            seconds = max(seconds, TINY)
        self._others.append(decoding + min(seconds, pending))
        return Allowance(
            prices,
            seconds=seconds,
            room=max(0, self._max_tokens - int(decodes.rows)),
            least=max(finest, self._least),
            decodes=decodes,
            align=self._align,
            starts=starts,
            slack=0.0 if running else prices.fixed / max(1, self._stages - 1),
        )

    def _carriers(self, slots: int) -> int:
        """Microbatches of a round that carry prompts, of which ``slots`` decode."""
        return slots if self._stages == 1 else self._slots

    def _target(self, period: float, share: float) -> float:
        """Seconds that a round of all microbatches, closed slots' too, may take with prompts.

        Args:
            period: Seconds of a round with the decodes alone; 0 where that is not known.
            share: Sequences that decode, among those and the arriving ones but one, above 0 to 1.
        """
        if self._settings.tpot_target_ms:
            return self._settings.tpot_target_ms / 1e3
        return period * (1 + SLOWDOWN / share) if period > 0 else math.inf

    def _spread(self, pending: float, prices: Prices, disturbed: float, slots: int) -> float:
        """Seconds of one microbatch's share of what is ``pending``.

        Args:
            disturbed: Part of the sequences, 0 to 1, that decode and are delayed by a chunk.
            slots: Slots that are open.
        """
        parts = self._parts(pending, prices)
        filling = (1 - disturbed) * pending / parts
        if self._settings.prefill_spread:
            return max(pending / self._settings.prefill_spread, filling)
        if slots == self._slots:
            spread = max(min(4 * slots + 4, 24), 2 * slots + 8)
        else:
            spread = 2 * slots
        return max(disturbed * pending / max(spread, 2 * parts), filling)

    def _parts(self, pending: float, prices: Prices) -> int:
        """Microbatches in which an idle pipeline is soonest done with ``pending``."""
        fixed = max(prices.fixed, CHEAPEST * prices.token)
        return max(1, round(math.sqrt((self._stages - 1) * pending / fixed)))
