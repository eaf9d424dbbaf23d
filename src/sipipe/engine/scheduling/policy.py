"""Slots of decoding sequences, one for each microbatch, that stay the same and stay even.

A pipeline of p stages works on m microbatches at a time, and the engine forms them in turn: visit
i belongs to slot ``i % m``. The batch of visit i - m has come back when that of visit i is published
(:meth:`sipipe.engine.iteration.iterations.Iterations.begin`); a slot's own sequences are therefore
never in flight when its turn comes, though it may be planned before. The rules, per visit:

*join*   A sequence joins the slot whose microbatch computed the last of its prompt, unless that
         lifts the slot over its fair share of what decodes and is about to; then the lightest.
*stay*   A decoding sequence runs in its slot, and only there, until it finishes or is preempted.
*wait*   What joins another slot than that of its prompt's last chunk sits this slot's next visit
         out: its first token is not back.
*move*   If the visited slot still holds two sequences more than the lightest, it hands over up
         to ``max_moves`` of them. Only the visited slot gives: nothing of it is in flight.
*open*   As many slots are open as make the pipeline period shortest
         (:mod:`sipipe.engine.scheduling.concurrency`). When that changes, sequences move as many
         as it takes; a closed slot only carries prompts.
*prefill* Prompt chunks belong to no slot. Their size is :class:`PrefillThrottle`'s business.

A visit looks at the sequences of its own slot and at those that come and leave; of all others only
at whether they still run. Of other slots it has what it saw at their own visits.

Nothing here knows vLLM, time or threads. The paper's reuse of metadata rests on these slots.

Guarantees (``tests/engine/scheduling/test_policy.py`` holds them over random histories):

- With every slot open, the spread max - min of decode counts after a visit is at most
  ``max(1, previous spread + sequences that left or joined since)``; joins alone do not raise it
  above 1 unless more are about to follow (``arriving``); without joins and leaves it falls to 1.
- Between visits of a slot its members only change by joins, leaves and moves from the one visited.
- Every sequence is in exactly one slot, and each slot is visited every m visits: none starves.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from sipipe.config import MicrobatchSettings
from sipipe.engine.scheduling.concurrency import ConcurrencyController
from sipipe.engine.scheduling.prefill import Allowance, PrefillThrottle
from sipipe.engine.scheduling.times import Load, Prices


class Sequence(NamedTuple):
    """A running sequence whose whole prompt has been scheduled."""

    id: Any
    """The engine's name for it, or its object: hashable."""
    context: int
    """Tokens in its KV cache, which its attention reads."""
    ready: bool
    """True if its last token is back, or will be when its slot's next microbatch is published."""
    rows: int = 1
    """Rows of logits that it then has: one, and one for each draft."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sequences and prompts that may enter one microbatch."""

    slot: int
    """Slot of this visit, 0 to m - 1."""
    decode: list[Sequence]
    """Sequences that decode in this microbatch: the slot's members that are ready."""
    prefill: Allowance
    """The time and the tokens that prompts may take of this microbatch."""


