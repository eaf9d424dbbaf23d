"""The slots of a gather ring: who is expected for an iteration, what has come, what is complete.

A table without lock, socket or clock; :mod:`sipipe.ipc.gather_old.receiver` drives it under its lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

__all__ = ["GatherSlots", "Gathered"]


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered:
    """A complete slot: what each expected sender sent for ``iteration``."""

    iteration: int
    payloads: dict[str, bytes]


class GatherSlots:
    """One sub-slot per iteration and sender. Iterations are taken in order."""

    def __init__(self, senders: Sequence[str]) -> None:
        self.senders = frozenset(senders)
        self.taken = self.bytes = self.dropped = 0
        self._expected: dict[int, frozenset[str]] = {}  # Invariant: ascending iterations
        self._declared = False
        self._arrived: dict[int, dict[str, bytes]] = {}
        self._next = 0  # Invariant: every iteration below was taken

    def expect(self, iteration: int, names: frozenset[str]) -> None:
        """Declare who sends for ``iteration``, or replace it. Without any declaration, all do."""
        last = max(self._expected, default=self._next - 1)
        assert iteration in self._expected or iteration > last, (iteration, last)
        self._declared = True
        self._expected[iteration] = names

    def put(self, name: str, iteration: int, payload: bytes) -> None:
        """Fill a sub-slot; a duplicate, or one of an iteration that was taken, is dropped."""
        slot = self._arrived.get(iteration, {})
        if iteration < self._next or name in slot:
            self.dropped += 1
            return
        self._arrived.setdefault(iteration, slot)[name] = payload

    def turn(self) -> tuple[int, frozenset[str]] | None:
        """The iteration that is next in turn, and who sends for it; None: nothing is declared."""
        if self._declared:
            return next(iter(self._expected.items()), None)
        return self._next, self.senders

    def late(self) -> tuple[int, tuple[str, ...]]:
        """The iteration that is next in turn, and whose sub-slots are missing."""
        iteration, names = self.turn() or (self._next, frozenset[str]())
        return iteration, tuple(sorted(names - self._arrived.get(iteration, {}).keys()))

    def take(self) -> Gathered | None:
        """The slot that is next in turn, if it is complete."""
        turn = self.turn()
        if turn is None:
            return None
        iteration, names = turn
        arrived = self._arrived.get(iteration, {})
        if not names <= arrived.keys():
            return None
        self._expected.pop(iteration, None)
        self._arrived.pop(iteration, None)
        self.dropped += len(arrived) - len(names)
        for old in [i for i in self._arrived if i < iteration]:
            self.dropped += len(self._arrived.pop(old))
        self._next = iteration + 1
        payloads = {name: arrived[name] for name in names}
        self.taken += 1
        self.bytes += sum(map(len, payloads.values()))
        return Gathered(iteration, payloads)

    def pending(self) -> int:
        """Iterations that are expected, or of which something has come, and not complete."""
        return len(self._expected) if self._declared else len(self._arrived)
