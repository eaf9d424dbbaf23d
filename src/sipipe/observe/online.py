"""The bubble accounting of docs/tracing.md, as far as one stage can do it while it runs.

Who runs here: the threads of one stage process that record. ``note`` may be called by each of them
(it stores one tuple, which the GIL makes atomic; where a thread beside the forward's records its
part of the output projection, a sum may miss one), ``account`` only by the thread that records the
forward. Reads the rings of the stage before, of the last stage and of the executor on the
statistics page; a pair (iteration, end) that is being overwritten is noticed by its iteration and
counts as unknown.

What a stage cannot see is counted as if it had not waited for it: an iteration older than ``RING``,
and stages on other hosts, whose pages are not shared. The last stage's pass, where it is recorded
later than the product for it (GPUs), counts as if it had ended just before. The report, made from
the trace, is exact.
"""

from itertools import pairwise

from sipipe.observe.phases import Phase

RING = 32
"""Iterations whose ends a process keeps on the page."""

# Plain integers: comparing with enum members costs several times as much.
_WAIT_SCHEDULING, _WAIT_HIDDEN = int(Phase.WAIT_SCHEDULING), int(Phase.WAIT_HIDDEN)
_SEND, _LOGITS = int(Phase.SEND), int(Phase.LOGITS)
_SAMPLE, _HANDOVER = int(Phase.SAMPLE), int(Phase.HANDOVER)
_BUSY, _IMBALANCE, _INTRA, _INTER, _UNSCHEDULED, _IDLE = range(6)
_NO_WAIT = (-1, 0, 0)


class Online:
    """What one stage knows about its last iterations.

    Args:
        words: The page.
        before: Where on it the ring of the stage before lies; None at the first stage.
        final: Where the last stage's rings of passes and of sends lie; None on that stage.
        gathered: Where the executor's ring of gathers lies.
        dispatched: Where its ring of dispatches lies.
        idle: Where it says from when to when it had no request last.
        inflight: Microbatches in flight at most.
    """

    def __init__(
        self,
        words: memoryview,
        *,
        before: int | None,
        final: tuple[int, int] | None,
        gathered: int,
        dispatched: int,
        idle: int,
        inflight: int,
    ) -> None:
        self._words = words
        self._before = before
        self._final = final
        self._gathered = gathered
        self._dispatched = dispatched
        self._idle = idle
        self._inflight = inflight
        self._scheduled = [_NO_WAIT] * RING
        self._hidden = [_NO_WAIT] * RING
        self._sent = (0, 0)
        self._spent = [0] * (_IDLE + 1)
        """Since the last forward: busy time, then the bubbles by kind."""
        self._end = 0
        """When the device's last work ended, or what else only this stage does."""

    def note(self, phase: int, iteration: int, start_ns: int, end_ns: int) -> None:
        """Remember what ``account`` will need."""
        if phase == _WAIT_SCHEDULING:
            self._scheduled[iteration % RING] = (iteration, start_ns, end_ns)
        elif phase == _WAIT_HIDDEN:
            self._hidden[iteration % RING] = (iteration, start_ns, end_ns)
        elif phase == _SEND:
            self._sent = (start_ns, end_ns)
        elif phase == _LOGITS and self._end:
            self._wait_for(iteration, start_ns, self._final)
            self._spent[_BUSY] += max(0, end_ns - max(start_ns, self._end))
            self._end = max(end_ns, self._end)
        elif phase in (_SAMPLE, _HANDOVER) and self._end:
            self._spent[_IMBALANCE] += max(0, end_ns - max(start_ns, self._end))
            self._end = max(end_ns, self._end)

    def account(self, iteration: int, start_ns: int, end_ns: int) -> list[int]:
        """Nanoseconds from the end of the last device work to the end of this one.

        Busy time first, then the bubbles by kind. Time without any request is no bubble.
        """
        last, spent = self._end, self._spent
        if last:
            self._wait_for(iteration, start_ns, None)
        self._end, self._spent = max(end_ns, last), [0] * (_IDLE + 1)
        spent[_BUSY] += max(0, end_ns - max(start_ns, last))
        return spent[:_IDLE]

    def _wait_for(self, iteration: int, start_ns: int, final: tuple[int, int] | None) -> None:
        """Count the time from the end of the last device work to the start of this one.

        ``final``: it is a part of the output projection, for what the last stage hands on.
        """
        last, spent = self._end, self._spent
        if last >= start_ns:
            return
        idle = self._words[self._idle], self._words[self._idle + 1]
        dispatched = self._time(self._dispatched, iteration)
        freed = self._time(self._gathered, iteration - self._inflight)
        scheduled = self._wait(self._scheduled, iteration)
        made, hidden = 0, (0, 0)
        room: list[tuple[int, int]] = []
        if final is not None:
            made = self._time(final[0], iteration) or start_ns
            hidden = made, self._time(final[1], iteration)
        elif self._before is not None:
            made = self._time(self._before, iteration)
            hidden = self._wait(self._hidden, iteration)
        if made > last:
            room = self._room(iteration, start_ns)
        sent = self._sent

        def kind(t: int) -> int:
            """The rules of docs/tracing.md, in their order."""
            if idle[0] <= t < idle[1]:
                return _IDLE
            if t < dispatched:
                return _UNSCHEDULED if t >= freed else _IMBALANCE
            if scheduled[0] <= t < scheduled[1]:
                return _UNSCHEDULED
            if t < made:
                return _UNSCHEDULED if any(a <= t < b for a, b in room) else _IMBALANCE
            if hidden[0] <= t < hidden[1] or sent[0] <= t < sent[1]:
                return _INTER
            return _INTRA

        marks = [dispatched, freed, made, *scheduled, *hidden, *sent, *idle]
        for span in room:
            marks += span
        edges = [last, *sorted({t for t in marks if last < t < start_ns}), start_ns]
        for begin, end in pairwise(edges):
            spent[kind(begin)] += end - begin

    def _room(self, iteration: int, end: int) -> list[tuple[int, int]]:
        """When, up to ``end``, fewer microbatches were in flight than may be.

        The pipeline has room from the moment at which an iteration is gathered to the one at which
        its slot's next is dispatched; all up to ``iteration`` have been dispatched.
        """
        found = []
        for later in range(iteration + 1, iteration + self._inflight + 1):
            freed = self._time(self._gathered, later - self._inflight)
            if later >= self._inflight and not freed:
                break  # not gathered yet, nor is any that follows
            found.append((freed, self._time(self._dispatched, later) or end))
        return found

    def _time(self, ring: int, iteration: int) -> int:
        """When a process ended a phase of an iteration; 0 where it is not known."""
        pair = ring + 2 * (iteration % RING)
        end = self._words[pair + 1]
        return int(end) if self._words[pair] == iteration else 0

    @staticmethod
    def _wait(waits: list[tuple[int, int, int]], iteration: int) -> tuple[int, int]:
        """Begin and end of the wait for an iteration; of no length where there was none."""
        seen, begin, end = waits[iteration % RING]
        return (begin, end) if seen == iteration else (0, 0)