class SlotPolicy:
    """Keeps m slots of decoding sequences; one :meth:`visit` per microbatch.

    Args:
        slots: Microbatches in flight, m; 1 or more.
        max_tokens: Token budget of one microbatch, 1 or more.
        controller: Knows the time that a microbatch takes, and how many slots to open by default.
        align: Tokens of a block; a prompt's chunk ends at one if possible.
        least: The fewest tokens of a prompt's chunk.
    """

    def __init__(
        self,
        *,
        slots: int,
        max_tokens: int,
        controller: ConcurrencyController,
        settings: MicrobatchSettings | None = None,
        align: int = 1,
        least: int = 1,
    ) -> None:
        assert min(slots, max_tokens) >= 1, (slots, max_tokens)
        self.slots = slots
        self.settings = settings or MicrobatchSettings()
        self.controller = controller
        self._throttle = PrefillThrottle(
            slots=slots,
            stages=controller.stages,
            max_tokens=max_tokens,
            settings=self.settings,
            align=align,
            least=least,
        )
        self.slot_of: dict[Any, int] = {}
        """Slot of each decoding sequence; visits change it."""
        # Invariant: _members[s] has the keys of slot_of whose value is s, _contexts[s] their sum.
        self._members: list[dict[Any, int]] = [{} for _ in range(slots)]
        """Members of each slot, with their context at its last visit."""
        self._contexts = [0] * slots
        self._followed: list[Any] = []
        """Sequences that ran at the last visit, in the engine's order."""
        self._waits: set[Any] = set()
        """Sequences that sit the next visit of their slot out."""
        # Slots 0 to _active - 1 are open. While _resizing, sequences move as many as it takes.
        self._active = 1
        self._resizing = False
        self._visits = 0
        self._slot = slots - 1
        """The slot that was visited last; before the first visit, the one before slot 0."""

    @property
    def prices(self) -> Prices:
        """Prices of a microbatch's parts on the slowest stage."""
        return self.controller.prices()

    @property
    def next_slot(self) -> int:
        """The slot that the next visit is of."""
        return self._visits % self.slots

    def follow(self, running: Collection[Any]) -> list[Any]:
        """Forget the sequences that left.

        Args:
            running: All that run, in the engine's order.

        Returns:
            Those of them that have no slot, in the same order.
        """
        slot_of = self.slot_of
        # Those that ran at the last visit, and all have a slot: compared as they are, not hashed.
        if len(slot_of) == len(running) and running == self._followed:
            return []
        for gone in slot_of.keys() - running:
            self._forget(gone)
        self._followed = list(running)
        return [sequence for sequence in running if sequence not in slot_of]

    def visit(
        self,
        joining: list[Sequence],
        look: Callable[[Any], Sequence | None],
        *,
        pending_prefill: float,
        started_prefill: float = 0.0,
        arriving: int = 0,
        kv_free: float = 1.0,
    ) -> Plan:
        """Plan the next microbatch, after :meth:`follow`.

        Args:
            joining: Running sequences without a slot whose prompt is scheduled.
            look: Looks at a sequence with a slot as it is now; None: it computes its prompt again.
            pending_prefill: Time of all requests' unscheduled prompt tokens, at :attr:`prices`.
            started_prefill: The part of it for requests that hold KV cache already.
            arriving: Requests that those tokens belong to: they join within about a period.
            kv_free: Free share of the KV cache, 0 to 1.
        """
        last = self._slot
        slot = self.next_slot
        self._visits += 1
        self._slot = slot
        members = self._look(slot, look)
        decoding = len(self.slot_of) + len(joining)
        self._open_slots(decoding, _fitting(arriving, decoding, kv_free))
        members += self._join_all(joining, last, arriving)
        self._rebalance(slot, members)
        ready = [sequence for sequence in members if sequence.ready]
        if len(self._members[slot]) != len(members):  # some have moved
            ready = [sequence for sequence in ready if sequence.id in self._members[slot]]
        prefill = self._throttle.allow(
            self.prices,
            pending=pending_prefill,
            started=started_prefill,
            decodes=_load(ready),
            running=len(self.slot_of),
            arriving=arriving,
            kv_free=kv_free,
            slots=self._active,
            measured=self.controller.measured,
            period=self.controller.alone(len(self.slot_of)) if pending_prefill > 0 else 0.0,
            is_open=slot < self._active,
        )
        return Plan(slot=slot, decode=ready, prefill=prefill)

    def _look(self, slot: int, look: Callable[[Any], Sequence | None]) -> list[Sequence]:
        """The members of ``slot`` as they are now; those that compute their prompt again leave it."""
        members = []
        for id in list(self._members[slot]):
            sequence = look(id)
            if sequence is None:
                self._forget(id)
            elif id in self._waits:
                self._waits.discard(id)
                members.append(sequence._replace(ready=False))
            else:
                members.append(sequence)
        self._members[slot] = {sequence.id: sequence.context for sequence in members}
        self._contexts[slot] = sum(self._members[slot].values())
        return members

    def _open_slots(self, sequences: int, arriving: int) -> None:
        """Decide how many slots are open for ``sequences`` and the ``arriving`` ones: by
        ``min_sequences``, or by measured stage times."""
        least = self.settings.min_sequences
        before = self._active
        if least > 1:
            # Close one only when clearly too thin.
            most = max(1, min(self.slots, sequences // least))
            if most > before or (before > 1 and sequences < before * least * 3 // 4):
                self._active = most
        elif least == 0:
            # A burst's first prompts would else find one slot open.
            self._active = self.controller.microbatches(sequences + arriving)
        else:
            self._active = self.slots
        if self._active != before:
            self._resizing = True
        elif self._resizing and not any(self._members[before:]):
            counts = [len(members) for members in self._members[:before]]
            self._resizing = max(counts) - min(counts) > 1

    def _join_all(self, joining: list[Sequence], last: int, arriving: int) -> list[Sequence]:
        """Place sequences whose prompts ended in slot ``last``; ``arriving`` more follow soon. Returns
        those that the visited slot got."""
        members = []
        for index, sequence in enumerate(joining):
            slot = self._join(sequence, last, to_come=len(joining) - index + arriving)
            if slot == self._slot:
                # Its first token is back only if its prompt ended in this slot too.
                members.append(sequence._replace(ready=sequence.ready and slot == last))
            elif slot != last:
                self._waits.add(sequence.id)
        return members

    def _join(self, sequence: Sequence, last: int, to_come: int) -> int:
        """Place a sequence whose prompt ended in slot ``last``, just visited; returns its slot."""
        share = -(-(len(self.slot_of) + to_come) // self._active)
        stays = last < self._active and len(self._members[last]) < share
        slot = last if stays else self._lightest(last)
        self._place(sequence, slot)
        return slot

    def _lightest(self, origin: int) -> int:
        """The open slot with the fewest sequences, then least context, then next after ``origin``."""
        unit = self.prices.sequence

        def weight(slot: int) -> tuple[float, ...]:
            after = (slot - origin) % self.slots
            return len(self._members[slot]), self._contexts[slot] // unit, after

        return min(range(self._active), key=weight)

    def _rebalance(self, visited: int, members: list[Sequence]) -> None:
        """Level counts, then context, by handing members of the visited slot to a lighter one."""
        moved = 0
        unit = min(self.prices.sequence, 1e9)
        candidates = [sequence for sequence in members if sequence.ready]
        closing = visited >= self._active
        while candidates and (self._resizing or moved < self.settings.max_moves):
            target = self._lightest(visited)
            surplus = len(self._members[visited]) - len(self._members[target])
            if target == visited or (surplus < 1 and not closing):
                break
            # Cost of a decode step in tokens of context: a sequence counts as ``unit`` of them.
            gap = surplus * unit + self._contexts[visited] - self._contexts[target]
            remaining, best = min(
                (abs(gap - 2 * (unit + sequence.context)), index)
                for index, sequence in enumerate(candidates)
            )
            # With a surplus of one, counts merely swap, so a move must pay in context.
            if surplus == 1 and not closing and gap - remaining < unit:
                break
            sequence = candidates.pop(best)
            self._forget(sequence.id)
            self._place(sequence, target)
            moved += 1

    def _place(self, sequence: Sequence, slot: int) -> None:
        self.slot_of[sequence.id] = slot
        self._members[slot][sequence.id] = sequence.context
        self._contexts[slot] += sequence.context

    def _forget(self, id: Any) -> None:
        slot = self.slot_of.pop(id)
        self._waits.discard(id)
        self._contexts[slot] -= self._members[slot].pop(id)


def _fitting(arriving: int, decoding: int, kv_free: float) -> int:
    """The number of ``arriving`` requests that the free KV cache has room for, if they take as much of
    it as the ``decoding`` ones do on average."""
    used = 1.0 - kv_free
    if not decoding or used <= 0:
        return arriving
    return min(arriving, int(decoding * kv_free / used))


def _load(sequences: list[Sequence]) -> Load:
    """The load of a microbatch in which ``sequences`` decode. Each row of drafts reads the context."""
    return Load(
        batches=1.0,
        rows=sum([sequence.rows for sequence in sequences]),
        context=sum([sequence.rows * sequence.context for sequence in sequences]),
    )
