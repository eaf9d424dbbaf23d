"""The slots that a sender may fill, and the wait for one when the receiver lags."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from sipipe.errors import StallError

if TYPE_CHECKING:
    from sipipe.ipc.link.endpoint import LinkEndpoint
    from sipipe.ipc.link.transport import SendingTransport

__all__ = ["Credit"]


class Credit:
    """Used by the thread that calls ``send`` alone.

    Args:
        check: raises if the link is closed or broken.
    """

    def __init__(
        self, endpoint: LinkEndpoint, transport: SendingTransport, check: Callable[[], None]
    ) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._check = check
        self.free = deque(range(endpoint.depth))
        # Invariant: len(free) + in flight == depth.
        self.waits = 0
        """Calls of :meth:`wait` that found the receiver ``depth`` iterations behind."""
        self.waited = 0.0
        """Seconds spent in these."""

    @property
    def in_flight(self) -> int:
        """Iterations sent and not yet seen released."""
        return self._endpoint.depth - len(self.free)

    def wait(self, iteration: int, timeout: float | None) -> None:
        """Return when a slot is free.

        Raises:
            StallError: none came free in time.
        """
        self.free.extend(self._transport.collect_releases(0.0))
        if self.free:
            return
        bound = self._endpoint.stall_timeout if timeout is None else timeout
        began = time.monotonic()
        self.waits += 1
        try:
            while not self.free:
                self._check()
                left = began + bound - time.monotonic()
                if left <= 0:
                    raise StallError(
                        f"{self._endpoint.describe()}: iteration {iteration} waited {bound:g} s "
                        f"for the next stage, which is {self._endpoint.depth} iterations behind "
                        "and releases none; look at its log"
                    )
                self.free.extend(self._transport.collect_releases(min(left, 1.0)))
        except Exception:
            self._check()  # closed meanwhile, or the sender's thread knows better what went wrong
            raise
        finally:
            self.waited += time.monotonic() - began
