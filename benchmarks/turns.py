"""Turns of engines that stay: one answers, the others wait (:mod:`benchmarks.in_turn`)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sipipe.errors import SiPipeError

SPIN = 1.5
"""Seconds after which vLLM's idle processes sleep; for one after their last message they spin."""


@contextmanager
def turn(before: int, after: int) -> Iterator[None]:
    """This engine's turn. ``before``, ``after``: descriptors of pipes, from which it is this
    engine's turn and to the next engine's."""
    # wait: none of its own, TIMEOUT of the engine; the one before, or its end
    if not os.read(before, 1):
        raise SiPipeError("the engine that it takes turns with has ended")
    yield
    time.sleep(SPIN)  # wait: SPIN; nobody
    with suppress(BrokenPipeError):  # the first is done
        # wait: none, a byte into an empty pipe; the next engine reads it
        os.write(after, b".")
