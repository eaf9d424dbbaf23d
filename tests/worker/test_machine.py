"""The state machines: every reachable state, checked; and the diagram in the docs."""

from pathlib import Path

import pytest

from sipipe.worker.machine import TABLE, Event, Role, State, Status, fire, may, mermaid

DOCS = Path(__file__).parents[2] / "docs" / "execution.md"


def successors(status):
    for role in Role:
        for event in Event:
            if may(status, role, event):
                yield fire(status, role, event)


def reachable(versions, iterations):
    """Every status that any order of events leads to, up to ``iterations``."""
    seen = {Status(versions)}
    frontier = [Status(versions)]
    while frontier:
        for following in successors(frontier.pop()):
            if following not in seen and following.ci < iterations:
                seen.add(following)
                frontier.append(following)
    return seen


@pytest.mark.parametrize("versions", [1, 2, 3, 4])
def test_no_reachable_state_overwrites_what_is_or_will_be_read(versions):
    states = reachable(versions, iterations=3 * versions + 2)
    assert any(status.writing is not None and status.reading is not None for status in states) == (
        versions > 1
    )
    for status in states:
        assert -1 <= status.gi <= status.ci
        assert status.ci - status.gi <= versions
        unread = range(status.gi + 1, status.ci + 1)
        held = [*unread, *([status.reading] if status.reading is not None else [])]
        busy = [status.version(iteration) for iteration in held]
        assert len(set(busy)) == len(busy), "two iterations in one version"
        if status.writing is not None:
            assert status.version(status.writing) not in busy


@pytest.mark.parametrize("versions", [1, 2, 3])
def test_something_can_always_go_on(versions):
    for status in reachable(versions, iterations=8):
        if State.STOPPED not in (status.cpu, status.device):
            going = [(role, event) for role in Role for event in Event if may(status, role, event)]
            assert {event for _, event in going} - {Event.STOP}, status


def test_with_two_versions_and_a_busy_device_the_rule_is_the_papers():
    for status in reachable(2, iterations=10):
        if status.device is State.RUNNING and status.cpu is State.WAIT:
            assert may(status, Role.CPU, Event.START) == (status.ci == status.gi)


def test_one_version_prepares_and_runs_in_turn():
    for status in reachable(1, iterations=10):
        assert status.writing is None or status.reading is None


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_an_unlisted_event_is_refused_by_name(role, state, event):
    if (role, state, event) in TABLE:
        return
    kwargs = {"cpu" if role is Role.CPU else "device": state}
    status = Status(2, ci=0, gi=-1, **kwargs)
    assert not may(status, role, event)
    with pytest.raises(AssertionError, match=f"{role.value}: no {event.value} in state"):
        fire(status, role, event)


def test_a_guard_that_does_not_hold_is_refused_with_the_indicators():
    with pytest.raises(AssertionError, match=r"CI > GI \(CI 3, GI 3, 2 versions\)"):
        fire(Status(2, ci=3, gi=3), Role.DEVICE, Event.START)
    with pytest.raises(AssertionError, match="a version is free"):
        fire(Status(2, device=State.RUNNING, ci=4, gi=3), Role.CPU, Event.START)


def test_the_diagram_in_the_docs_is_the_tables():
    assert f"```mermaid\n{mermaid()}```" in DOCS.read_text(), (
        "docs/execution.md is stale: paste what sipipe.worker.machine.mermaid() returns"
    )
