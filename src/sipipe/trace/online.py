"""The bubble accounting of docs/tracing.md, as far as one stage can do it while it runs.

Who runs here: the threads of one stage process that record. ``see`` may be called by each of them
(it stores one tuple, which the GIL makes atomic), ``account`` only by the thread that records the
forward. Reads the rings of the stage before and of the executor on the statistics page; a pair
(iteration, end) that is being overwritten is noticed by its iteration and counts as unknown.

What it cannot see it estimates: whether the pipeline was full is judged by the executor's gauge at
the end of the gap. The report, made from the trace, is exact.
"""

from __future__ import annotations

from typing import Protocol

from sipipe.trace.phases import Phase

BUBBLES = ("load_imbalance", "intra_stage", "inter_stage", "unscheduled")
"""The kinds of bubble, in the order in which figures are kept everywhere."""
RING = 32
"""Iterations whose ends a process keeps on the page."""

_WAIT_SCHEDULING, _WAIT_HIDDEN, _SEND = Phase.WAIT_SCHEDULING, Phase.WAIT_HIDDEN, Phase.SEND
_LOGITS, _SAMPLE, _HANDOVER = Phase.LOGITS, Phase.SAMPLE, Phase.HANDOVER
_NOTHING = (-1, 0, 0)


class _Limits(Protocol):
    @property
    def inflight(self) -> int: ...


class Online:
    """What one stage knows about its last iterations."""

    __slots__ = (
        "_before",
        "_busy",
        "_end",
        "_executor",
        "_hidden",
        "_inflight",
        "_limit",
        "_scheduled",
        "_send",
        "_surplus",
        "_words",
    )

    def __init__(
        self,
        words: memoryview,
        before: int | None,
        executor: int,
        inflight: int,
        limits: _Limits,
    ) -> None:
        """Where on the page the rings of the stage before and the executor lie."""
        self._words = words
        self._before = before
        self._executor = executor
        self._inflight = inflight
        self._limit = limits.inflight
        self._scheduled = [_NOTHING] * RING
        self._hidden = [_NOTHING] * RING
        self._send = _NOTHING
        self._surplus = 0
        self._busy = 0
        self._end = 0

    def see(self, phase: int, iteration: int, start_ns: int, end_ns: int) -> None:
        """Remember what ``account`` will need."""
        if phase == _WAIT_SCHEDULING:
            self._scheduled[iteration % RING] = (iteration, start_ns, end_ns)
        elif phase == _WAIT_HIDDEN:
            self._hidden[iteration % RING] = (iteration, start_ns, end_ns)
        elif phase == _SEND:
            self._send = (iteration, start_ns, end_ns)
        elif phase == _LOGITS and self._end:
            self._busy += end_ns - max(start_ns, self._end)
            self._end = max(end_ns, self._end)
        elif phase in (_SAMPLE, _HANDOVER) and self._end:
            self._surplus += max(0, end_ns - max(start_ns, self._end))
            self._end = max(end_ns, self._end)

    def account(
        self, iteration: int, start_ns: int, end_ns: int
    ) -> tuple[int, tuple[int, int, int, int]]:
        """Busy time, and the bubbles by kind, from the last device work to the end of this one."""
        last, surplus, busy = self._end, self._surplus, self._busy
        self._end, self._surplus, self._busy = max(end_ns, last), 0, 0
        if not last:
            return end_ns - start_ns, (0, 0, 0, 0)
        busy += max(0, end_ns - max(start_ns, last))
        at = last
        imbalance = unscheduled = inter = 0
        seen, _, scheduled = self._scheduled[iteration % RING]
        if seen == iteration and at < scheduled:
            stop = min(scheduled, start_ns)
            freed = min(max(self._ring(self._executor, iteration - self._limit), at), stop)
            imbalance += freed - at
            unscheduled += stop - freed
            at = max(at, stop)
        seen, _, arrived = self._hidden[iteration % RING]
        if self._before is not None and seen == iteration and at < arrived:
            stop = min(arrived, start_ns)
            sent = min(max(self._ring(self._before, iteration), at), stop)
            if self._words[self._inflight] >= self._limit:
                imbalance += sent - at
            else:
                unscheduled += sent - at
            inter += stop - sent
            at = max(at, stop)
        _, began, ended = self._send
        sending = max(0, min(ended, start_ns) - max(began, at))
        inter += sending
        intra = max(0, start_ns - at) - sending
        return busy, (imbalance + surplus, intra, inter, unscheduled)

    def _ring(self, first: int, iteration: int) -> int:
        """When a process ended its main phase of an iteration; 0 where it is not known."""
        pair = first + 2 * (iteration % RING)
        end = self._words[pair + 1]
        return int(end) if self._words[pair] == iteration else 0
