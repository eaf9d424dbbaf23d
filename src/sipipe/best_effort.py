"""Best effort: what only saves time, or shows figures, may not end or slow what everything waits for.

Drafts, stage times, the balance of samplers, figures and advice have an answer that is always right:
"not this time". :class:`BestEffort` gives that answer where the work raises, and where it took so
much of its thread lately that the thread's other work would notice.

Who runs here: any thread; an instance may be shared by several.
Invariant: ``_due`` is a float, written whole; of two threads that raise it at once one wins, and the
    work is then asked a little earlier than it should be.
Rejected: a context manager, whose body cannot be left out, and which would have to keep what one of
    several threads began. Rejected: wall time, which on a busy machine says how long others ran.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(f"vllm.{__name__}")

BRIEF = 0.5e-3
"""CPU seconds that a call may take without consequences: a tenth of the shortest usual pass."""
SHARE = 0.02
"""Part of its thread's time that work which takes longer may have."""


class BestEffort:
    """One kind of work that may fail. ``work`` names it in the log, as the subject of "failed".
    ``bounded``: whether it is left out for a while after a call that took long; figures that have to
    add up are not."""

    def __init__(self, work: str, *, bounded: bool = True) -> None:
        self._work = work
        self._bounded = bounded
        self._due = 0.0
        self._logged = False

    def __call__(self, otherwise: T, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``call(*args, **kwargs)``; or ``otherwise``, where it raises or its time is used up."""
        if not self._bounded:
            # Such as a record of each phase, whose cost two looks at the clock would double.
            return self._tried(otherwise, call, *args, **kwargs)
        if time.monotonic() < self._due:
            return otherwise
        began = time.thread_time()
        result = self._tried(otherwise, call, *args, **kwargs)
        took = time.thread_time() - began
        if took > BRIEF:
            self._due = time.monotonic() + took / SHARE
        return result

    def _tried(self, otherwise: T, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``call(*args, **kwargs)``; or ``otherwise``, where it raises."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._log(error)
            return otherwise

    def _log(self, error: Exception) -> None:
        if self._logged:
            return
        self._logged = True
        logger.warning(
            "%s failed (%s: %s). Nothing depends on it: requests go on without. Please report the "
            "traceback; this is logged once",
            self._work,
            type(error).__name__,
            error,
            exc_info=error,
        )
