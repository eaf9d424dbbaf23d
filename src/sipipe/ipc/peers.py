"""Which readers of a ring are dead: the owner's look at their life locks, in small pieces.

Who runs here: the thread that publishes calls :meth:`ReaderWatch.look` after each message, when it
delays nobody, and before one that follows a pause; ``changed`` and ``dead`` are for any thread.

A look costs a system call per reader, at all of them, and there is at most one in 5 ms: amid a
faster stream a death is found that much later, and a reader on the writer's core has the message
that much sooner.
"""

from __future__ import annotations

import time

from sipipe.ipc.ring.owner import RingOwner

__all__ = ["ReaderWatch"]

# Seconds since the last look until the next one, and until one before publishing.
LOOK_AFTER = 0.005
LOOK_FIRST_AFTER = 0.05


class ReaderWatch:
    """The looks of one producer at its readers."""

    def __init__(self, owner: RingOwner) -> None:
        self.suspect: str | None = None
        """A reader that the last look found dead; ``dead`` says who still is."""

        self._owner = owner
        self._attached: list[tuple[int, str]] = []
        self._changed = True
        self._look_at = 0.0
        self.look_first_at = 0.0
        """From this time on (``time.monotonic``) the last look is long ago: look before publishing."""

    def look(self) -> None:
        """Look at all readers, if the last look is long enough ago or who they are has changed."""
        now = time.monotonic()
        if now < self._look_at and not self._changed:
            return
        if self._changed:
            self._attached = list(self._owner.readers(attached=True))
            self._changed = any(True for _ in self._owner.readers(attached=False))
        self._look_at = now + LOOK_AFTER
        self.look_first_at = now + LOOK_FIRST_AFTER
        self.suspect = next((name for k, name in self._attached if self._owner.is_dead(k)), None)

    def dead(self) -> tuple[str, ...]:
        """Names of the attached readers that are dead now."""
        return tuple(
            name for k, name in self._owner.readers(attached=True) if self._owner.is_dead(k)
        )

    def changed(self) -> None:
        """A reader was declared or removed."""
        self._changed = True
