"""The bound on every iteration: one that makes no progress stops the engine, and says where.

Runs on the events thread only.
"""

import time
from collections.abc import Callable, Sequence

from sipipe.engine.iterations import Iterations
from sipipe.errors import StallError
from sipipe.messages.replies import Status

ANSWER_SECONDS = 2.0
LONGEST_SLEEP = 5.0


class StallWatch:
    """Looks at the oldest iteration in flight; ``timeout`` seconds are the bound.

    ``ask`` asks all ``workers`` what they do; :meth:`heard` takes the answers.
    """

    def __init__(
        self,
        iterations: Iterations,
        workers: Sequence[str],
        ask: Callable[[], None],
        timeout: float,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._iterations = iterations
        self._workers = workers
        self._ask = ask
        self._timeout = timeout
        self._fail = fail
        self._answers: dict[str, str] = {}
        self._answers_until: float | None = None

    def heard(self, worker: str, status: Status) -> None:
        """A worker says what it does."""
        self._answers[worker] = status.doing

    def turn(self) -> float:
        """Ask the workers when the bound is reached, stop the engine when they have answered.

        Returns the seconds until the next turn at the latest.
        """
        oldest = self._iterations.oldest()
        now = time.monotonic()
        left = LONGEST_SLEEP if oldest is None else oldest.began + self._timeout - now
        if oldest is None or left > 0:
            self._answers_until = None
            return max(0.05, min(LONGEST_SLEEP, left))
        if self._answers_until is None:
            self._answers.clear()
            self._answers_until = now + ANSWER_SECONDS
            self._ask()
        if len(self._answers) < len(self._workers) and now < self._answers_until:
            return self._answers_until - now
        doing = "; ".join(
            f"{worker} {self._answers.get(worker, 'does not answer')}" for worker in self._workers
        )
        self._fail(
            StallError(
                f"no progress for {self._timeout:g} s: iteration {oldest.number} waits for "
                f"{oldest.late}. {doing}. "
                'Raise "stall_timeout" in the sipipe config if one iteration may take this long'
            )
        )
        return LONGEST_SLEEP
