"""The table of an entry's life and the diagram that is made of it."""

from pathlib import Path

import pytest

from .entry_states import TRANSITIONS, EntryEvent, EntryState, fire, mermaid

DOCS = Path(__file__).resolve().parents[2] / "docs" / "channels.md"


def test_the_diagram_is_the_tables():
    assert f"```mermaid\n{mermaid()}```" in DOCS.read_text(), (
        "docs/channels.md is stale: paste what tests.ipc.entry_states.mermaid() returns"
    )


def test_every_state_is_reached_and_what_is_not_listed_is_refused():
    reached = {EntryState.FREE}
    for _ in EntryState:
        reached |= {after for (state, _), after in TRANSITIONS.items() if state in reached}
    assert reached == set(EntryState)
    with pytest.raises(AssertionError, match="PUBLISH while READING"):
        fire(EntryState.READING, EntryEvent.PUBLISH)
