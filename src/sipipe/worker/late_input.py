"""What comes for an iteration when it is launched already: its tokens, or its grammar.

Who runs here: whoever follows BIC-I puts, in the order of the iterations; the device thread takes.
"""

import queue
from typing import Any

from sipipe.errors import DamagedError, StallError


class LateInput:
    """``what`` of some iterations. ``stall_timeout``: seconds to wait; None: the engine has a bound."""

    def __init__(self, what: str, stall_timeout: float | None) -> None:
        self._what = what
        self._stall_timeout = stall_timeout
        self._came: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def put(self, iteration: int, value: Any) -> None:
        self._came.put((iteration, value))

    def take(self, iteration: int) -> Any:
        """Raises StallError: nothing came in time. DamagedError: another iteration's did."""
        try:
            # wait: `stall_timeout` for a grammar, for tokens the engine's for the iteration that
            # draws them; the engine's message, `close`
            number, value = self._came.get(timeout=self._stall_timeout)
        except queue.Empty:
            raise StallError(
                f"waited {self._stall_timeout:g} s for the {self._what} of iteration {iteration}"
            ) from None
        if number != iteration:
            raise DamagedError(
                f"channel bic-i: the {self._what} of iteration {number} came for {iteration}"
            )
        return value

    def close(self) -> None:
        """End a wait; the process ends."""
        self._came.put((-1, None))
