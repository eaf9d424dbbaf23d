"""Drafts of next tokens: by prompt lookup or suffix trees, as vLLM's ``ngram`` and ``suffix``.

A draft is a hint that changes no draw: the sampler draws at its position as it would have in the next
pass, if it drew the draft. How likely proposed tokens are is learnt from what came.

Who runs here: the sampler's thread. The index is written as tokens are accepted, while logits are
computed; :meth:`NGrams.propose` runs behind a draw.
Relied on by the sampler: whatever raises here costs drafts alone, and a sequence that could not join
has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.jit import compiling
from sipipe.messages.start_records import NGramSettings, SuffixSettings
from sipipe.sampler.kernels.ngrams import MEMORY, Histories, follow, index_all, propose_all
from sipipe.sampler.kernels.tables import grown

Tokens = npt.NDArray[np.int32]

FIRST_CHANCE = 0.6
"""Probability that a proposed token is right, while nothing is known of this sampler's sequences.
A new sequence begins with the share that was right in others."""
WEIGHT = 2.0
"""Number of proposals that this first probability counts as."""
_SMALLEST = 256


class NoDrafts:
    """Without speculation: nothing is kept, nothing proposed."""

    def join(self, handle: int, prompt: Tokens, output: Tokens) -> None:
        """A sequence, new or resumed."""

    def leave(self, handle: int) -> None:
        """It is gone, if it was there."""

    def append(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        """Append one more token of each; a handle may be there several times."""

    def propose(
        self,
        handles: Tokens,  # noqa: ARG002
        rows: Tokens,  # noqa: ARG002
        drawn: Tokens,  # noqa: ARG002
        worth: float,  # noqa: ARG002
    ) -> list[tuple[int, bytes]]:
        """Propose tokens that may come behind the tokens ``drawn``.

        Args:
            handles: int32 [n], request of each row; the rows of a request lie side by side.
            rows: int32 [n], indices of the rows in the iteration's logits.
            drawn: int32 [n], tokens; negative: nothing was drawn.
            worth: least probability of a draft that is proposed.

        Returns the first row of a request and its drafts (int32 bytes), for requests that have any.
        """
        return []


class NGrams(NoDrafts):
    """Drafts by n-grams of a sequence's own tokens; 12 to 24 bytes a token of each sequence."""

    def __init__(self, settings: NGramSettings, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._longest = settings.prompt_lookup_max
        self._shortest = settings.prompt_lookup_min
        self._most = settings.num_speculative_tokens
        self._index: dict[int, int] = {}
        self._free: list[int] = []
        self._free_parts: dict[int, list[int]] = {}
        self._end = 0
        self._all = Histories(
            tokens=np.zeros(0, np.int32),
            before=np.zeros(0, np.int32),
            heads=np.zeros(0, np.int32),
            start=np.zeros(0, np.int64),
            room=np.zeros(0, np.int64),
            size=np.zeros(0, np.int64),
            count=np.zeros(0, np.int64),
            behind=np.zeros(0, np.int64),
            kind=np.zeros(0, np.int64),
            proposed=np.zeros((0, self._most), np.int32),
            right=np.zeros((0, self._longest + 1)),
            tried=np.zeros((0, self._longest + 1)),
        )

    def join(self, handle: int, prompt: Tokens, output: Tokens) -> None:
        if not self._free:
            self._more_entries()
        entry = self._free.pop()
        tokens = np.concatenate((prompt, output))
        self._all.count[entry] = 0
        self._all.tried[entry] = WEIGHT
        self._all.right[entry] = WEIGHT * self._all.right[0] / self._all.tried[0]
        self._take(entry, tokens)
        self._index[handle] = entry  # only now: it may lack the memory for a part

    def leave(self, handle: int) -> None:
        if (entry := self._index.pop(handle, None)) is not None:
            self._give_back(int(self._all.start[entry]), int(self._all.room[entry]))
            self._free.append(entry)

    def append(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        pairs = [pair for pair in zip(handles, tokens, strict=True) if pair[0] in self._index]
        entries = np.array([self._index[handle] for handle, _ in pairs], np.int64)
        added = np.array([token for _, token in pairs], np.int32)
        done = 0
        # bound: each turn does one entry at least
        while (
            done := follow(self._all, entries, added, done, 2 + self._most, self._shortest)
        ) < entries.size:
            entry = int(entries[done])
            start = int(self._all.start[entry])
            room = int(self._all.room[entry])
            size = int(self._all.size[entry])
            self._take(entry, self._all.tokens[start : start + size].copy())
            self._give_back(start, room)

    def propose(
        self, handles: Tokens, rows: Tokens, drawn: Tokens, worth: float
    ) -> list[tuple[int, bytes]]:
        if worth >= 1.0 or not handles.size:
            return []
        entries = np.array([self._index.get(handle, -1) for handle in handles.tolist()], np.int64)
        joined = entries >= 0
        if not joined.all():
            entries = entries[joined]
            rows = rows[joined]
            drawn = drawn[joined]
        counts = np.empty(entries.size, np.int64)
        lengths = self._shortest, self._longest
        propose_all(self._all, entries, drawn, *lengths, self._vocabulary, worth, counts)
        proposed = self._all.proposed
        return [
            (int(rows[i]), proposed[entries[i], : counts[i]].tobytes())
            for i in np.flatnonzero(counts).tolist()
        ]

    def _take(self, entry: int, tokens: Tokens) -> None:
        """A part with as many places again, filled and indexed."""
        room = max(_SMALLEST, 1 << (tokens.size + 2 * self._most + 2).bit_length())
        if free := self._free_parts.get(room):
            start = free.pop()
        else:
            start, self._end = self._end, self._end + room
            if self._end > self._all.tokens.size:
                size = max(self._end, 2 * self._all.tokens.size)
                parts = (grown(part, size) for part in self._all[:3])
                self._all = Histories._make([*parts, *self._all[3:]])
        histories = self._all
        histories.start[entry] = start
        histories.room[entry] = room
        histories.size[entry] = tokens.size
        histories.tokens[start : start + tokens.size] = tokens
        histories.heads[start : start + room] = 0
        index_all(histories, entry, self._shortest)

    def _give_back(self, start: int, room: int) -> None:
        self._free_parts.setdefault(room, []).append(start)

    def _more_entries(self) -> None:
        before = self._all.start.size
        added = max(16, before)
        entries = (
            np.concatenate((part, np.zeros((added, *part.shape[1:]), part.dtype)))
            for part in self._all[3:]
        )
        self._all = Histories._make([*self._all[:3], *entries])
        self._free.extend(range(before + added - 1, before - 1, -1))
        if not before:  # that of all sequences
            self._all.tried[self._free.pop()] = 4 * WEIGHT
            self._all.right[0] = 4 * WEIGHT * FIRST_CHANCE


@dataclass(slots=True)
class _Suffix:
    """Drafting state of one sequence."""

    end: list[int]
    """Last tokens of the sequence, as many as trees are deep."""
    proposed: list[int] = field(default_factory=list)
    right: float = WEIGHT * FIRST_CHANCE
    tried: float = WEIGHT


class Suffixes(NoDrafts):
    """Drafts by Arctic Inference: a tree of each sequence, and one of all that came for this sampler.

    The library says how often a continuation came; how often it was right is learnt besides.
    """

    def __init__(self, settings: SuffixSettings, vocabulary: int) -> None:
        # Only here: the library is there where the method is asked for.
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._vocabulary = vocabulary
        self._depth = settings.suffix_decoding_max_tree_depth
        self._most = settings.num_speculative_tokens
        self._how = {
            "max_spec_factor": settings.suffix_decoding_max_spec_factor,
            "min_token_prob": settings.suffix_decoding_min_token_prob,
        }
        self._trees: Any = SuffixDecodingCache(
            self._depth, settings.suffix_decoding_max_cached_requests
        )
        self._all: dict[int, _Suffix] = {}

    def join(self, handle: int, prompt: Tokens, output: Tokens) -> None:
        self._trees.start_request(handle, prompt.tolist())
        self._trees.add_active_response(handle, output.tolist())
        self._all[handle] = _Suffix(np.concatenate((prompt, output))[-self._depth :].tolist())

    def leave(self, handle: int) -> None:
        if self._all.pop(handle, None):
            self._trees.stop_request(handle)

    def append(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        for handle, pairs in groupby(zip(handles, tokens, strict=True), lambda pair: pair[0]):
            added = [token for _, token in pairs]
            sequence = self._all.get(handle)
            if sequence is None:
                continue
            self._trees.add_active_response(handle, added)
            sequence.end = (sequence.end + added)[-self._depth :]

    def propose(
        self, handles: Tokens, rows: Tokens, drawn: Tokens, worth: float
    ) -> list[tuple[int, bytes]]:
        drafts_by_row: list[tuple[int, bytes]] = []
        for handle, places in groupby(range(len(handles)), handles.tolist().__getitem__):
            sequence = self._all.get(handle)
            if sequence is None:
                continue
            if worth >= 1.0:
                sequence.proposed = []
                continue
            mine = list(places)
            came = [int(drawn[i]) for i in mine if drawn[i] >= 0]
            for proposed, token in zip(sequence.proposed, came, strict=False):
                sequence.right = MEMORY * sequence.right + (proposed == token)
                sequence.tried = MEMORY * sequence.tried + 1.0
                if proposed != token:
                    break
            end = (sequence.end + came)[-self._depth :]
            draft = self._trees.speculate(handle, end, self._most, **self._how)
            known = takewhile(lambda token: token < self._vocabulary, draft.token_ids)
            sequence.proposed = list(known) if came else []
            chance = sequence.right / sequence.tried
            probs = draft.probs[: len(sequence.proposed)]
            likely = [p * chance ** (i + 1) for i, p in enumerate(probs)]
            if (
                count := sum(probability >= worth for probability in likely)
                if sequence.proposed
                else 0
            ):
                drafts = np.array(sequence.proposed[:count], np.int32)
                drafts_by_row.append((int(rows[mine[0]]), drafts.tobytes()))
        return drafts_by_row


def drafter(settings: NGramSettings | SuffixSettings | None, vocabulary: int) -> NoDrafts:
    """Make the proposer of drafts for these settings; drafts are token ids below ``vocabulary``."""
    if settings is None:
        return NoDrafts()
    kind: Any = Suffixes if isinstance(settings, SuffixSettings) else NGrams
    made: NoDrafts = kind(settings, vocabulary)
    return made


def warm_up_ngrams() -> None:
    """Compile what proposes n-grams, or load it from the on-disk cache."""
    settings = NGramSettings(num_speculative_tokens=2, prompt_lookup_max=3, prompt_lookup_min=2)
    token = np.zeros(1, np.int32)
    with compiling("sipipe.sampler.kernels"):
        drafts = NGrams(settings, 10)
        drafts.join(0, np.array([1, 2, 3] * 3, np.int32), token + 1)
        drafts.append([0], [2])
        drafts.propose(token, token, token + 3, 0.5)
