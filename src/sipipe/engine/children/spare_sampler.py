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
"""Seconds from the need of a spare to its start. Until then the cores belong to the engine's start, or
to the sampler that has just taken a place."""
AGAIN_SECONDS = 60.0
"""Seconds until another spare starts, after one that died before it had a place. Where memory is
short the kernel may kill spares first, and would kill the next one, too."""

Started = tuple[Child, socket.socket]
"""A sampler process, and the receiving end of its BIC-O."""


class SpareSampler:
    """The spare of one host's samplers. ``start`` starts a sampler process with a name."""

    def __init__(self, children: Children, start: Callable[[str], Started]) -> None:
        self._children = children
        self._start = start
        self._due = math.inf
        self._process: Started | None = None
        self._closed = False
        self.warm = False
        """True while there is a spare that has compiled, and could take a place now."""

    def want(self) -> None:
        """Have a spare started in ``SPARE_SECONDS``."""
        self._due = time.monotonic() + SPARE_SECONDS

    def keep(self) -> float:
        """Start a spare if one is due; returns the seconds until the next look."""
        seconds = self._due - time.monotonic()
        if seconds > 0.0:
            return seconds
        self._due = math.inf
        try:
            self._process = self._start(SPARE)
        except OSError as error:
            self._due = time.monotonic() + AGAIN_SECONDS
            logger.warning("no spare sampler can be started now: %s", error)
            return AGAIN_SECONDS
        if self._closed:  # meanwhile, by another thread, which has not seen this process
            self._end()
        return math.inf

    def take(self, name: str) -> Started | None:
        """The spare, which is sampler ``name`` from now on; None if it has not compiled yet."""
        if self._process is None or not self.warm:
            return None
        spare = self._process
        self._process = None
        self.warm = False
        child, _ = spare
        self._children.rename(child, name)
        self.want()
        return spare

    def ended(self, how: str) -> None:
        """Forget the spare, which died before it had a place, and have another started later."""
        if self._closed:
            return
        logger.info("the spare sampler died (%s); another starts in %g s", how, AGAIN_SECONDS)
        self._end()
        self._due = time.monotonic() + AGAIN_SECONDS

    def close(self) -> None:
        """End the spare, if there is one, and start no other."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        """End the spare, if there is one."""
        spare = self._process
        self._process = None
        self.warm = False
        self._due = math.inf
        if spare is not None:
            _, tokens = spare
            self._children.end([SPARE])
            tokens.close()
