"""What the package exports, what it may import, and that its documents are up to date."""

import subprocess
import sys
from pathlib import Path

import pytest

import sipipe.channels
from sipipe.channels.slot import TRANSITIONS, SlotEvent, SlotState, fire, mermaid

DOCUMENT = Path(__file__).parents[2] / "docs" / "channels.md"


def test_exports_are_sorted_and_there():
    names = sipipe.channels.__all__
    assert names == sorted(names, key=lambda name: (name.islower(), name))
    for name in names:
        assert getattr(sipipe.channels, name).__doc__


def test_import_brings_neither_torch_nor_vllm():
    code = "import sys, sipipe.channels; print([m for m in ('torch','vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_diagram_in_the_document_is_the_tables():
    assert f"```mermaid\n{mermaid()}```" in DOCUMENT.read_text(), (
        "docs/channels.md: replace the slot diagram by the output of "
        '`python -c "from sipipe.channels.slot import mermaid; print(mermaid())"`'
    )


def test_an_unlisted_event_is_a_bug_of_ours():
    for state in SlotState:
        for event in SlotEvent:
            if (state, event) in TRANSITIONS:
                assert fire(state, event) is TRANSITIONS[state, event]
            else:
                with pytest.raises(AssertionError, match=f"slot: {event.name} while {state.name}"):
                    fire(state, event)


def test_every_state_is_reached():
    reached = {SlotState.FREE}
    for _ in SlotState:
        reached |= {after for (state, _), after in TRANSITIONS.items() if state in reached}
    assert reached == set(SlotState)
