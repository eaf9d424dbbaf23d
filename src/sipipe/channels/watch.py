"""Which readers of a ring are dead: the owner's look at their life locks, in small pieces.

Who runs here: the thread that publishes calls :meth:`ReaderWatch.look` after each message, when it
delays nobody, and before one that follows a pause; ``changed`` and ``dead`` are for any thread.

A look costs a system call per reader. After a pause all are looked at; amid a stream one in turn,
so that a death is found after at most as many messages as there are readers.
"""

from __future__ import annotations

import time

from sipipe.channels.ring import RingOwner

__all__ = ["ReaderWatch"]

# Seconds since the last look after which all readers are looked at, and before publishing.
LOOK_AT_ALL_AFTER = 0.005
LOOK_FIRST_AFTER = 0.05


class ReaderWatch:
    """The looks of one producer at its readers."""

    def __init__(self, owner: RingOwner) -> None:
        self.suspect: str | None = None
        """A reader that the last look found dead; ``dead`` says who still is."""

        self._owner = owner
        self._attached: list[tuple[int, str]] = []
        self._changed = True
        self._turn = 0
        self._looked = 0.0
        self.look_first_at = 0.0
        """From this time on (``time.monotonic``) the last look is long ago: look before publishing."""

    def look(self) -> None:
        """Look at all readers after a pause, at one in turn amid a stream."""
        if self._changed:
            self._attached = list(self._owner.readers(attached=True))
            self._changed = any(True for _ in self._owner.readers(attached=False))
        now = time.monotonic()
        if now - self._looked > LOOK_AT_ALL_AFTER:
            found = self._attached
        elif self._attached:
            self._turn = (self._turn + 1) % len(self._attached)
            found = [self._attached[self._turn]]
        else:
            return
        self._looked = now
        self.look_first_at = now + LOOK_FIRST_AFTER
        self.suspect = next((name for k, name in found if self._owner.is_dead(k)), None)

    def dead(self) -> tuple[str, ...]:
        """Names of the attached readers that are dead now."""
        return tuple(
            name for k, name in self._owner.readers(attached=True) if self._owner.is_dead(k)
        )

    def changed(self) -> None:
        """A reader was declared or removed."""
        self._changed = True
