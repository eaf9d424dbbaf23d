"""How far two hosts' monotonic clocks are apart, from messages that go there and back.

The follower sends a request at its time t0, the reference host notes its own time r and answers,
the answer is there at t1. The offset is r - (t0 + t1) / 2, wrong by at most half of the time that
the round trip took, whatever the two directions cost. Of several exchanges the quickest decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sipipe.observe.recorder import Recorder


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Add ``offset_ns`` to this host's clock to get the reference host's, ± ``error_ns``."""

    offset_ns: int
    error_ns: int


def estimate_offset(
    ask: Callable[[], int],
    *,
    rounds: int = 16,
    now: Callable[[], int] = time.monotonic_ns,
) -> ClockOffset:
    """Measure the offset of this host's clock to the reference host's.

    Args:
        ask: one exchange: sends a request over any connection, returns the reference host's
            ``time.monotonic_ns()`` at its answer. Exceptions pass through.
        rounds: how many exchanges; the quickest is taken.
        now: this host's clock.
    """
    if rounds < 1:
        raise ValueError("rounds: at least one exchange is needed")
    best: ClockOffset | None = None
    for _ in range(rounds):
        sent = now()
        theirs = ask()
        received = now()
        error = (received - sent + 1) // 2
        if best is None or error < best.error_ns:
            best = ClockOffset(theirs - (sent + received) // 2, error)
    assert best is not None
    return best


def record_offset(recorder: Recorder, ask: Callable[[], int], *, rounds: int = 16) -> ClockOffset:
    """Estimate the offset and write it into the trace; call at start and about once a minute."""
    found = estimate_offset(ask, rounds=rounds)
    recorder.clock(found.offset_ns, found.error_ns)
    return found
