"""Which thread may go on: every reachable state, checked."""

import copy

import pytest

from sipipe.worker.double_buffer import Turns


def key(turns):
    return (turns.writing, turns.prepared, turns.taken, turns.finished)


def reading(turns):
    return turns.taken > turns.finished


def successors(turns):
    """Every turn that the threads can take."""
    moves = []
    if turns.may_write:
        moves.append("start_write")
    if turns.writing:
        moves.append("end_write")
    if turns.may_read:
        moves.append("start_read")
    if reading(turns):
        moves.append("end_read")
    for move in moves:
        after = copy.copy(turns)
        getattr(after, move)()
        yield after


def reachable(sets, iterations):
    """Every state that any order of turns leads to, up to ``iterations``."""
    seen = {key(Turns(sets)): Turns(sets)}
    frontier = [Turns(sets)]
    while frontier:
        for following in successors(frontier.pop()):
            if key(following) not in seen and following.prepared <= iterations:
                seen[key(following)] = following
                frontier.append(following)
    return list(seen.values())


@pytest.mark.parametrize("sets", [1, 2, 3, 4])
def test_every_reachable_state_keeps_what_is_to_be_read_and_goes_on(sets):
    states = reachable(sets, iterations=3 * sets + 2)
    assert any(turns.writing and reading(turns) for turns in states) == (sets > 1)
    for turns in states:
        assert turns.finished <= turns.taken <= turns.prepared <= turns.finished + sets
        assert turns.taken <= turns.finished + 1
        held = [iteration % sets for iteration in range(turns.finished, turns.prepared)]
        assert len(set(held)) == len(held), "two iterations in one set"
        if turns.writing:
            assert turns.prepared % sets not in held
        assert turns.may_write or turns.may_read or turns.writing or reading(turns), "all wait"


def test_with_two_sets_and_a_busy_device_the_rule_is_the_papers():
    """CI == GI, where both are one less than the counts."""
    for turns in reachable(2, iterations=10):
        if reading(turns) and not turns.writing:
            assert turns.may_write == (turns.prepared == turns.taken)


@pytest.mark.parametrize("sets", [1, 2, 3])
@pytest.mark.parametrize("move", ["start_write", "end_write", "start_read", "end_read"])
def test_a_turn_out_of_order_is_refused_and_names_the_counts(sets, move):
    allowed = {"start_write": lambda t: t.may_write, "end_write": lambda t: t.writing}
    allowed |= {"start_read": lambda t: t.may_read, "end_read": reading}
    refused = 0
    for turns in reachable(sets, iterations=5):
        if not allowed[move](turns):
            refused += 1
            with pytest.raises(AssertionError, match=f"sets={sets}, prepared={turns.prepared}"):
                getattr(turns, move)()
    assert refused
