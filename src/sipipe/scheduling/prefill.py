"""How many prompt tokens a microbatch computes on top of its decodes.

One large prefill chunk in one microbatch makes every stage wait for it in turn, and the other
microbatches' sequences with it. What is pending is therefore spread over the next m visits, so
that the microbatches of one rotation cost the same; it is not cut finer than
``min_prefill_tokens``, since a chunk that small costs hardly less than a bigger one. As the free
KV cache runs out, no new prompt is started, so that decoding sequences can grow without being
preempted.
"""

from __future__ import annotations

from collections import deque

from sipipe.scheduling.settings import SlotSettings

__all__ = ["PrefillThrottle"]


class PrefillThrottle:
    """Sizes prefill by what is pending and by free KV cache.

    Args:
        slots: Microbatches in flight.
        max_tokens: Token budget of one microbatch.
        settings: Tunables.
    """

    def __init__(self, *, slots: int, max_tokens: int, settings: SlotSettings) -> None:
        self._slots = slots
        self._max_tokens = max_tokens
        self._least = settings.min_prefill_tokens
        self._reserve = settings.kv_reserve
        # What each of the last m visits would have taken: the largest of them holds, so that the
        # chunks of a rotation are equal instead of shrinking with what is left.
        self._asked: deque[int] = deque(maxlen=slots)

    def tokens(
        self, *, pending: int, started: int, decoding: int, running: int, kv_free: float
    ) -> int:
        """Prompt tokens for this visit.

        Args:
            pending: Prompt tokens not yet scheduled.
            started: Of these, tokens of requests that hold KV cache.
            decoding: Sequences that decode in this microbatch.
            running: Sequences that decode in any slot.
            kv_free: Free share of the KV cache, 0 to 1.
        """
        room = max(0, self._max_tokens - decoding)
        if self._slots == 1:
            return room
        if running and kv_free < self._reserve:
            pending = started
        self._asked.append(-(-pending // self._slots))
        if pending <= 0:
            return 0
        return min(room, max(self._least, *self._asked))
