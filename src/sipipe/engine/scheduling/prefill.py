"""How many prompt tokens a microbatch computes on top of its decodes.

A pipeline with m microbatches in flight goes round as fast as its largest one: a prompt in one
microbatch delays the m - 1 others as much as if each of them carried one too. What counts is
therefore how often and how far the size changes from one microbatch to the next. So:

- What is pending is spread over ``prefill_spread`` microbatches, not put where it arrives. A
  number of pipeline periods alone is too coarse for short pipelines; one of microbatches alone is
  too slow for short ones or too coarse for long ones; so its default grows with m.
- A chunk may always fill its microbatch up to the largest of the last m - 1: that is free.
- It is not cut finer than ``min_chunk_tokens``: the first token would only come later.
- While little decodes there is little to disturb, and chunks may be larger: ``burst_tokens``.
- As the free KV cache runs out, no prompt is started, so that decoding sequences can grow
  instead of preempting one another.

Sizes are in tokens, which stand for time; the simulator's figures (docs/scheduling.md) say how
far that holds.
"""

from collections import deque

import msgspec

from sipipe.config import MicrobatchSettings


class PrefillThrottle:
    """Sizes prefill by what is pending, by what decodes, and by free KV cache.

    Args:
        slots: Microbatches in flight.
        max_tokens: Token budget of one microbatch.
        settings: Tunables.
    """

    def __init__(self, *, slots: int, max_tokens: int, settings: MicrobatchSettings) -> None:
        self._max_tokens = max_tokens
        self._resolved = {
            active: resolved(settings, slots, active) for active in range(1, slots + 1)
        }
        # Tokens of the other microbatches in flight.
        self._sizes: deque[int] = deque(maxlen=max(1, slots - 1))

    def tokens(
        self,
        *,
        pending: int,
        started: int,
        decoding: int,
        running: int,
        arriving: int,
        kv_free: float,
        slots: int,
    ) -> int:
        """Prompt tokens for this visit, at most ``pending``.

        Args:
            pending: Prompt tokens not yet scheduled of requests that may run.
            started: Of these, tokens of requests that hold KV cache.
            decoding: Tokens that decode in this microbatch.
            running: Sequences that decode in any slot.
            arriving: Requests that the pending tokens belong to.
            kv_free: Free share of the KV cache, 0 to 1.
            slots: Slots that are open, 1 to m; with one there is nothing to keep even.
        """
        settings = self._resolved[slots]
        room = max(0, self._max_tokens - decoding)
        if slots == 1:
            return room
        if running and kv_free < settings.kv_reserve:
            pending = started
        size = 0
        if pending > 0:
            disturbed = running / (running + max(1, arriving))
            burst = int(settings.burst_tokens * (1 - disturbed))
            size = max(
                _share(pending, settings.prefill_spread),
                min(_share(pending, slots), burst),
                max(self._sizes, default=0) - decoding,
                settings.min_chunk_tokens,
            )
            size = min(size, room, pending)
        self._sizes.append(decoding + size)
        return size


def resolved(settings: MicrobatchSettings, slots: int, active: int) -> MicrobatchSettings:
    """``settings`` with the defaults that depend on the microbatches in flight, ``slots``, and on
    how many of the slots are open, ``active``."""
    if active == slots:
        spread = max(min(4 * slots + 4, 24), 2 * slots + 8)
        chunk = max(24, 64 // slots)
    else:  # a closed slot's visits carry prompts that delay no decoding sequence
        spread, chunk = 2 * active, 96
    return msgspec.structs.replace(
        settings,
        prefill_spread=settings.prefill_spread or spread,
        min_chunk_tokens=settings.min_chunk_tokens or chunk,
    )


def _share(tokens: int, parts: int) -> int:
    return -(-tokens // parts)
