"""Input of an iteration that comes when it is launched already: its tokens, or its grammar.

Who runs here: the thread that follows BIC-I puts, in the order of the iterations; the device thread
takes.
"""

import queue
from typing import Any

from sipipe.errors import DamagedError, StallError


class LateInput:
    """Queue of the late input of some iterations.

    Args:
        noun: what the input is, for messages.
        stall_timeout: seconds that :meth:`take` waits; None where only the engine has a bound.
    """

    def __init__(self, noun: str, stall_timeout: float | None) -> None:
        self._noun = noun
        self._stall_timeout = stall_timeout
        self._inputs: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def put(self, iteration: int, value: Any) -> None:
        """Add the input of ``iteration``."""
        self._inputs.put((iteration, value))

    def take(self, iteration: int) -> Any:
        """Wait for the input of ``iteration``. Raises StallError: nothing came in time. DamagedError:
        the input of another iteration came."""
        try:
            # wait: `stall_timeout` for a grammar, for tokens the engine's for the iteration that
            # draws them; the engine's message, `close`
            number, value = self._inputs.get(timeout=self._stall_timeout)
        except queue.Empty:
            raise StallError(
                f"waited {self._stall_timeout:g} s for the {self._noun} of iteration {iteration}"
            ) from None
        if number != iteration:
            raise DamagedError(
                f"channel bic-i: the {self._noun} of iteration {number} came for {iteration}"
            )
        return value

    def close(self) -> None:
        """End a wait with an error, since the process ends."""
        self._inputs.put((-1, None))
