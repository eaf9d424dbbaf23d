"""Device phases from the device's own events: when a forward ran, not when it was launched.

An accelerator runs behind its host, so host times around a launch say nothing. Two timing events
around the work do; they tell the milliseconds between any two of them. One *anchor* event, whose
host time is known because the host waited for it once, turns those into the host's clock.

Guarantees: never waits for the device (but once, at the start). A phase is recorded when its end
event has happened and ``collect`` is called.

Relies on: events with ``record()``, ``query()``, ``elapsed_time(later) -> ms`` and ``synchronize()``,
such as ``torch.cuda.Event(enable_timing=True)``; this package does not import torch. The
milliseconds are 32-bit floats, so the anchor moves on to a recent event each second, where a float
resolves 0.1 µs; and since work cannot start before the host asked for it, nor end after the host
saw its end, a drift between the two clocks is pulled back whenever it would break either.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from sipipe.observe.recorder import Recorder

_REANCHOR_NS = 1_000_000_000


class Event(Protocol):
    """What a timing event can do."""

    def record(self) -> None:
        """Mark this point in the stream of work."""

    def query(self) -> bool:
        """Whether the device is past the mark."""

    def synchronize(self) -> None:
        """Wait for it."""

    def elapsed_time(self, end_event: Event, /) -> float:
        """Milliseconds from this event to a later one."""


class DeviceTimer:
    """Records phases of one device stream. One thread uses it: the one that launches the work."""

    def __init__(
        self,
        recorder: Recorder,
        make_event: Callable[[], Event],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Wait for the device once, to know its time."""
        self._record = recorder.record
        self._make = make_event
        self._now = now
        self._spare: list[Event] = []
        self._open: deque[tuple[Event, int, Event, int, int, int, int, int]] = deque()
        self._anchor = make_event()
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_ns = now()

    def begin(self) -> tuple[Event, int]:
        """Mark the start of a phase; give what it returns to :meth:`end`."""
        event = self._spare.pop() if self._spare else self._make()
        asked = self._now()
        event.record()
        return event, asked

    def end(
        self,
        begun: tuple[Event, int],
        phase: int,
        iteration: int,
        slot: int,
        *,
        batch: int = 0,
        tokens: int = 0,
    ) -> None:
        """Mark the end of a phase; it is recorded by a later :meth:`collect`."""
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        self._open.append((*begun, event, phase, iteration, slot, batch, tokens))

    def collect(self) -> int:
        """Record the phases that have ended; returns how many have not."""
        while self._open and self._open[0][2].query():
            first, asked, last, phase, iteration, slot, batch, tokens = self._open.popleft()
            seen = self._now()
            start = self._anchor_ns + round(self._anchor.elapsed_time(first) * 1e6)
            end = start + max(0, round(first.elapsed_time(last) * 1e6))
            shift = max(0, asked - start) or min(0, seen - end)
            self._anchor_ns += shift
            start, end = start + shift, end + shift
            self._record(phase, iteration, slot, start, end, batch, tokens)
            self._spare.append(first)
            if end - self._anchor_ns > _REANCHOR_NS:
                self._spare.append(self._anchor)
                self._anchor, self._anchor_ns = last, end
            else:
                self._spare.append(last)
        return len(self._open)

    def close(self) -> None:
        """Wait for the device and record what is left."""
        if self._open:
            self._open[-1][2].synchronize()
        self.collect()
