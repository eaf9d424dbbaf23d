"""The spare sampler: a process that has imported and compiled, and waits for a place.

Who runs here
    The events thread of the children of its host; ``want`` first where the samplers are opened, and
    ``close`` at the engine's end.
Guarantees
    Where one is warm, a sampler that dies has a successor at once. The next spare starts
    ``SPARE_SECONDS`` later, at low priority; so does the first, once the samplers have opened their
    channels. A spare that ends by itself is replaced, and nothing else comes of it.
Relies on
    A spare knows nothing of the engine but its control pipe, with which it ends.
"""

import logging
import math
import socket
import time
from collections.abc import Callable

from sipipe.engine.children.children import Child, Children
from sipipe.messages.start_records import SPARE

logger = logging.getLogger(f"vllm.{__name__}")

SPARE_SECONDS = 5.0
AGAIN_SECONDS = 60.0
"""After the end of a spare that had no place: where memory is short it may be killed first."""

Started = tuple[Child, socket.socket]
"""A sampler process, and the receiving end of its BIC-O."""


class SpareSampler:
    """The spare of one host's samplers; ``start`` starts a sampler process of a name."""

    def __init__(self, children: Children, start: Callable[[str], Started]) -> None:
        self._children = children
        self._start = start
        self._due = math.inf
        self._process: Started | None = None
        self.warm = False
        """Whether there is one that could take a place now."""

    def want(self) -> None:
        """Start one in ``SPARE_SECONDS``."""
        self._due = time.monotonic() + SPARE_SECONDS

    def keep(self) -> float:
        """Start one if it is due; returns the seconds until it is."""
        if (left := self._due - time.monotonic()) > 0.0:
            return left
        self._due = math.inf
        try:
            self._process = self._start(SPARE)
        except OSError as error:
            self._due = time.monotonic() + AGAIN_SECONDS
            logger.warning("no spare sampler can be started now: %s", error)
            return AGAIN_SECONDS
        return math.inf

    def take(self, name: str) -> Started | None:
        """The spare, which is sampler ``name`` from now on; None if it has not compiled yet."""
        if self._process is None or not self.warm:
            return None
        taken, self._process, self.warm = self._process, None, False
        self._children.rename(taken[0], name)
        self.want()
        return taken

    def ended(self, how: str) -> None:
        """It died before it had a place."""
        logger.info("the spare sampler died (%s); another starts in %g s", how, AGAIN_SECONDS)
        self.close()
        self._due = time.monotonic() + AGAIN_SECONDS

    def close(self) -> None:
        """There is none any more."""
        process, self._process, self.warm, self._due = self._process, None, False, math.inf
        if process is not None:
            self._children.end([SPARE])
            process[1].close()
