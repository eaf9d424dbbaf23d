"""How much waits where, read off the statistics page: nobody counts a queue on the hot path.

Each process's block says which iteration each of its phases saw last. What one side has passed on
and the other has not yet taken is the queue between them. The two figures are read one after the
other, so a queue is exact on a server at rest and may be off by one on a busy one.
"""

from __future__ import annotations

from sipipe.observe.live import LivePage, Word
from sipipe.observe.phases import Phase, Role

__all__ = ["queues"]


def queues(page: LivePage, role: Role, index: int, rank: int, words: list[int]) -> dict[str, int]:
    """What waits for a process, by name of the queue; ``words`` are those of its block.

    Stages: ``scheduling`` (scheduling outputs not yet prepared), ``inputs`` (microbatches prepared
    and not yet run), ``hidden_states`` (sent by the stage before and not yet run). Samplers:
    ``logits`` (microbatches handed over and not yet taken).
    """
    if role == "stage":
        prepared, run = _last(words, Phase.PREPARE), _last(words, Phase.FORWARD)
        waiting = {
            "scheduling": _of(page, "executor", 0, 0, Phase.DISPATCH) - prepared,
            "inputs": prepared - run,
        }
        if index:
            waiting["hidden_states"] = _of(page, "stage", index - 1, rank, Phase.SEND) - run
    elif role == "sampler":
        handed = _of(page, "stage", page.header.stages - 1, 0, Phase.HANDOVER)
        waiting = {"logits": handed - _last(words, Phase.WAIT_LOGITS)}
    else:
        waiting = {}
    return {name: max(0, depth) for name, depth in waiting.items()}


def _last(words: list[int], phase: Phase) -> int:
    return words[Word.PHASE_LAST + phase]


def _of(page: LivePage, role: Role, index: int, rank: int, phase: Phase) -> int:
    return page.words[page.block(role, index, rank) + Word.PHASE_LAST + phase]
