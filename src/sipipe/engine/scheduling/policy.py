"""Which sequences decode in which microbatch: slots that stay the same and stay even.

A pipeline of p stages works on m microbatches at a time, and the engine forms them in turn: visit
i belongs to slot ``i % m``. The engine's batch queue holds at most m batches and is first in,
first out, so the batch of visit i - m has come back when visit i is planned; a slot's own
sequences are therefore never in flight when its turn comes. The rules, per visit:

*join*   A sequence joins the slot whose microbatch computed the last of its prompt, unless that
         lifts the slot over its fair share of what decodes and is about to; then the lightest.
*stay*   A decoding sequence runs in its slot, and only there, until it finishes or is preempted.
*move*   If the visited slot still holds two sequences more than the lightest, it hands over up
         to ``max_moves`` of them. Only the visited slot gives: nothing of it is in flight.
*open*   As many slots are open as make the pipeline period shortest
         (:mod:`sipipe.engine.scheduling.concurrency`). When that changes, sequences move as many
         as it takes; a closed slot only carries prompts.
*prefill* Prompt chunks belong to no slot. Their size is :class:`PrefillThrottle`'s business.

Nothing here knows vLLM, time or threads; a test or the simulator drives it step by step.
SiPipe paper, "Column-Wise CPU Sampling via Metadata Reuse": the reuse rests on these slots.

Guarantees (``tests/engine/scheduling/test_policy.py`` holds them over random histories):

- With every slot open, the spread max - min of decode counts after a visit is at most
  ``max(1, previous spread + sequences that left or joined since)``; joins alone do not raise it
  above 1 unless more are about to follow (``arriving``); without joins and leaves it falls to 1.
- Between two visits of a slot its members change by joins, leaves and moves from the
  visited slot only.
- Every sequence is in exactly one slot, and each slot is visited every m visits: none starves.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from sipipe.config import MicrobatchSettings
from sipipe.engine.scheduling.concurrency import ConcurrencyController
from sipipe.engine.scheduling.prefill import Allowance, PrefillThrottle
from sipipe.engine.scheduling.times import Load, Prices


class Sequence(NamedTuple):
    """A running sequence whose whole prompt has been scheduled."""

    id: str
    context: int
    """Tokens in its KV cache: what its attention reads."""
    ready: bool
    """Whether its last token is back, so that it can decode now."""
    rows: int = 1
    """Of logits that it then has: one, and one for each draft."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What may enter one microbatch."""

    slot: int
    """Slot of this visit, 0 to m - 1."""
    decode: frozenset[str]
    """Sequences that decode in this microbatch: the slot's members that are ready."""
    prefill: Allowance
    """What of prompts this microbatch may compute on top."""


