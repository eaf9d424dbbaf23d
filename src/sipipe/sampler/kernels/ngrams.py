"""Sequences' own n-grams: what came behind the last ones that are like a sequence's end.

Positions are hashed by the shortest n-gram that ends there, and chained, the last one first. The
index has those that a token follows, so that every hit has a continuation.
"""

from typing import Any, NamedTuple

import numpy as np

from sipipe.jit import entry, kernel

LOOKS = 24
"""Earlier places of an n-gram that are compared."""
MEMORY = 0.9
"""Weight of an outcome relative to the one after it, in how likely a proposed token is;"""
LONG_MEMORY = 0.99
"""for sequences of which nothing is known."""


class Histories(NamedTuple):
    """The tokens of all sequences. Each has a part of three arrays, and an entry of the others.
    ``room`` is a power of two. ``before`` and ``heads`` count from 0 in each part; 0: none."""

    tokens: Any  # int32
    before: Any  # int32, by end of an n-gram: the end before it with the same hash
    heads: Any  # int32, by hash: the last end
    start: Any  # int64 [sequences]
    room: Any  # int64 [sequences]; 0: no sequence
    size: Any  # int64 [sequences], tokens
    proposed: Any  # int32 [sequences, K], what was proposed last
    count: Any  # int64 [sequences], how many of those
    behind: Any  # int64 [sequences], how many tokens the sequence has when they come
    kind: Any  # int64 [sequences], length of the n-gram that they came behind; 0: they go on with
    # what has been right
    right: Any  # float64 [sequences, longest + 1], by kind: how many were right, lately,
    tried: Any  # float64 [sequences, longest + 1], of so many; entry 0: of all sequences


@kernel
def _head(histories: Any, sequence: Any, end: Any, shortest: Any) -> Any:
    """Index into ``heads`` of the n-gram before ``end``."""
    start = histories.start[sequence]
    hashed = np.uint32(0)
    for at in range(end - shortest, end):
        hashed = (hashed ^ np.uint32(histories.tokens[start + at])) * np.uint32(2654435769)
    return start + np.int64((hashed >> np.uint32(7)) & np.uint32(histories.room[sequence] - 1))


@kernel
def _enter(histories: Any, sequence: Any, end: Any, shortest: Any) -> None:
    if end >= shortest:
        head = _head(histories, sequence, end, shortest)
        histories.before[histories.start[sequence] + end] = histories.heads[head]
        histories.heads[head] = end


@kernel
def _note(histories: Any, sequence: Any, kind: Any, right: Any, memory: Any) -> None:
    histories.right[sequence, kind] = memory * histories.right[sequence, kind] + right
    histories.tried[sequence, kind] = memory * histories.tried[sequence, kind] + 1.0


@kernel
def _learn(histories: Any, sequence: Any, drawn: Any, first: Any, last: Any) -> Any:
    """``drawn[first:last]`` have come: whether they are what was proposed.

    What follows a token that was right is another matter than what follows an n-gram that came
    before: a copy goes on, a chance hit does not.
    """
    if histories.behind[sequence] != histories.size[sequence] or histories.count[sequence] == 0:
        return False
    kind = histories.kind[sequence]
    for i in range(min(last - first, histories.count[sequence])):
        if drawn[first + i] < 0:
            return False
        right = histories.proposed[sequence, i] == drawn[first + i]
        _note(histories, sequence, kind, right, MEMORY)
        _note(histories, 0, kind, right, LONG_MEMORY)
        if not right:
            return False
        kind = 0
    return True


@entry
def index_all(histories: Histories, sequence: int, shortest: int) -> None:
    """Index a sequence whose index is empty."""
    for end in range(shortest, histories.size[sequence]):
        _enter(histories, sequence, end, shortest)


@entry
def follow(
    histories: Histories, sequences: Any, tokens: Any, done: int, least: int, shortest: int
) -> int:
    """One more token for each of ``which``, from entry ``done`` on. Stops before a sequence that
    has not ``least`` places left; the number of entries done."""
    for i in range(done, sequences.size):
        sequence = sequences[i]
        size = histories.size[sequence]
        if histories.room[sequence] - size < least:
            return i
        histories.tokens[histories.start[sequence] + size] = tokens[i]
        _enter(histories, sequence, size, shortest)
        histories.size[sequence] = size + 1
    return int(sequences.size)


@kernel
def _look_up(
    histories: Any, sequence: Any, size: Any, shortest: Any, longest: Any
) -> tuple[Any, Any]:
    """The length of the longest n-gram that came before as the sequence ends with ``size`` tokens,
    0: none; and what is behind the last of them."""
    start = histories.start[sequence]
    tokens = histories.tokens
    best = np.int64(0)
    source = np.int64(0)
    end = np.int64(histories.heads[_head(histories, sequence, size, shortest)])
    for _ in range(LOOKS):
        if end <= 0:
            break
        length = np.int64(0)
        # bound: the longest n-gram
        while length < min(longest, end) and (
            tokens[start + end - 1 - length] == tokens[start + size - 1 - length]
        ):
            length += 1
        if length > best:
            best = length
            source = end
            if length == longest:
                break
        end = np.int64(histories.before[start + end])
    return (best, source) if best >= shortest else (np.int64(0), np.int64(0))


@entry
def propose_all(
    histories: Histories,
    sequences: Any,
    drawn: Any,
    shortest: int,
    longest: int,
    vocabulary: int,
    worth: float,
    counts: Any,
) -> None:
    """Propose what came behind n-grams like the ends of sequences, as far as it is ``worth`` its rows.

    Args:
        which: int64 [n], sequences; the rows of one lie side by side.
        drawn: int32 [n], the tokens of these rows; negative: none.
        vocabulary: a draft ends before a token from here on, which stands for an image, say.
        counts: out, int64 [n]; how many drafts there are at the first row of each, else 0.
    """
    first = 0
    for i in range(sequences.size):
        sequence = sequences[i]
        if i + 1 < sequences.size and sequences[i + 1] == sequence:
            continue
        start = histories.start[sequence]
        size = histories.size[sequence]
        goes_on = _learn(histories, sequence, drawn, first, i + 1)
        for j in range(first, i + 1):
            if drawn[j] >= 0:
                histories.tokens[start + size] = drawn[j]
                size += 1
        kind = np.int64(0)
        source = np.int64(0)
        if size > max(shortest, histories.size[sequence]):
            kind, source = _look_up(histories, sequence, size, shortest, longest)
        histories.behind[sequence] = size
        histories.count[sequence] = 0
        counts[first : i + 1] = 0
        if kind > 0:
            kind = np.int64(0) if goes_on else kind
            proposed = histories.proposed[sequence]
            histories.kind[sequence] = kind
            histories.count[sequence] = proposed.size
            likely = histories.right[sequence, kind] / histories.tried[sequence, kind]
            chance = histories.right[sequence, 0] / histories.tried[sequence, 0]
            for k in range(proposed.size):  # behind the last token it goes on as it did
                at = source + k
                proposed[k] = histories.tokens[start + at] if at < size else proposed[at - size]
                if proposed[k] >= vocabulary:
                    histories.count[sequence] = k
                    break
                counts[first] += likely >= worth
                likely *= chance
        first = i + 1
