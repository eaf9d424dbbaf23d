"""The bubble accounting of docs/tracing.md, as far as one stage can do it while it runs.

Who runs here: the threads of one stage process that record. ``see`` may be called by each of them
(it stores one tuple, which the GIL makes atomic), ``account`` only by the thread that records the
forward. Reads the rings of the stage before and of the executor on the statistics page; a pair
(iteration, end) that is being overwritten is noticed by its iteration and counts as unknown.

What a stage cannot see is counted as if it had not waited for it: an iteration older than ``RING``,
and stages on other hosts, whose pages are not shared. The report, made from the trace, is exact.
"""

from __future__ import annotations

from typing import Protocol

from sipipe.observe.phases import Phase

BUBBLES = ("load_imbalance", "intra_stage", "inter_stage", "unscheduled")
"""The kinds of bubble, in the order in which figures are kept everywhere."""
RING = 32
"""Iterations whose ends a process keeps on the page."""

# Plain integers: comparing with enum members costs several times as much.
_WAIT_SCHEDULING, _WAIT_HIDDEN = int(Phase.WAIT_SCHEDULING), int(Phase.WAIT_HIDDEN)
_SEND, _LOGITS = int(Phase.SEND), int(Phase.LOGITS)
_SAMPLE, _HANDOVER = int(Phase.SAMPLE), int(Phase.HANDOVER)
_NOTHING = (-1, 0, 0)


class _Limits(Protocol):
    @property
    def inflight(self) -> int: ...


class Online:
    """What one stage knows about its last iterations."""

    __slots__ = (
        "_before",
        "_busy",
        "_dispatched",
        "_end",
        "_gathered",
        "_hidden",
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
        gathered: int,
        dispatched: int,
        limits: _Limits,
    ) -> None:
        """Where on the page the rings of the stage before and the two of the executor lie."""
        self._words = words
        self._before = before
        self._gathered = gathered
        self._dispatched = dispatched
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
        if last >= start_ns:
            return busy, (surplus, 0, 0, 0)
        idle = [(last, start_ns)]
        # In the order of the rules of docs/tracing.md; each takes its part of what is left.
        imbalance = unscheduled = inter = 0
        undispatched, idle = _take(idle, last, self._ring(self._dispatched, iteration))
        for begin, end in undispatched:
            freed = min(max(self._ring(self._gathered, iteration - self._limit), begin), end)
            imbalance += freed - begin
            unscheduled += end - freed
        seen, begin, end = self._scheduled[iteration % RING]
        if seen == iteration:
            on_its_way, idle = _take(idle, begin, end)
            unscheduled += _length(on_its_way)
        if self._before is not None:
            unfinished, idle = _take(idle, last, self._ring(self._before, iteration))
            for begin, end in unfinished:
                room = self._room(iteration, begin, end)
                imbalance += end - begin - room
                unscheduled += room
            seen, begin, end = self._hidden[iteration % RING]
            if seen == iteration:
                under_way, idle = _take(idle, begin, end)
                inter += _length(under_way)
        _, begin, end = self._send
        sending, idle = _take(idle, begin, end)
        inter += _length(sending)
        return busy, (imbalance + surplus, _length(idle), inter, unscheduled)

    def _room(self, iteration: int, start: int, end: int) -> int:
        """For how much of start..end fewer microbatches were in flight than may be.

        The pipeline has room from the moment at which an iteration is gathered to the one at which
        its slot's next is dispatched; all up to ``iteration`` have been dispatched.
        """
        room = 0
        for later in range(iteration + 1, iteration + self._limit + 1):
            freed = self._ring(self._gathered, later - self._limit)
            if later >= self._limit and not freed:
                break  # not gathered yet, nor is any that follows
            filled = self._ring(self._dispatched, later) or end
            start = max(start, freed)
            if start >= end:
                break
            room += max(0, min(filled, end) - start)
            start = max(start, filled)
        return room

    def _ring(self, first: int, iteration: int) -> int:
        """When a process ended its main phase of an iteration; 0 where it is not known."""
        pair = first + 2 * (iteration % RING)
        end = self._words[pair + 1]
        return int(end) if self._words[pair] == iteration else 0


_Pieces = list[tuple[int, int]]


def _take(pieces: _Pieces, begin: int, end: int) -> tuple[_Pieces, _Pieces]:
    """Cut begin..end out of disjoint pieces: what was cut out, and what is left."""
    cut: _Pieces = []
    left: _Pieces = []
    for first, last in pieces:
        inner = (max(first, begin), min(last, end))
        if inner[0] >= inner[1]:
            left.append((first, last))
            continue
        cut.append(inner)
        if first < inner[0]:
            left.append((first, inner[0]))
        if inner[1] < last:
            left.append((inner[1], last))
    return cut, left


def _length(pieces: _Pieces) -> int:
    return sum(last - first for first, last in pieces)