class SlotPolicy:
    """Keeps m slots of decoding sequences; one :meth:`visit` per microbatch.

    Args:
        max_tokens: Token budget of one microbatch, 1 or more.
        controller: Knows what a microbatch takes, and says how many slots to open where
            ``min_sequences`` leaves it open.
        align: Prompts are cut at whole blocks of so many tokens where they can be, and no finer
            than ``least``.
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
        self.slot_of: dict[str, int] = {}
        """Slot of each decoding sequence; visits change it."""
        # Invariant: _counts[s] == sum(1 for t in slot_of.values() if t == s) after a visit.
        self._counts = [0] * slots
        self._contexts = [0] * slots
        # Slots 0 to _active - 1 are open. While _resizing, sequences move as many as it takes.
        self._active = 1
        self._resizing = False
        self._visits = 0
        self._slot = slots - 1

    @property
    def prices(self) -> Prices:
        """What parts of a microbatch take."""
        return self.controller.prices()

    def visit(
        self,
        sequences: Iterable[Sequence],
        *,
        pending_prefill: float,
        started_prefill: float = 0.0,
        arriving: int = 0,
        kv_free: float = 1.0,
    ) -> Plan:
        """Plan the next microbatch.

        Args:
            sequences: Every running sequence whose prompt is scheduled, in the engine's order.
            pending_prefill: What prompt tokens not yet scheduled take, at :attr:`prices`; of
                started and waiting requests.
            started_prefill: Of these, those of requests that hold KV cache already.
            arriving: Requests that those tokens belong to: they join within about a period.
            kv_free: Free share of the KV cache, 0 to 1.
        """
        last, slot = self._slot, self._visits % self.slots
        self._visits += 1
        self._slot = slot
        members, unplaced = self._reconcile(sequences)
        decoding = len(self.slot_of) + len(unplaced)
        self._open_slots(decoding, _fitting(arriving, decoding, kv_free))
        for index, sequence in enumerate(unplaced):
            self._join(sequence, last, to_come=len(unplaced) - index + arriving)
            members[self.slot_of[sequence.id]].append(sequence)
        self._rebalance(slot, members[slot])
        ready = [
            sequence
            for sequence in members[slot]
            if sequence.ready and self.slot_of[sequence.id] == slot
        ]
        rows = sum([sequence.rows for sequence in ready])
        context = sum([sequence.rows * sequence.context for sequence in ready])
        prefill = self._throttle.allow(
            self.prices,
            pending=pending_prefill,
            started=started_prefill,
            decodes=Load(1.0, rows, 0.0, context, 0.0),
            running=len(self.slot_of),
            arriving=arriving,
            kv_free=kv_free,
            slots=self._active,
            measured=self.controller.measured,
        )
        decode = frozenset([sequence.id for sequence in ready])
        return Plan(slot=slot, decode=decode, prefill=prefill)

    def _reconcile(
        self, sequences: Iterable[Sequence]
    ) -> tuple[list[list[Sequence]], list[Sequence]]:
        """Forget who left; returns the members of each slot and those without a slot."""
        members: list[list[Sequence]] = [[] for _ in range(self.slots)]
        contexts = [0] * self.slots
        unplaced: list[Sequence] = []
        kept: dict[str, int] = {}
        for sequence in sequences:
            slot = self.slot_of.get(sequence.id)
            if slot is not None:
                kept[sequence.id] = slot
                members[slot].append(sequence)
                contexts[slot] += sequence.context
            else:
                unplaced.append(sequence)
        self.slot_of = kept
        self._counts = [len(slot_members) for slot_members in members]
        self._contexts = contexts
        return members, unplaced

    def _open_slots(self, sequences: int, arriving: int) -> None:
        """Decide how many slots are open for ``sequences`` and those that come soon: by
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
        elif self._resizing and not any(self._counts[before:]):
            self._resizing = max(self._counts) - min(self._counts[:before]) > 1

    def _join(self, sequence: Sequence, last: int, to_come: int) -> None:
        """Place a sequence whose prompt ended at the previous visit, that of slot ``last``."""
        share = -(-(len(self.slot_of) + to_come) // self._active)
        if last < self._active and self._counts[last] < share:
            slot = last
        else:
            slot = self._lightest(last)
        self._place(sequence, slot)

    def _lightest(self, origin: int) -> int:
        """The open slot with the fewest sequences, then least context, then next after origin."""
        unit = self.prices.sequence
        return min(
            range(self._active),
            key=lambda slot: (
                self._counts[slot],
                self._contexts[slot] // unit,
                (slot - origin) % self.slots,
            ),
        )

    def _rebalance(self, visited: int, members: list[Sequence]) -> None:
        """Level counts, then context, by handing members of the visited slot to a lighter one."""
        moved = 0
        unit = min(self.prices.sequence, 1e9)
        candidates = [sequence for sequence in members if sequence.ready]
        closing = visited >= self._active
        while candidates and (self._resizing or moved < self.settings.max_moves):
            target = self._lightest(visited)
            surplus = self._counts[visited] - self._counts[target]
            if target == visited or (surplus < 1 and not closing):
                break
            # Cost of a decode step in tokens of context: a sequence counts as ``unit`` of them.
            gap = surplus * unit + self._contexts[visited] - self._contexts[target]
            left, best = min(
                (abs(gap - 2 * (unit + sequence.context)), index)
                for index, sequence in enumerate(candidates)
            )
            # With a surplus of one, counts merely swap, so a move must pay in context.
            if surplus == 1 and not closing and gap - left < unit:
                break
            sequence = candidates.pop(best)
            self._counts[visited] -= 1
            self._contexts[visited] -= sequence.context
            self._place(sequence, target)
            moved += 1

    def _place(self, sequence: Sequence, slot: int) -> None:
        self.slot_of[sequence.id] = slot
        self._counts[slot] += 1
        self._contexts[slot] += sequence.context


def _fitting(arriving: int, decoding: int, kv_free: float) -> int:
    """How many of ``arriving`` requests the free KV cache has room for, if they take as much of it
    as the decoding ones do on average."""
    used = 1.0 - kv_free
    return min(arriving, int(decoding * kv_free / used)) if decoding and used > 0 else arriving
