"""The bound on what the engine waits for: what makes no progress stops it, and says where.

Runs on the events thread only. An iteration has the bound itself; while a sampler is
replaced, the clock stands still. Any other call of the workers may take as long as they live and
answer. While something is late, the workers are asked again and again: as long as one does not
answer, the engine is stalled, and ``/health`` says so.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sipipe.engine.iteration.calls import Calls
from sipipe.engine.iteration.iterations import Iterations
from sipipe.errors import StallError
from sipipe.messages.replies import Status

ANSWER_SECONDS = 2.0
LATE_SECONDS = 10.0
"""After which the workers are asked for the first time."""
LONGEST_SLEEP = 5.0


class StallClock:
    """Monotonic seconds, less those in which it stood still, and all but some of those in which
    nobody looked: this process stood. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # wait: held for moments; nobody waits under it
        self._stood = 0.0
        self._still: dict[str, float] = {}
        """Names that have stopped the clock, each with the time when it goes on at the latest."""
        self._looked = time.monotonic()

    def now(self) -> float:
        """The time on this clock."""
        with self._lock:
            return self._look() - self._stood

    def stop(self, name: str, seconds: float) -> None:
        """It stands still until ``name`` lets it go on, or for ``seconds`` since it first said so."""
        with self._lock:
            now = self._look()
            self._still.setdefault(name, now + seconds)

    def go_on(self, name: str) -> None:
        with self._lock:
            self._look()
            self._still.pop(name, None)

    def _look(self) -> float:
        """Count what has passed since the last look; returns the monotonic time."""
        before = self._looked
        self._looked = time.monotonic()
        until = max(self._still.values(), default=before)
        paused = self._looked - before - 2 * LONGEST_SLEEP
        self._stood += max(0.0, min(until, self._looked) - before, paused)
        self._still = {name: end for name, end in self._still.items() if end > self._looked}
        return self._looked


@dataclass(kw_only=True)
class StallWatch:
    """Watch on the oldest iteration and call, whose bound is ``timeout`` seconds of their clock."""

    iterations: Iterations
    calls: Calls
    workers: Sequence[str]
    ask: Callable[[], None]
    """Asks all workers what they do; :meth:`heard` takes the answers."""
    clock: StallClock
    timeout: float
    fail: Callable[[BaseException], None]
    show: Callable[[bool], None]
    """Told whether a worker that should answer does not."""
    _answers: dict[str, str] = field(default_factory=dict)
    _answers_until: float | None = None
    _probed: float | None = None
    """When the workers were asked last, before the bound is reached."""

    def heard(self, worker: str, status: Status) -> None:
        """A worker says what it does."""
        self._answers[worker] = status.doing

    def turn(self) -> float:
        """Ask the workers when the bound is reached, stop the engine when they have answered.
        Returns the seconds until the next turn at the latest."""
        waiting = [w for w in (self.iterations.oldest(), self.calls.oldest()) if w is not None]
        oldest = min(waiting, key=lambda wait: wait.began, default=None)
        now = time.monotonic()
        waited = 0.0 if oldest is None else self.clock.now() - oldest.began
        left = LONGEST_SLEEP if oldest is None else self.timeout - waited
        if oldest is None or left > 0:
            self._answers_until = None
            return max(0.05, min(left, self._probe(waited > LATE_SECONDS, now)))
        if self._answers_until is None:
            self._probed = None
            self._answers.clear()
            self._answers_until = now + (self.timeout if oldest.may_be_long else ANSWER_SECONDS)
            self.ask()
        silent = len(self._answers) < len(self.workers)
        if silent and now < self._answers_until:
            return min(LONGEST_SLEEP, self._answers_until - now)
        call = self.calls.oldest()
        if call is not None and call is oldest and not silent:
            # All workers live, and only the caller knows how long it takes: look again when the
            # bound has passed once more.
            call.began = self.clock.now()
            self._answers_until = None
            return LONGEST_SLEEP
        doing = "; ".join(f"{w} {self._answers.get(w, 'does not answer')}" for w in self.workers)
        more = 'Raise "stall_timeout" in the sipipe config if this may take so long'
        self.fail(StallError(f"no progress for {self.timeout:g} s: {oldest}. {doing}. {more}"))
        return LONGEST_SLEEP

    def _probe(self, late: bool, now: float) -> float:
        """Ask again and again while something is late. Returns the seconds to the next look."""
        probed = self._probed
        if not late:
            self._probed = None
            self.show(False)
            return LONGEST_SLEEP
        if probed is None or now - probed >= ANSWER_SECONDS:
            if probed is not None:
                self.show(len(self._answers) < len(self.workers))
            self._answers.clear()
            self.ask()
            probed = self._probed = now
        return probed + ANSWER_SECONDS - now
