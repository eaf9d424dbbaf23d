"""Drafts of a sequence's next tokens, from its own: prompt lookup, as vLLM's ``ngram`` method.

A draft is a hint that changes no draw: the pipeline computes its position in the same pass, and the
sampler draws there as it would have in the next one, if it drew the draft. How likely proposed tokens
are is learnt from what came, also of those that were not worth their rows.

Who runs here: the sampler's thread. The index is written as tokens are accepted, while logits are
computed; :meth:`NGrams.propose` runs behind a draw.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sipipe.messages.boots import NGramSettings
from sipipe.sampler.kernels.ngrams import Histories, follow, index_all, propose_all
from sipipe.sampler.seen import grown

Tokens = npt.NDArray[np.int32]

FIRST_CHANCE = 0.6
"""Of a proposed token of a sequence of which nothing is known;"""
WEIGHT = 2.0
"""as if so many had come."""
_SMALLEST = 256


class NoDrafts:
    """Without speculation: nothing is kept, nothing proposed."""

    def join(self, handle: int, prompt: Tokens, output: Tokens) -> None:
        """A sequence, new or resumed."""

    def leave(self, handle: int) -> None:
        """It is gone, if it was there."""

    def append(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        """One more token of each; a handle may be there several times."""

    def propose(
        self,
        handles: Tokens,  # noqa: ARG002
        rows: Tokens,  # noqa: ARG002
        drawn: Tokens,  # noqa: ARG002
        worth: float,  # noqa: ARG002
    ) -> list[tuple[int, bytes]]:
        """What may come behind the tokens ``drawn`` from ``rows`` for ``handles``, whose rows lie
        side by side; negative: nothing was drawn. Only what is at least as likely as ``worth``."""
        return []


class NGrams(NoDrafts):
    """With speculation. 12 to 24 bytes a token of each sequence."""

    def __init__(self, settings: NGramSettings) -> None:
        self._longest, self._shortest = settings.prompt_lookup_max, settings.prompt_lookup_min
        self._most = settings.num_speculative_tokens
        self._index: dict[int, int] = {}
        self._free: list[int] = []
        self._free_parts: dict[int, list[int]] = {}
        self._end = 0
        self._all = Histories(
            **{name: np.zeros(0, np.int32) for name in ("tokens", "before", "heads")},
            **{name: np.zeros(0, np.int64) for name in ("start", "room", "size")},
            **{name: np.zeros(0, np.int64) for name in ("count", "behind", "kind")},
            proposed=np.zeros((0, self._most), np.int32),
            right=np.zeros((0, self._longest + 1)),
            tried=np.zeros((0, self._longest + 1)),
        )

    def join(self, handle: int, prompt: Tokens, output: Tokens) -> None:
        if not self._free:
            self._more_entries()
        one = self._index[handle] = self._free.pop()
        tokens = np.concatenate((prompt, output))
        self._all.count[one] = 0
        self._all.tried[one] = WEIGHT
        self._all.right[one] = WEIGHT * FIRST_CHANCE
        self._take(one, tokens)

    def leave(self, handle: int) -> None:
        one = self._index.pop(handle, None)
        if one is not None:
            self._give_back(one)
            self._free.append(one)

    def append(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        which = np.array([self._index[handle] for handle in handles], np.int64)
        added, done = np.array(tokens, np.int32), 0
        # bound: each turn does one entry at least
        while (
            done := follow(self._all, which, added, done, 2 + self._most, self._shortest)
        ) < which.size:
            one = int(which[done])
            start, size = int(self._all.start[one]), int(self._all.size[one])
            kept = self._all.tokens[start : start + size].copy()
            self._give_back(one)
            self._take(one, kept)

    def propose(
        self, handles: Tokens, rows: Tokens, drawn: Tokens, worth: float
    ) -> list[tuple[int, bytes]]:
        if worth >= 1.0 or not handles.size:
            return []
        which = np.array([self._index[handle] for handle in handles.tolist()], np.int64)
        counts = np.empty(which.size, np.int64)
        propose_all(self._all, which, drawn, self._shortest, self._longest, worth, counts)
        proposed = self._all.proposed
        return [
            (int(rows[i]), proposed[which[i], : counts[i]].tobytes())
            for i in np.flatnonzero(counts).tolist()
        ]

    def _take(self, one: int, tokens: Tokens) -> None:
        """A part with as many places again, filled and indexed."""
        room = max(_SMALLEST, 1 << (tokens.size + 2 * self._most + 2).bit_length())
        free = self._free_parts.get(room)
        if free:
            start = free.pop()
        else:
            start, self._end = self._end, self._end + room
            if self._end > self._all.tokens.size:
                size = max(self._end, 2 * self._all.tokens.size)
                parts = {
                    name: grown(getattr(self._all, name), size)
                    for name in ("tokens", "before", "heads")
                }
                self._all = self._all._replace(**parts)
        everything = self._all
        everything.start[one], everything.room[one] = start, room
        everything.size[one] = tokens.size
        everything.tokens[start : start + tokens.size] = tokens
        everything.heads[start : start + room] = 0
        index_all(everything, one, self._shortest)

    def _give_back(self, one: int) -> None:
        self._free_parts.setdefault(int(self._all.room[one]), []).append(int(self._all.start[one]))

    def _more_entries(self) -> None:
        before = self._all.start.size
        added = max(16, before)
        entries = (
            np.concatenate((part, np.zeros((added, *part.shape[1:]), part.dtype)))
            for part in self._all[3:]
        )
        self._all = Histories._make([*self._all[:3], *entries])
        self._free.extend(range(before + added - 1, before - 1, -1))


def drafter(settings: NGramSettings | None) -> NoDrafts:
    """What proposes drafts, if anything does."""
    return NoDrafts() if settings is None else NGrams(settings)
