"""The life of one ring slot: a table and :func:`fire`, no lock, clock or memory.

The drivers (:mod:`sipipe.channels.ring`) never keep this state: it *is* the slot's lock and
ticket. The table says what may happen to them, the tests hold every step of the drivers against
it, and the diagram in docs/channels.md is generated from it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["TRANSITIONS", "SlotEvent", "SlotState", "fire", "mermaid"]


class SlotState(enum.Enum):
    """What lock and ticket of a slot say together."""

    FREE = "free"
    """Never written, no lock."""
    CLAIMED = "claimed"
    """The producer holds the exclusive lock: it is next in turn, or being written."""
    PUBLISHED = "published"
    """The ticket is that of the current lap, no lock."""
    READING = "reading"
    """One reader or more hold the shared lock."""
    ORPHANED = "orphaned"
    """The lock is free, but the ticket is not the one in turn: the producer is gone."""


class SlotEvent(enum.Enum):
    """What happens to a slot."""

    CLAIM = "producer claims"
    PUBLISH = "producer publishes"
    PRODUCER_GONE = "producer dies or closes"
    ENTER = "reader enters"
    LEAVE = "reader leaves, others stay"
    LEAVE_LAST = "last reader leaves or dies"


_S, _E = SlotState, SlotEvent

TRANSITIONS: Mapping[tuple[SlotState, SlotEvent], SlotState] = MappingProxyType(
    {
        (_S.FREE, _E.CLAIM): _S.CLAIMED,
        # A reader that joins waits behind the slot before its first message, written or not.
        (_S.FREE, _E.ENTER): _S.READING,
        (_S.CLAIMED, _E.PUBLISH): _S.PUBLISHED,
        (_S.CLAIMED, _E.PRODUCER_GONE): _S.ORPHANED,
        (_S.PUBLISHED, _E.ENTER): _S.READING,
        (_S.PUBLISHED, _E.CLAIM): _S.CLAIMED,
        (_S.READING, _E.ENTER): _S.READING,
        (_S.READING, _E.LEAVE): _S.READING,
        (_S.READING, _E.LEAVE_LAST): _S.PUBLISHED,
        # Readers that come to an orphan find the wrong ticket and stop; the slot stays as it is.
        (_S.ORPHANED, _E.ENTER): _S.ORPHANED,
        (_S.ORPHANED, _E.LEAVE): _S.ORPHANED,
        (_S.ORPHANED, _E.LEAVE_LAST): _S.ORPHANED,
    }
)


def fire(state: SlotState, event: SlotEvent) -> SlotState:
    """The state after ``event``; an event that the table does not list is a bug of ours."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise AssertionError(f"slot: {event.name} while {state.name}") from None


def mermaid() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> free"]
    lines += [
        f"    {state.value} --> {after.value}: {event.value}"
        for (state, event), after in TRANSITIONS.items()
    ]
    return "\n".join(lines) + "\n"
