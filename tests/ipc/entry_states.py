"""The life of one ring entry: a table and :func:`fire`, no lock, clock or memory.

The ring (:mod:`sipipe.ipc.ring.ring`) never keeps this state: it *is* the entry's lock and commit
word. The table says what may happen to them, the tests hold every step of the ring against it, and
the diagram in docs/channels.md is generated from it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType


class EntryState(enum.Enum):
    """What lock and commit word of an entry say together."""

    FREE = "free"
    """Never written, no lock."""
    CLAIMED = "claimed"
    """The producer holds the exclusive lock: it is next in turn, or being written."""
    PUBLISHED = "published"
    """The commit word is that of the current lap, no lock."""
    READING = "reading"
    """One reader or more hold the shared lock."""
    ORPHANED = "orphaned"
    """The lock is free, but the commit word is not the one in turn: the producer is gone."""


class EntryEvent(enum.Enum):
    """What happens to an entry."""

    CLAIM = "producer claims"
    PUBLISH = "producer publishes"
    PRODUCER_GONE = "producer dies or closes"
    ENTER = "reader enters"
    LEAVE = "reader leaves, others stay"
    LEAVE_LAST = "last reader leaves or dies"


_S, _E = EntryState, EntryEvent

TRANSITIONS: Mapping[tuple[EntryState, EntryEvent], EntryState] = MappingProxyType(
    {
        (_S.FREE, _E.CLAIM): _S.CLAIMED,
        # A reader that joins waits behind the entry before its first message, written or not.
        (_S.FREE, _E.ENTER): _S.READING,
        (_S.CLAIMED, _E.PUBLISH): _S.PUBLISHED,
        (_S.CLAIMED, _E.PRODUCER_GONE): _S.ORPHANED,
        (_S.PUBLISHED, _E.ENTER): _S.READING,
        (_S.PUBLISHED, _E.CLAIM): _S.CLAIMED,
        (_S.READING, _E.ENTER): _S.READING,
        (_S.READING, _E.LEAVE): _S.READING,
        (_S.READING, _E.LEAVE_LAST): _S.PUBLISHED,
        # Readers that come to an orphan find the wrong commit word and stop; the entry stays as it is.
        (_S.ORPHANED, _E.ENTER): _S.ORPHANED,
        (_S.ORPHANED, _E.LEAVE): _S.ORPHANED,
        (_S.ORPHANED, _E.LEAVE_LAST): _S.ORPHANED,
    }
)


def fire(state: EntryState, event: EntryEvent) -> EntryState:
    """The state after ``event``; an event that the table does not list is a bug of ours."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise AssertionError(f"entry: {event.name} while {state.name}") from None


def mermaid() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> free"]
    lines += [
        f"    {state.value} --> {after.value}: {event.value}"
        for (state, event), after in TRANSITIONS.items()
    ]
    return "\n".join(lines) + "\n"
