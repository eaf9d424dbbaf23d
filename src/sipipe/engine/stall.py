"""The bound on what the engine waits for: what makes no progress stops it, and says where.

Runs on the events thread only. An iteration has the bound itself, and so has one on vLLM's own
path. Any other call of the workers may take as long as they live and answer: nobody knows how long
a user's own method takes.
"""

import time
from collections.abc import Callable, Sequence

from sipipe.engine.iterations import Iterations
from sipipe.engine.rpc import Calls
from sipipe.errors import StallError
from sipipe.messages.replies import Status

ANSWER_SECONDS = 2.0
LONGEST_SLEEP = 5.0


class StallWatch:
    """Looks at the oldest iteration and the oldest call; ``timeout`` seconds are the bound.

    ``ask`` asks all ``workers`` what they do; :meth:`heard` takes the answers.
    """

    def __init__(
        self,
        iterations: Iterations,
        calls: Calls,
        workers: Sequence[str],
        ask: Callable[[], None],
        timeout: float,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._iterations = iterations
        self._calls = calls
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
        waiting = [w for w in (self._iterations.oldest(), self._calls.oldest()) if w is not None]
        oldest = min(waiting, key=lambda wait: wait.began, default=None)
        now = time.monotonic()
        left = LONGEST_SLEEP if oldest is None else oldest.began + self._timeout - now
        if oldest is None or left > 0:
            self._answers_until = None
            return max(0.05, min(LONGEST_SLEEP, left))
        if self._answers_until is None:
            self._answers.clear()
            self._answers_until = now + (self._timeout if oldest.may_be_long else ANSWER_SECONDS)
            self._ask()
        silent = len(self._answers) < len(self._workers)
        if silent and now < self._answers_until:
            return min(LONGEST_SLEEP, self._answers_until - now)
        if oldest.may_be_long and not silent:
            # All live: look again when the bound has passed once more.
            oldest.began, self._answers_until = now, None
            return LONGEST_SLEEP
        doing = "; ".join(
            f"{worker} {self._answers.get(worker, 'does not answer')}" for worker in self._workers
        )
        self._fail(
            StallError(
                f"no progress for {self._timeout:g} s: {oldest}. {doing}. "
                'Raise "stall_timeout" in the sipipe config if this may take so long'
            )
        )
        return LONGEST_SLEEP
