"""A running server's figures, read again and again: for Prometheus and ``sipipe top``.

No queue is counted on the hot path: each block says which iteration each phase saw last, and what one
side has passed on and the other has not yet taken is the queue between them. It may be off by one on
a busy server; figures of another host are up to a second old.
"""

import time
from dataclasses import dataclass

from sipipe.observe.live import Key, LivePage, Word
from sipipe.observe.phases import DEVICE_PHASES, MAIN_PHASE, Phase, Role

BUSY_PHASES: dict[Role, tuple[Phase, ...]] = {
    "executor": (),
    "stage": DEVICE_PHASES,
    "sampler": (Phase.SAMPLE,),
}


@dataclass(frozen=True, slots=True)
class Block:
    """One process's figures."""

    role: Role
    index: int
    rank: int
    words: list[int]
    """Indexed with :class:`Word`, as they are now."""
    grown: list[int]
    """Growth of each of ``words`` since the poll before."""
    span_ns: int
    """Nanoseconds since the poll before."""
    idle_ns: int
    """Nanoseconds in which the executor had no request, the span that goes on included; else 0."""
    queues: dict[str, int]
    """Number of iterations that wait for the process, by name of the queue.

    Stages: ``scheduling`` (scheduling outputs not yet prepared), ``inputs`` (microbatches prepared
    and not yet run), ``hidden_states`` (sent by the stage before and not yet run). Samplers:
    ``logits`` (microbatches whose logits all stages have computed, and not yet taken).
    """

    @property
    def last_iteration(self) -> int:
        """The last that is through here; 0 before the first."""
        return max(0, self.words[Word.PHASE_LAST + MAIN_PHASE[self.role]] - 1)

    @property
    def busy_ns(self) -> int:
        """Time in which the process did its part of the model's work."""
        return sum(self.words[Word.PHASE_NS + phase] for phase in BUSY_PHASES[self.role])

    @property
    def busy(self) -> float:
        """Part of the time, 0 to 1, in which it did since the poll before."""
        grown = sum(self.grown[Word.PHASE_NS + phase] for phase in BUSY_PHASES[self.role])
        # A microbatch that began before the last poll is counted when it ends: never more than all.
        return min(1.0, max(0.0, grown / self.span_ns))

    def rate(self, word: Word) -> float:
        """Growth of a word a second."""
        return self.grown[word] / (self.span_ns / 1e9)

    def per(self, word: int, count: Word) -> float:
        """Growth of a word for each one that another has grown by; 0 where it has not."""
        return self.grown[word] / self.grown[count] if self.grown[count] else 0.0

    def main_ns(self, per: Word) -> float:
        """Time in the main phase per batch or per sequence, in ns; 0 where there was none."""
        return self.per(Word.PHASE_NS + MAIN_PHASE[self.role], per)


class Poll:
    """Reads one page."""

    def __init__(self, page: LivePage) -> None:
        """Growth at the first poll is that since the page was made."""
        self.page = page
        self._then = page.header.created_ns
        self._last: dict[Key, list[int]] = {}
        self._idle_ns = 0

    def blocks(self) -> list[Block]:
        """The blocks of all processes: executor, stages, samplers."""
        now = time.monotonic_ns()
        words = {key: self.page.block(key).tolist() for key in self.page.blocks}
        span = max(1, now - self._then)
        before = self._last
        self._last = words
        self._then = now
        blocks = []
        for key, new in words.items():
            role, index, rank = key
            old = before.get(key, [0] * len(new))
            grown = [a - b for a, b in zip(new, old, strict=True)]
            blocks.append(
                Block(
                    role=role,
                    index=index,
                    rank=rank,
                    words=new,
                    grown=grown,
                    span_ns=span,
                    idle_ns=self._idle(new, now) if role == "executor" else 0,
                    queues=self._queues(words, role, index, rank),
                )
            )
        return blocks

    def _idle(self, words: list[int], now: int) -> int:
        """Never less than at the poll before: when a request comes, what went on until then is over
        a moment before it is counted, and ``now`` may be a little later."""
        since = words[Word.IDLE_FROM]
        going_on = now - since if since > words[Word.IDLE_TO] else 0
        self._idle_ns = max(self._idle_ns, words[Word.IDLE_NS] + max(0, going_on))
        return self._idle_ns

    def _queues(
        self, words: dict[Key, list[int]], role: Role, index: int, rank: int
    ) -> dict[str, int]:
        def last(phase: Phase, role: Role = role, index: int = index, rank: int = rank) -> int:
            return words[role, index, rank][Word.PHASE_LAST + phase]

        waiting: dict[str, int] = {}
        # Of a host without the engine nothing is in the executor's block.
        dispatched = last(Phase.DISPATCH, "executor", 0, 0)
        if role == "stage":
            prepared = last(Phase.PREPARE)
            run = last(Phase.FORWARD)
            waiting["scheduling"] = dispatched - prepared
            # What is planned waits for its tokens, and not for the device.
            waiting["inputs"] = min(prepared, dispatched or prepared) - run
            if index:
                waiting["hidden_states"] = last(Phase.SEND, index=index - 1) - run
        elif role == "sampler":
            stages = range(self.page.header.stages)
            parts = (last(Phase.LOGITS, "stage", stage, 0) for stage in stages)
            # Only the last stage computes any, or all of them their columns.
            waiting["logits"] = min(filter(None, parts), default=0) - last(Phase.WAIT_LOGITS)
        most = words["executor", 0, 0][Word.INFLIGHT] if dispatched else self.page.header.inflight
        return {name: min(max(0, depth), most) for name, depth in waiting.items()}
