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
def _head(all_: Any, one: Any, end: Any, shortest: Any) -> Any:
    """Where in ``heads`` the n-gram before ``end`` is."""
    start = all_.start[one]
    found = np.uint32(0)
    for at in range(end - shortest, end):
        found = (found ^ np.uint32(all_.tokens[start + at])) * np.uint32(2654435769)
    return start + np.int64((found >> np.uint32(7)) & np.uint32(all_.room[one] - 1))


@kernel
def _enter(all_: Any, one: Any, end: Any, shortest: Any) -> None:
    if end >= shortest:
        head = _head(all_, one, end, shortest)
        all_.before[all_.start[one] + end] = all_.heads[head]
        all_.heads[head] = end


@kernel
def _note(all_: Any, one: Any, kind: Any, right: Any, memory: Any) -> None:
    all_.right[one, kind] = memory * all_.right[one, kind] + right
    all_.tried[one, kind] = memory * all_.tried[one, kind] + 1.0


@kernel
def _learn(all_: Any, one: Any, drawn: Any, first: Any, last: Any) -> Any:
    """``drawn[first:last]`` have come: whether they are what was proposed.

    What follows a token that was right is another matter than what follows an n-gram that came
    before: a copy goes on, a chance hit does not.
    """
    if all_.behind[one] != all_.size[one] or all_.count[one] == 0:
        return False
    kind = all_.kind[one]
    for i in range(min(last - first, all_.count[one])):
        if drawn[first + i] < 0:
            return False
        right = all_.proposed[one, i] == drawn[first + i]
        _note(all_, one, kind, right, MEMORY)
        _note(all_, 0, kind, right, LONG_MEMORY)
        if not right:
            return False
        kind = 0
    return True


@entry
def index_all(all_: Histories, one: int, shortest: int) -> None:
    """Index a sequence whose index is empty."""
    for end in range(shortest, all_.size[one]):
        _enter(all_, one, end, shortest)


@entry
def follow(all_: Histories, which: Any, tokens: Any, done: int, least: int, shortest: int) -> int:
    """One more token for each of ``which``, from entry ``done`` on. Stops before a sequence that
    has not ``least`` places left; the number of entries done."""
    for i in range(done, which.size):
        one = which[i]
        size = all_.size[one]
        if all_.room[one] - size < least:
            return i
        all_.tokens[all_.start[one] + size] = tokens[i]
        _enter(all_, one, size, shortest)
        all_.size[one] = size + 1
    return int(which.size)


@kernel
def _look_up(all_: Any, one: Any, size: Any, shortest: Any, longest: Any) -> tuple[Any, Any]:
    """The length of the longest n-gram that came before as the sequence ends with ``size`` tokens,
    0: none; and what is behind the last of them."""
    start = all_.start[one]
    tokens = all_.tokens
    best = np.int64(0)
    found = np.int64(0)
    end = np.int64(all_.heads[_head(all_, one, size, shortest)])
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
            found = end
            if length == longest:
                break
        end = np.int64(all_.before[start + end])
    return (best, found) if best >= shortest else (np.int64(0), np.int64(0))


@entry
def propose_all(
    all_: Histories,
    which: Any,
    drawn: Any,
    shortest: int,
    longest: int,
    vocabulary: int,
    worth: float,
    counts: Any,
) -> None:
    """What came behind n-grams like the ends of sequences, as far as it is ``worth`` its rows.

    Args:
        which: int64 [n], sequences; the rows of one lie side by side.
        drawn: int32 [n], the tokens of these rows; negative: none.
        vocabulary: a draft ends before a token from here on, which stands for an image, say.
        counts: out, int64 [n]; how many drafts there are at the first row of each, else 0.
    """
    first = 0
    for i in range(which.size):
        one = which[i]
        if i + 1 < which.size and which[i + 1] == one:
            continue
        start = all_.start[one]
        size = all_.size[one]
        goes_on = _learn(all_, one, drawn, first, i + 1)
        for j in range(first, i + 1):
            if drawn[j] >= 0:
                all_.tokens[start + size] = drawn[j]
                size += 1
        kind = np.int64(0)
        found = np.int64(0)
        if size > max(shortest, all_.size[one]):
            kind, found = _look_up(all_, one, size, shortest, longest)
        all_.behind[one] = size
        all_.count[one] = 0
        counts[first : i + 1] = 0
        if kind > 0:
            kind = np.int64(0) if goes_on else kind
            proposed = all_.proposed[one]
            all_.kind[one] = kind
            all_.count[one] = proposed.size
            likely = all_.right[one, kind] / all_.tried[one, kind]
            chance = all_.right[one, 0] / all_.tried[one, 0]
            for k in range(proposed.size):  # behind the last token it goes on as it did
                at = found + k
                proposed[k] = all_.tokens[start + at] if at < size else proposed[at - size]
                if proposed[k] >= vocabulary:
                    all_.count[one] = k
                    break
                counts[first] += likely >= worth
                likely *= chance
        first = i + 1
